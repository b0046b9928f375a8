"""torchcomp.algorithms has the old names of 2Direction for one release."""

import importlib

import pytest

from torchcomp import algorithms, two_direction

MOVED = {name: name for name in ("Ranks", "Simulated", "TwoDirection", "TwoDirectionMethod")}


@pytest.mark.parametrize(("old", "new"), [*MOVED.items(), ("parameters", "theory")])
def test_an_old_name_warns_and_is_the_new_object(old, new):
    with pytest.warns(DeprecationWarning, match=rf"torchcomp\.two_direction\.{new}\b"):
        assert getattr(algorithms, old) is getattr(two_direction, new)


@pytest.mark.parametrize("name", ["ConstantMomentumAGD", "EF21P", "EF21PDIANA"])
def test_the_name_of_a_baseline_says_where_it_is(name):
    with pytest.raises(ImportError) as caught:
        exec(f"from torchcomp.algorithms import {name}")
    (path,) = (word for word in str(caught.value).split() if word.startswith("recipes/"))
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert hasattr(module, name)


def test_another_name_is_unknown():
    assert not hasattr(algorithms, "SGD")
