"""Small data sets for the upstream scripts, made on this machine: digits as JPEG files, and tokens.

Both are the same on every machine with the same library versions.
"""

import pickle
from colorsys import hsv_to_rgb
from pathlib import Path

import numpy as np

_TEST_SHARE = 5
_SYMBOLS = 64
_TOKENS = {"train": 200_000, "val": 20_000}


def write_image_folder(folder: Path) -> None:
    """Write scikit-learn's handwritten digits as JPEG files, one sub-folder per class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for index, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        split = "train" if index % _TEST_SHARE else "val"
        path = folder / split / str(label) / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        colour = np.array(hsv_to_rgb(label / 10, 1, 1)) * 255 / 16
        tiles = np.tile(pixels.reshape(8, 8, 1), (4, 4, 1)) * colour
        Image.fromarray(tiles.astype(np.uint8)).save(path)


def write_tokens(folder: Path) -> None:
    """Write ``train.bin``, ``val.bin`` (uint16) and ``meta.pkl``: a random Markov chain."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    chances = generator.dirichlet(np.full(_SYMBOLS, 0.05), size=_SYMBOLS)
    cumulative = chances.cumsum(-1)
    for split, length in _TOKENS.items():
        tokens = np.zeros(length, dtype=np.uint16)
        for index, draw in enumerate(generator.random(length - 1), start=1):
            row = cumulative[tokens[index - 1]]
            # Rounding can leave the last sum below the draw.
            tokens[index] = min(int(row.searchsorted(draw)), _SYMBOLS - 1)
        tokens.tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": _SYMBOLS}))
