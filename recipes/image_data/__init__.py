"""Image data sets in batches: three formats, two loaders, and one order for all."""

from recipes.image_data.batches import (
    Batches,
    DatasetSizes,
    dataset_sizes,
    open_batches,
    preset_of,
)

__all__ = ["Batches", "DatasetSizes", "dataset_sizes", "open_batches", "preset_of"]
