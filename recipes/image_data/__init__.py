"""Image data sets in batches: three formats, two loaders, and one order for all."""
