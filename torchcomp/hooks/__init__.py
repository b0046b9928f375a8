"""What the hooks of DDP and FSDP2 share: the handle, loss scales, learning rates, executors."""
