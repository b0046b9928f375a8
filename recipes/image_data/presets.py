"""Presets of the data sets: sizes, statistics and augmentation."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Preset:
    """Constants of one data set.

    Attributes:
        channels: of an image.
        size: height and width of an image in pixels; for photographs, after cropping.
        mean: of each channel, where pixels are 0 to 255 (digits: 0 to 16).
        std: standard deviation of each channel, in the same unit.
        shift: maximum random shift in pixels, a random crop of the padded image.
        mirror: whether to mirror images at random.
        photographs: whether the images have different sizes and are cropped to ``size``.
        crop_ratio: share of the shorter side that the crop of a test photograph keeps.
        train_images: number of training images, or 0 if not known in advance.
        test_images: likewise.
        classes: likewise.
    """

    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: int
    mirror: bool
    photographs: bool
    crop_ratio: float = 224 / 256
    train_images: int = 0
    test_images: int = 0
    classes: int = 0


_PHOTOGRAPHS = Preset(
    channels=3,
    size=224,
    # ImageNet's usual statistics (0.485, 0.456, 0.406 and 0.229, 0.224, 0.225), times 255.
    mean=(123.675, 116.28, 103.53),
    std=(58.395, 57.12, 57.375),
    shift=0,
    mirror=True,
    photographs=True,
)

PRESETS = {
    "digits": Preset(
        channels=1,
        size=8,
        mean=(4.884,),
        std=(6.017,),
        shift=1,
        # A mirrored digit is not a digit.
        mirror=False,
        photographs=False,
        train_images=1442,
        test_images=355,
        classes=10,
    ),
    "cifar10": Preset(
        channels=3,
        size=32,
        mean=(125.31, 122.95, 113.87),
        std=(62.99, 62.09, 66.70),
        # The usual augmentation of CIFAR-10: pad by 4, crop, mirror.
        shift=4,
        mirror=True,
        photographs=False,
        train_images=50_000,
        test_images=10_000,
        classes=10,
    ),
    "imagenet": replace(_PHOTOGRAPHS, train_images=1_281_167, test_images=50_000, classes=1000),
    # Its sizes are known when it is opened.
    "folder": _PHOTOGRAPHS,
}
