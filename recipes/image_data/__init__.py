"""Images in batches: three kinds of data set, two loaders, one order."""

from recipes.image_data.batches import Batches, Facts, facts, open_batches, preset_of

__all__ = ["Batches", "Facts", "facts", "open_batches", "preset_of"]
