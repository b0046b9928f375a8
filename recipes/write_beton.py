"""Convert an image folder to ``.beton`` files for FFCV.

    python -m recipes.write_beton --source IMAGENET --out BETONS

writes ``train_500_0.50_90.beton`` and ``val_500_0.50_90.beton``. Train from them with
``python -m recipes.train --dataset folder --data-path BETONS``.
"""

import argparse
import os
import sys
from pathlib import Path

from recipes.errors import exit_on_user_error
from recipes.image_data.beton import PhotographFormat, write_beton
from recipes.image_data.sources import FILE_WORDS, photographs


@exit_on_user_error()
def main() -> None:
    convert(parse(sys.argv[1:]))


def convert(arguments: argparse.Namespace) -> None:
    stored = PhotographFormat(arguments.max_resolution, arguments.jpeg_share, arguments.quality)
    for split, source in photographs(arguments.source).items():
        path = arguments.out / stored.file_name(FILE_WORDS[split])
        print(f"{len(source):,} images to {path}", flush=True)
        # A bar that is redrawn would fill a log file.
        write_beton(path, source, stored, arguments.workers, progress=sys.stderr.isatty())


def parse(words: list[str]) -> argparse.Namespace:
    default, cores = PhotographFormat(), len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--dataset", choices=("folder",), default="folder", help="what --source is [folder]")
    add("--source", type=Path, required=True, help="image folder, with train/CLASS and val/CLASS")
    add("--out", type=Path, required=True, help="folder for the .beton files")
    text = f"longest side in pixels; larger images are resized [{default.max_resolution}]"
    add("--max-resolution", type=int, default=default.max_resolution, help=text)
    text = f"share of the images that are stored as JPEG [{default.jpeg_share}]"
    add("--jpeg-share", type=float, default=default.jpeg_share, help=text)
    add("--quality", type=int, default=default.quality, help=f"of JPEG [{default.quality}]")
    add("--workers", type=int, default=cores, help="processes that encode images [one per core]")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
