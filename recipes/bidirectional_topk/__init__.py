"""Bidirectional TopK: its counterexample, its downlink traffic, and its accuracy."""
