"""Accelerate with compressed gradients or local steps.

torchrun --nproc-per-node 2 -m recipes.integrations.accelerate_train \
    --compress "ef(topk(0.01))" --out runs/accelerate
"""

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import torchcomp
from recipes.integrations import common


def main() -> None:
    args = common.parse()
    # A seedable sampler shuffles an epoch in the same order when the run is resumed.
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    set_seed(0)
    model = common.network()
    optimizer = common.adam(model)
    loader = DataLoader(common.dataset(), common.BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # The line for torchcomp, after prepare(), and what a checkpoint must contain of every rank.
    if args.compress:
        method = torchcomp.register(model, args.compress)
        ranks = torchcomp.Gathered(method)
    else:
        inner = optimizer.optimizer
        method = torchcomp.LocalSGD(model, inner, args.sync, total_steps=common.TOTAL_STEPS)
        ranks = torchcomp.Gathered(method, model=model, optimizer=inner)
    accelerator.register_for_checkpointing(ranks)

    first = 0
    if args.resume:
        accelerator.load_state(str(args.out / "checkpoint"))
        first = 1
    losses = []
    for epoch in range(first, common.EPOCHS):
        loader.set_epoch(epoch)
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(str(args.out / "checkpoint"))  # on all ranks
    common.report(args.out, accelerator.process_index, model, losses, method.stats)
    accelerator.end_training()


if __name__ == "__main__":
    main()
