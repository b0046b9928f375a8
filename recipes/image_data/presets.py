"""What is known about each data set before it is opened: sizes, statistics, augmentation."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Preset:
    """Facts and habits of one data set; means and deviations are in units of the stored bytes."""

    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # Random shifts of at most this many pixels (a crop of the padded image), and mirroring.
    shift: int
    mirror: bool
    # Photographs of all sizes, cropped to `size` while they are decoded; a test image keeps
    # `crop_ratio` of its shorter side.
    photographs: bool
    crop_ratio: float = 224 / 256
    train_images: int = 0
    test_images: int = 0
    classes: int = 0


_PHOTOGRAPHS = Preset(
    channels=3,
    size=224,
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
        shift=4,
        mirror=True,
        photographs=False,
        train_images=50_000,
        test_images=10_000,
        classes=10,
    ),
    "imagenet": replace(_PHOTOGRAPHS, train_images=1_281_167, test_images=50_000, classes=1000),
    "folder": _PHOTOGRAPHS,
}
