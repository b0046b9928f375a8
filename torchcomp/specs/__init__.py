"""Spec strings, the values of options, and the errors that they raise."""
