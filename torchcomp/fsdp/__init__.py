"""Binding to FSDP2: compressed exchange between the replicas of a sharded model."""
