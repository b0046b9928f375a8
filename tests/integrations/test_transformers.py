"""transformers: the script of its Trainer resumes, and wrong uses are refused."""

from types import SimpleNamespace

import pytest
from torch import nn

import torchcomp
from tests.integrations.scripts import TORCHRUN, both_methods, check_resumes, integrations, python

pytestmark = [integrations, pytest.mark.filterwarnings("ignore")]


@both_methods
def test_the_script_resumes_bit_for_bit(tmp_path, method):
    check_resumes("transformers_train", tmp_path, method)
    # The same checkpoint without the callback's file.
    (tmp_path / "checkpoint-16/torchcomp.pt").unlink()
    command = (*method, "--out", str(tmp_path), "--resume")
    done = python(*TORCHRUN, "recipes.integrations.transformers_train", *command, check=False)
    assert done.returncode
    assert "CheckpointError" in done.stderr
    assert "resume_from=" in done.stderr


def test_a_trainer_without_ddp_is_refused():
    from transformers import Trainer, TrainingArguments

    from torchcomp.integrations.transformers import CompressionCallback

    callback = CompressionCallback(SimpleNamespace(model_wrapped=nn.Linear(2, 2)), "mean")
    with pytest.raises(torchcomp.UnsupportedModelError, match="accelerate launch"):
        callback.on_train_begin(None, None, None)
    trainer = Trainer(nn.Linear(2, 2), TrainingArguments(use_cpu=True, report_to="none"))
    with pytest.raises(torchcomp.UnsupportedModelError, match="docs/integrations"):
        torchcomp.register(trainer, "mean")
