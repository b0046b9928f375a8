"""Convert CIFAR-10's archive or an image folder to FFCV's ``.beton`` files.

    python -m recipes.write_beton --dataset folder --source IMAGENET --out BETONS

writes ``train_500_0.50_90.beton`` and ``val_500_0.50_90.beton`` for ``--data-path BETONS``.
"""

import argparse
import os
import sys
from pathlib import Path

from recipes.errors import RecipeError
from recipes.image_data import sources
from recipes.image_data.beton import PhotographFormat, write_beton


def main() -> None:
    """Convert both splits; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    try:
        convert(arguments)
    except RecipeError as error:
        sys.exit(f"error: {error}")
    except ImportError as error:
        sys.exit(f"error: ffcv cannot be imported ({error}); it is what writes .beton files")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    usual = PhotographFormat()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--dataset", choices=("cifar10", "folder"), required=True)
    parser.add_argument("--source", type=Path, required=True, help="archive or image folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the .beton files")
    parser.add_argument("--max-resolution", type=int, default=usual.max_resolution)
    parser.add_argument("--jpeg-share", type=float, default=usual.jpeg_share)
    parser.add_argument("--quality", type=int, default=usual.quality)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args(arguments)


def convert(arguments: argparse.Namespace) -> None:
    """Write one file a split."""
    style = PhotographFormat(arguments.max_resolution, arguments.jpeg_share, arguments.quality)
    if not arguments.source.exists():
        raise RecipeError(f"--source {arguments.source} does not exist")
    of_archive = arguments.dataset == "cifar10"
    read = sources.cifar10 if of_archive else sources.photographs
    for split, source in read(arguments.source).items():
        word = sources.FILE_WORDS[split]
        name = f"{word}_cifar10.beton" if of_archive else style.file_name(word)
        path = arguments.out / name
        print(f"{len(source):,} images to {path}", flush=True)
        progress = sys.stderr.isatty()
        write_beton(path, source, style, workers=arguments.workers, progress=progress)


if __name__ == "__main__":
    main()
