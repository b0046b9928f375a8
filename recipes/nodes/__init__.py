"""A small GPT on nodes with several ranks each: DDP, DDP in two levels, and HSDP with FSDP2."""
