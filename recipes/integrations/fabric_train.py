"""Lightning Fabric with compressed gradients or local steps.

torchrun --nproc-per-node 2 -m recipes.integrations.fabric_train \
    --compress "ef(topk(0.01))" --out runs/fabric
"""

from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import torchcomp
from recipes.integrations import common
from torchcomp.integrations.fabric import ddp_model


def main() -> None:
    args = common.parse()
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=common.RANKS)
    fabric.launch()
    model = common.network()
    model, optimizer = fabric.setup(model, common.adam(model))
    # Not shuffled: Fabric shuffles by how often this process has iterated over the loader, so a
    # resumed run would repeat the order of the first epoch.
    loader = fabric.setup_dataloaders(DataLoader(common.dataset(), common.BATCH))

    # The line for torchcomp, and what a checkpoint must contain of every rank.
    if args.compress:
        method = torchcomp.register(ddp_model(model), args.compress)
        ranks = torchcomp.Gathered(method)
    else:
        inner = optimizer.optimizer
        method = torchcomp.LocalSGD(
            ddp_model(model), inner, args.sync, total_steps=common.TOTAL_STEPS
        )
        ranks = torchcomp.Gathered(method, model=model, optimizer=inner)

    # `ranks` comes last: it overwrites what Fabric saved of rank 0.
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "ranks": ranks}
    path = args.out / "checkpoint.pt"
    if args.resume:
        fabric.load(path, state)

    losses = []
    for epoch in range(state["epoch"], common.EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        if epoch == 0:
            fabric.save(path, {**state, "epoch": epoch + 1})  # on all ranks
    common.report(args.out, fabric.global_rank, model, losses, method.stats)


if __name__ == "__main__":
    main()
