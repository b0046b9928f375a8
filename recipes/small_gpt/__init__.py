"""A small GPT trained with AdamW: what compression costs on short runs."""
