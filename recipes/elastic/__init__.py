"""Training under torchrun with restarts and changing numbers of ranks."""
