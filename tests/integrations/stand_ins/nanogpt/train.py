"""The idioms of nanoGPT's script, on noise.

It sets DDP's sync flag itself at every micro-step, rank 0 evaluates and saves alone in the middle,
and the run takes max_iters + 1 steps.
"""

import os
import sys

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

init_from, last_iter = sys.argv[1], int(sys.argv[2])
out_dir = "."
max_iters, eval_interval, warmup_iters, gradient_accumulation_steps = 12, 5, 0, 3

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group("gloo")
    ddp_rank = int(os.environ["RANK"])
master_process = not ddp or ddp_rank == 0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters())
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(f"{out_dir}/ckpt.pt", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]

if ddp:
    model = DDP(model)


def loss_of(index):
    generator = torch.Generator().manual_seed(1000 * ddp_rank + index)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


@torch.no_grad()
def estimate_loss():
    return loss_of(0).item()


raw_model = model.module if ddp else model
while True:
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * (1 - iter_num / (max_iters + 1))
    if iter_num % eval_interval == 0 and master_process:
        print(f"{iter_num}: {estimate_loss():.4f}")
        if iter_num > 0:
            parts = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "iter_num": iter_num}, f"{out_dir}/ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = loss_of(gradient_accumulation_steps * iter_num + micro_step)
        scaler.scale(loss / gradient_accumulation_steps).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > min(max_iters, last_iter):
        break

torch.save({"weights": raw_model.state_dict()}, f"{out_dir}/final.rank{ddp_rank}")
if ddp:
    destroy_process_group()
