"""The engine: averages named tensors, step after step."""
