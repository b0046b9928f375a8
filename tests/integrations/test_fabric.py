"""Fabric: its script resumes, and other modules are refused."""

import pytest
from torch import nn

import torchcomp
from tests.integrations.scripts import both_methods, check_resumes, integrations
from torchcomp.integrations.fabric import ddp_model

pytestmark = [integrations, pytest.mark.filterwarnings("ignore")]


@both_methods
def test_the_script_resumes_bit_for_bit(tmp_path, method):
    check_resumes("fabric_train", tmp_path, method)


def test_modules_without_ddp_are_refused():
    from lightning.fabric import Fabric

    wrapped = Fabric(accelerator="cpu", devices=1).setup(nn.Linear(2, 2))
    with pytest.raises(torchcomp.UnsupportedModelError, match="docs/integrations"):
        torchcomp.register(wrapped, "mean")
    with pytest.raises(torchcomp.UnsupportedModelError, match=r"strategy='ddp'"):
        ddp_model(wrapped)
    with pytest.raises(torchcomp.UnsupportedModelError, match=r"fabric\.setup"):
        ddp_model(nn.Linear(2, 2))
