"""Names of the baselines. net/methods.py attaches them to a model."""

FLOOR, PLAIN, BF16, POWERSGD, NAIVE_TOPK = "no-op", "ddp", "bf16", "powersgd-1", "naive-topk"
BASELINES = (FLOOR, PLAIN, BF16, POWERSGD, NAIVE_TOPK)
