"""Accelerate: its script resumes, and what was not prepared for several processes is refused."""

import pytest
import torch
from torch import nn

import torchcomp
from tests.integrations.scripts import both_methods, check_resumes, integrations

pytestmark = [integrations, pytest.mark.filterwarnings("ignore")]


@both_methods
def test_the_script_resumes_bit_for_bit(tmp_path, method):
    check_resumes("accelerate_train", tmp_path, method)


def test_a_model_prepared_in_one_process_is_refused():
    from accelerate import Accelerator

    model = Accelerator(cpu=True).prepare(nn.Linear(2, 2))
    with pytest.raises(torchcomp.UnsupportedModelError, match="docs/integrations"):
        torchcomp.register(model, "mean")


def test_an_accelerator_is_refused():
    from accelerate import Accelerator

    with pytest.raises(torchcomp.UnsupportedModelError, match="docs/integrations"):
        torchcomp.register(Accelerator(cpu=True), "mean")


def test_the_prepared_optimizer_has_the_inner_one_that_the_error_names():
    from accelerate import Accelerator

    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    assert isinstance(vars(optimizer)["optimizer"], torch.optim.SGD)
    assert not hasattr(optimizer, "_optimizer_step_pre_hooks")
