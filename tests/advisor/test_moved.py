"""Old names of the advisor: they work with a warning."""

import importlib
import sys

import pytest

import torchcomp
from torchcomp import advisor

OLD = [("torchcomp", "Link", advisor.Link), ("torchcomp.step_model", "record", advisor.record)]
OLD += [("torchcomp.doctor", "examine", None), ("torchcomp.named_models", "build_named", None)]
OLD += [("torchcomp.torchvision_compat", "import_torchvision", None)]


@pytest.mark.parametrize(("module", "name", "new"), OLD)
def test_an_old_name_is_the_new_one_with_a_warning(module, name, new):
    assert module == "torchcomp" or getattr(torchcomp, module[10:]) is sys.modules[module]
    with pytest.warns(DeprecationWarning, match=r"torchcomp\.advisor") as warned:
        found = getattr(importlib.import_module(module), name)
    assert found is new or (new is None and found.__module__.startswith("torchcomp.advisor."))
    assert warned[0].filename == __file__
