"""State dicts: saved, checked, loaded, and made for another number of ranks."""
