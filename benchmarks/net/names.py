"""Names of the methods to compare with, which are not torchcomp's; net/methods.py attaches them."""

FLOOR, PLAIN, BF16, POWERSGD, NAIVE_TOPK = "no-op", "ddp", "bf16", "powersgd-1", "naive-topk"
BASELINES = (FLOOR, PLAIN, BF16, POWERSGD, NAIVE_TOPK)
