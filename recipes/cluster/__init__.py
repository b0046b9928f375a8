"""Runs on clusters: Slurm, Kubernetes, and NCCL's settings for Ethernet."""
