"""Convert CIFAR-10's archive or an image folder to ``.beton`` files for FFCV.

    python -m recipes.write_beton --dataset folder --source IMAGENET --out BETONS

writes ``train_500_0.50_90.beton`` and ``val_500_0.50_90.beton``. Train from them with
``python -m recipes.train --dataset folder --data-path BETONS``.
"""

import argparse
import os
import sys
from pathlib import Path

from recipes.errors import RecipeError, exit_on_user_error
from recipes.image_data import sources
from recipes.image_data.beton import INSTALL_FFCV, PhotographFormat, write_beton


def main() -> None:
    """Convert both splits."""
    arguments = parse(sys.argv[1:])
    with exit_on_user_error():
        try:
            convert(arguments)
        except ImportError as error:
            raise RecipeError(f".beton files need ffcv: {INSTALL_FFCV} ({error})") from None


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    default = PhotographFormat()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--dataset", choices=("cifar10", "folder"), required=True)
    parser.add_argument(
        "--source", type=Path, required=True, help="CIFAR-10's archive, or an image folder"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the .beton files")
    parser.add_argument("--max-resolution", type=int, default=default.max_resolution)
    parser.add_argument("--jpeg-share", type=float, default=default.jpeg_share)
    parser.add_argument("--quality", type=int, default=default.quality)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args(arguments)


def convert(arguments: argparse.Namespace) -> None:
    """Write one file per split."""
    photograph_format = PhotographFormat(
        arguments.max_resolution, arguments.jpeg_share, arguments.quality
    )
    if not arguments.source.exists():
        raise RecipeError(
            f"--source {arguments.source} does not exist; expected CIFAR-10's archive or a folder"
        )
    is_cifar = arguments.dataset == "cifar10"
    read = sources.cifar10 if is_cifar else sources.photographs
    for split, source in read(arguments.source).items():
        word = sources.FILE_WORDS[split]
        name = f"{word}_cifar10.beton" if is_cifar else photograph_format.file_name(word)
        path = arguments.out / name
        print(f"{len(source):,} images to {path}", flush=True)
        # A bar that is redrawn would fill a log file.
        progress = sys.stderr.isatty()
        write_beton(path, source, photograph_format, workers=arguments.workers, progress=progress)


if __name__ == "__main__":
    main()
