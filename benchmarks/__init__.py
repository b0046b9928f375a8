"""Measurements: `python -m benchmarks.network --help`."""
