"""torchcomp.algorithms has the old names of 2Direction for one release."""

import pytest

from torchcomp import algorithms, two_direction

MOVED = {name: name for name in ("Ranks", "Simulated", "TwoDirection", "TwoDirectionMethod")}


@pytest.mark.parametrize(("old", "new"), [*MOVED.items(), ("parameters", "theory")])
def test_an_old_name_warns_and_is_the_new_object(old, new):
    with pytest.warns(DeprecationWarning, match=rf"torchcomp\.two_direction\.{new}\b"):
        assert getattr(algorithms, old) is getattr(two_direction, new)


def test_another_name_is_unknown():
    assert not hasattr(algorithms, "SGD")
