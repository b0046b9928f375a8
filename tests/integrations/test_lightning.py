"""Lightning: its script resumes, under both names of the package, and refuses other strategies."""

import pytest
import torch
from torch.utils.data import DataLoader

import torchcomp
from recipes.integrations import common
from tests.integrations.scripts import both_methods, check_resumes, integrations

pytestmark = [integrations, pytest.mark.filterwarnings("ignore")]


@both_methods
def test_the_script_resumes_bit_for_bit(tmp_path, method):
    check_resumes("lightning_train", tmp_path, method)


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

    trainer = package.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[callback],
        **{"max_epochs": 1, **options},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(common.dataset(), common.BATCH))
    return trainer


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


def test_a_module_and_a_trainer_are_refused():
    import lightning

    for wrong in (lightning.LightningModule(), lightning.Trainer(accelerator="cpu")):
        with pytest.raises(torchcomp.UnsupportedModelError, match="docs/integrations"):
            torchcomp.register(wrong, "mean")
