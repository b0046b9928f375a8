"""Scripts of frameworks resume bit for bit, and what cannot work is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchcomp
from recipes.integrations import common
from tests.integrations.scripts import METHODS, TORCHRUN, check_resumes, integrations, python
from torchcomp.integrations.fabric import ddp_model

pytestmark = [integrations, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

NAMES = ["accelerate_train", "fabric_train", "lightning_train", "ray_train", "transformers_train"]


@pytest.mark.parametrize("method", METHODS, ids=["compress", "sync"])
@pytest.mark.parametrize("name", NAMES)
def test_a_script_resumes_bit_for_bit(name, method, tmp_path):
    launcher = ["-m"] if name == "ray_train" else TORCHRUN
    check_resumes(name, tmp_path, method, launcher)
    if name == "transformers_train":
        # The same checkpoint without the callback's file.
        (tmp_path / "checkpoint-16/torchcomp.pt").unlink()
        command = (*method, "--out", str(tmp_path), "--resume")
        done = python(*TORCHRUN, f"recipes.integrations.{name}", *command, check=False)
        assert done.returncode
        assert "CheckpointError" in done.stderr
        assert "resume_from=" in done.stderr


def of_fabric():
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup(nn.Linear(2, 2))


def test_what_is_no_ddp_model_is_refused():
    import lightning
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(
        nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    )
    arguments = TrainingArguments(use_cpu=True, report_to="none")  # resets Accelerate's state
    for wrong in (
        accelerator,
        prepared,
        of_fabric(),
        lightning.LightningModule(),
        lightning.Trainer(accelerator="cpu"),
        Trainer(nn.Linear(2, 2), arguments),
    ):
        with pytest.raises(torchcomp.UnsupportedModelError, match="docs/integrations"):
            torchcomp.register(wrong, "mean")
    # The optimizer of accelerate has the inner one that the error names.
    assert isinstance(vars(optimizer)["optimizer"], torch.optim.SGD)
    assert not hasattr(optimizer, "_optimizer_step_pre_hooks")


def test_other_modules_than_those_of_fabric_and_a_trainer_without_ddp_are_refused():
    from torchcomp.integrations.transformers import CompressionCallback

    for module in (of_fabric(), nn.Linear(2, 2)):
        with pytest.raises(torchcomp.UnsupportedModelError, match=r"setup.*strategy='ddp'"):
            ddp_model(module)
    callback = CompressionCallback(SimpleNamespace(model_wrapped=nn.Linear(2, 2)), "mean")
    with pytest.raises(torchcomp.UnsupportedModelError, match="accelerate launch"):
        callback.on_train_begin(None, None, None)


def fit(package, callback, strategy, **options):
    """Train for an epoch on one rank, with a class of this package."""

    class Model(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = common.network()

        def training_step(self, batch, index):
            inputs, labels = batch
            return torch.nn.functional.cross_entropy(self.network(inputs), labels)

        def configure_optimizers(self):
            return common.adam(self)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options}
    trainer = package.Trainer(strategy=strategy, callbacks=[callback], **options)
    trainer.fit(Model(), DataLoader(common.dataset(), common.BATCH))


def test_it_works_with_the_older_package_name_and_a_second_fit():
    import pytorch_lightning

    from torchcomp.integrations.lightning import Compression, LocalSteps

    compression, steps = Compression("ef(topk(0.05))", seed=3), LocalSteps("every(3)")
    for _ in range(2):
        fit(pytorch_lightning, compression, "ddp")
        assert compression.handle.stats.steps == 32
        assert compression.handle.averager.seed == 3
        fit(pytorch_lightning, steps, "ddp")
        assert steps.sync.stats.steps == 32
    torch.distributed.destroy_process_group()


def test_what_cannot_work_is_refused_when_training_starts():
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from torchcomp.integrations.lightning import Compression, LocalSteps

    with pytest.raises(torchcomp.UnsupportedModelError, match=r"Single\w+.*strategy='ddp'"):
        fit(lightning, Compression("mean"), "auto")
    hooked = DDPStrategy(ddp_comm_hook=fp16_compress_hook)
    with pytest.raises(torchcomp.UnsupportedModelError, match="ddp_comm_hook"):
        fit(lightning, Compression("mean"), hooked)
    with pytest.raises(torchcomp.SpecError, match="total_steps"):
        fit(lightning, LocalSteps("every(3)"), "ddp", max_epochs=-1)
    torch.distributed.destroy_process_group()
