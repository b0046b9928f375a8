"""Presets of the data sets: sizes, statistics and augmentation."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Preset:
    """Constants of one data set. Numbers of images and classes are 0 where a folder tells them."""

    channels: int
    size: int  # height and width in pixels; of photographs after cropping
    mean: tuple[float, ...]  # of each channel, where pixels are 0 to 255 (digits: 0 to 16)
    std: tuple[float, ...]
    shift: int = 0  # maximum random shift in pixels, a random crop of the padded image
    mirror: bool = False  # whether to mirror images at random
    train_images: int = 0
    test_images: int = 0
    classes: int = 0
    photographs: bool = False  # whether images have different sizes and are cropped to `size`
    crop_ratio: float = 224 / 256  # share of the shorter side that a test photograph keeps


# ImageNet's usual statistics (0.485, 0.456, 0.406 and 0.229, 0.224, 0.225), times 255.
_PHOTOGRAPHS = Preset(
    *(3, 224, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)), mirror=True, photographs=True
)
# The usual augmentation of CIFAR-10: pad by 4, crop, mirror. A mirrored digit is not a digit.
PRESETS = {
    "digits": Preset(1, 8, (4.884,), (6.017,), 1, False, 1442, 355, 10),
    "mnist": Preset(1, 28, (33.32,), (78.57,), 0, False, 60_000, 10_000, 10),
    "fashion-mnist": Preset(1, 28, (72.94,), (90.02,), 0, True, 60_000, 10_000, 10),
    "svhn": Preset(
        *(3, 32, (111.61, 113.16, 120.57), (50.50, 51.26, 50.24)), *(4, False, 73_257, 26_032, 10)
    ),
    "cifar10": Preset(
        *(3, 32, (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)), *(4, True, 50_000, 10_000, 10)
    ),
    "cifar100": Preset(
        *(3, 32, (129.30, 124.07, 112.43), (68.17, 65.39, 70.42)), *(4, True, 50_000, 10_000, 100)
    ),
    "imagenet": replace(_PHOTOGRAPHS, train_images=1_281_167, test_images=50_000, classes=1000),
    # Its sizes are known when it is opened.
    "folder": _PHOTOGRAPHS,
}
