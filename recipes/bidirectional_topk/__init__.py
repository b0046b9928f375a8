"""Bidirectional TopK: its counterexample, and bytes and accuracy by number of workers."""
