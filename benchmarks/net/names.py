"""Names of the baselines. net/methods.py attaches them to a model."""

FLOOR, PLAIN, BF16, POWERSGD, NAIVE_TOPK = "no-op", "ddp", "bf16", "powersgd-1", "naive-topk"
ONE_VALUE = "one-value"
BASELINES = (FLOOR, PLAIN, BF16, POWERSGD, NAIVE_TOPK, ONE_VALUE)
