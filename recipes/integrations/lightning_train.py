"""Lightning's Trainer with compressed gradients or local steps.

torchrun --nproc-per-node 2 -m recipes.integrations.lightning_train \
    --compress "ef(topk(0.01))" --out runs/lightning
"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from recipes.integrations import common
from torchcomp.integrations.lightning import Compression, LocalSteps


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = common.network()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.network(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return common.adam(self)


def main() -> None:
    args = common.parse()
    # The line for torchcomp is a callback. Lightning's checkpoints then contain its state.
    callback = Compression(args.compress) if args.compress else LocalSteps(args.sync)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=common.RANKS,
        max_epochs=common.EPOCHS,
        callbacks=[callback, ModelCheckpoint(args.out, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    loader = DataLoader(common.dataset(), common.BATCH, shuffle=True)
    trainer.fit(model, loader, ckpt_path=args.out / "epoch=0.ckpt" if args.resume else None)
    method = callback.handle if args.compress else callback.sync
    common.report(args.out, trainer.global_rank, model, model.losses, method.stats)


if __name__ == "__main__":
    main()
