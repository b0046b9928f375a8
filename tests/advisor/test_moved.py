"""Old names of the advisor: they work with a warning, and those that are gone say what to use."""

import importlib
import sys

import pytest

import torchcomp
from torchcomp import advisor, explain


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [
        ("torchcomp", "Link", advisor.Link),
        ("torchcomp.step_model", "record", advisor.record),
        ("torchcomp.doctor", "examine", None),
        ("torchcomp.named_models", "build_named", None),
        ("torchcomp.torchvision_compat", "import_torchvision", None),
    ],
)
def test_an_old_name_is_the_new_one_with_a_warning(module, name, new):
    assert module == "torchcomp" or getattr(torchcomp, module[10:]) is sys.modules[module]
    with pytest.warns(DeprecationWarning, match=r"torchcomp\.advisor") as warned:
        found = getattr(importlib.import_module(module), name)
    assert found is new or (new is None and found.__module__.startswith("torchcomp.advisor."))
    assert warned[0].filename == __file__


def test_explain_predicts_a_run_as_plan_does_with_a_warning():
    link, run = advisor.Link(1.0), {"world_size": 8, "step_seconds": 0.01, "total_steps": 50}
    size = {"numel": 100_000}
    with pytest.warns(DeprecationWarning, match=r"advisor\.plan") as warned:
        old = explain("ef(topk(0.01))", link=link, **size, **run)
    assert warned[0].filename == __file__
    new = advisor.plan("ef(topk(0.01))", advisor.Run(**run), link, **size)
    assert old.training.bytes_per_step == new.bytes_per_step == 8 * old.bytes_sent
    shown = {line[2:19].strip() for line in str(old).split("\n")}
    assert {"predicted step", "whole run"} <= shown
    assert explain("ef(topk(0.01))", world_size=8, **size).training is None


@pytest.mark.parametrize(
    "bad", [{"step_seconds": None}, {"total_steps": None}, {"link": None}, {"outer": "nesterov"}]
)
def test_a_run_of_explain_needs_a_link_its_steps_and_their_seconds(bad):
    run = {"numel": 1000, "world_size": 8, "step_seconds": 0.1, "total_steps": 10}
    with pytest.raises(torchcomp.SpecError):
        explain("every(2)", **{**run, "link": advisor.Link(1.0), **bad})


@pytest.mark.parametrize("name", ["TimeModel", "WallClock", "fit_time_model"])
def test_what_is_gone_names_its_successor(name):
    with pytest.raises(AttributeError, match=r"torchcomp\.advisor\.plan"):
        getattr(torchcomp, name)
