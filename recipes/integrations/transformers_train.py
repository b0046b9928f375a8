"""The Trainer of transformers with compressed gradients or local steps, on a tiny GPT-2.

torchrun --nproc-per-node 2 -m recipes.integrations.transformers_train \
    --compress "ef(topk(0.01))" --out runs/transformers
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from recipes.integrations import common
from torchcomp.integrations.transformers import CompressionCallback, LocalStepsCallback

LENGTH, VOCABULARY = 16, 32


class Counting(Dataset):
    """Sequences that count up from a random number."""

    def __len__(self) -> int:
        return common.SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.randint(VOCABULARY, (), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    args = common.parse()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32}
    config = GPT2Config(**sizes, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    settings = TrainingArguments(
        output_dir=str(args.out),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=common.BATCH,
        num_train_epochs=common.EPOCHS,
        learning_rate=0.01,
        save_strategy="epoch",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=Counting())

    # The line for torchcomp. The Trainer's checkpoints then contain its state.
    kind, spec = (CompressionCallback, args.compress)
    if args.sync:
        kind, spec = (LocalStepsCallback, args.sync)
    callback = kind(trainer, spec)
    trainer.add_callback(callback)

    half = common.TOTAL_STEPS // common.EPOCHS
    path = str(args.out / f"checkpoint-{half}") if args.resume else None
    trainer.train(resume_from_checkpoint=path)
    # The log also has the steps before the checkpoint.
    first = half if args.resume else 0
    logged = [entry for entry in trainer.state.log_history if entry["step"] > first]
    losses = [entry["loss"] for entry in logged if "loss" in entry]
    method = callback.handle if args.compress else callback.sync
    common.report(args.out, settings.process_index, trainer.model, losses, method.stats)


if __name__ == "__main__":
    main()
