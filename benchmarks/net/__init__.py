"""Hosts on one machine, joined by shaped links, and what is measured on them."""
