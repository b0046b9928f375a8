"""Advisor: which method to use, and what to expect of it. Nothing in the rooms depends on it."""
