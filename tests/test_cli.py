"""Command line: its output, its error messages and its exit status."""

import importlib
import re
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import torchcomp
from tests.support.cases import only
from tests.support.patience import PATIENCE
from torchcomp.advisor.command import main
from torchcomp.advisor.named_models import build_named
from torchcomp.local_sgd.outer_steps import OuterStep
from torchcomp.specs.component import choices_of
from torchcomp.specs.learning_rates import decaying
from torchcomp.specs.spec import COMPONENTS, parse_outer_step, parse_registered

SIZE = ["--numel", "25557032", "--world-size", "8"]
QSR = ["explain", "qsr(0.1, 4)", *SIZE, "--total-steps", "9"]
TINY = SimpleNamespace(list_models=lambda: ["resnet50", "vit_base"])


def refused(arguments, capsys):
    """Run a command that must print to stderr only; return its exit status and its output."""
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    assert printed.out == ""
    return status, printed.err


TO_8 = {"compress": "ef(topk(0.01))", "outer": "nesterov", "total_steps": 8}
QSR_TO_8 = {"total_steps": 8, "lr": decaying("linear", peak=0.1, total_steps=8, final=0.01)}


@pytest.mark.parametrize(
    ("words", "spec", "options"),
    [
        ("--nodes=4", "ef(topk(0.01))", {"nodes": 4}),
        ("--compress=ef(topk(0.01)) --outer=nesterov --total-steps=8", "every(4)", TO_8),
        ("--lr=0.1 --decay=linear --final-lr=0.01 --total-steps=8", "qsr(0.1, 1)", QSR_TO_8),
    ],
)
def test_explain_prints_the_plan(words, spec, options, capsys):
    size = ["--numel", "25.557032e6", "--world-size", "8"]
    assert main(["explain", spec, *size, *words.split()]) == 0
    plan = torchcomp.explain(spec, numel=25_557_032, world_size=8, **options)
    assert capsys.readouterr() == (f"{plan}\n", "")


def test_bad_spec_is_shown_with_its_caret_and_exits_2(capsys):
    status, printed = refused(["explain", "ef(topp(0.01))", *SIZE], capsys)
    assert status == 2
    message, *rest = printed.split("\n")
    assert all(word in message for word in ("torchcomp", "'topp'", "'topk'"))
    assert rest == ["  ef(topp(0.01))", "     ^", ""]


MEAN = ["explain", "mean", "--world-size", "2"]
EVERY = ["explain", "every(2)", *SIZE, "--total-steps", "9"]
PLAN = ["plan", *SIZE, "--total-steps", "9", "--step-ms", "1", "--gbit", "1"]

# Words of each bad command that its error names.
BAD_EXPLAIN = [
    *(([*MEAN, "--numel", bad], ["--numel", bad]) for bad in ("-5", "2.5", "nan", "inf", "x")),
    *(([*MEAN[:2], "--numel=5", "--world-size", bad], [bad]) for bad in ("0", "1e20", "two")),
    (["explain", "mean", "--numel", "5"], ["required", "--world-size"]),
    (MEAN, ["required", "--numel", "--model"]),
    ([*MEAN, "--numel", "5", "--model", "timm/x"], ["--numel", "--model", "not allowed"]),
    (["explain", *SIZE], ["required", "spec"]),
    (["explain", "every(4)", *SIZE], ["'every(4)'", "total_steps"]),
    *(([*QSR, "--lr", bad], ["--lr", bad]) for bad in ("-1", "nan")),
    ([*QSR, "--lr", "1e-9"], ["final", "1e-09"]),
    ([*EVERY, "--final-lr", "0.1"], ["--lr"]),
    (["explain", "mean", *SIZE, "--lr", "0.1"], ["--lr"]),
    ([*EVERY, "--outer", "mean"], ["outer step", "'mean'"]),
    (["explian", "mean", *SIZE], ["'explian'"]),
    ([], ["required", "command"]),
    (["methods", "topkk"], ["'topkk'", "'topk'"]),
    (["methods", "diloco"], ["docs/methods/README.md"]),
]
BAD_PLANS = [
    (PLAN, ["--all"]),
    ([*PLAN, "mean", "--all"], ["--all"]),
    ([*PLAN, "mean", "--currency", "EUR"], ["--price-per-gb"]),
    ([*PLAN, "mean", "--lr", "0.1"], ["--lr"]),
    *(([*PLAN, "mean", "--gbit", bad], ["--gbit", bad]) for bad in ("0", "x")),
    ([*PLAN, "mean", "--backend", "mpi"], ["--backend"]),
]
BAD_DOCTOR = [
    (["doctor", "--numel", "1e6"], ["--numel", "--step-ms"]),
    (["doctor", "--step-ms", "5"], ["--step-ms", "--numel"]),
    (["doctor", "--batch", "5"], ["--batch", "--model"]),
    (["doctor", "--model", "timm/x", "--numel", "5"], ["--model", "--numel"]),
    (["doctor", "--model", "x"], ["'x'", "timm/NAME"]),
    (["doctor", "--timeout", "0"], ["--timeout", " 0"]),
    (["doctor", "--backend", "mpi"], ["--backend", "'mpi'"]),
    (["doctor", "--backend", "nccl"], ["--backend nccl", "no GPU"]),
    *((["doctor", "--json", bad], ["--json", bad]) for bad in ("/no such/x.json", "/", "")),
    *((["doctor", "--script", *bad], ["--script", "-m"]) for bad in ([], ["-m"])),
    (["doctor", "--script", "none.py", "--flag"], ["none.py"]),
]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [*BAD_EXPLAIN, *BAD_PLANS, *BAD_DOCTOR],
    ids=lambda value: " ".join(value),
)
def test_bad_arguments_are_explained_on_stderr_and_exit_2(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    status, printed = refused(arguments, capsys)
    assert status == 2
    # argparse prints the usage, with the names of all options, in front of its error.
    message = " ".join((printed.partition("error: ")[2] or printed).split())
    assert [word for word in words if word not in message] == []
    assert max(map(len, printed.split("\n"))) <= 80


NAMED = {"torchvision/resnet50": (25_557_032, "1.3 MB"), "timm/vit_base_patch16_224": (86_567_656,)}


@pytest.mark.parametrize("name", only(NAMED, now=["torchvision/resnet50"]))
def test_explain_counts_the_parameters_of_a_named_model(name):
    # In a process of its own: in this one, other tests may have imported torchvision already.
    plan = ["explain", "ef(topk(0.01, scope=tensor))", "--model", name, "--world-size", "8"]
    command = [sys.executable, "-m", "torchcomp", *plan]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    numel, *sent = NAMED[name]
    assert re.search(rf"^  elements +{numel:,}$", done.stdout, re.MULTILINE)
    # As in training: a selection from each parameter.
    assert all(each in done.stdout for each in sent)


def test_named_models_have_shapes_and_keep_shared_parameters(monkeypatch):
    def tied(*_, **__):
        embed, head = nn.Embedding(5, 3), nn.Linear(3, 5)
        head.weight = embed.weight
        return nn.ModuleDict({"embed": embed, "head": head})

    library = SimpleNamespace(list_models=lambda: ["tied"], create_model=tied)
    monkeypatch.setitem(sys.modules, "timm", library)
    model = build_named("timm/tied")
    assert model["head"].weight is model["embed"].weight
    assert all(parameter.is_meta for parameter in model.parameters())
    assert isinstance(nn.Linear(1, 1).weight.item(), float), "later models have values again"


MISSING = ModuleNotFoundError("No module named 'timm'", name="timm")


@pytest.mark.parametrize(
    ("library", "model", "words"),
    [
        ({"side_effect": MISSING}, "timm/x", ["pip install timm", "--numel"]),
        ({"side_effect": OSError("libcuda.so")}, "torchvision/x", ["libcuda.so", "build"]),
        ({"return_value": TINY}, "timm/resnet5", ["'resnet5'", "resnet50"]),
    ],
)
def test_a_model_that_cannot_be_built_is_explained(library, model, words, capsys, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", Mock(**library))
    arguments = ["explain", "mean", "--model", model, "--world-size", "2"]
    status, printed = refused(arguments, capsys)
    assert status == 2
    message = " ".join(printed.split())
    assert [word for word in words if word not in message] == []


def test_methods_lists_every_component_with_an_example_that_can_be_pasted(capsys):
    assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    lines = printed.split("\n")
    assert max(map(len, lines)) <= 80
    for name, cls in COMPONENTS.items():
        (line,) = [line for line in lines if line.startswith(f"  {cls.example or name}  ")]
        example, summary = re.split(r" {2,}", line.strip(), maxsplit=1)
        parse = parse_outer_step if issubclass(cls, OuterStep) else torchcomp.parse
        parse = parse_registered if cls is torchcomp.Auto else parse
        assert example.startswith(name)
        assert parse(example)
        assert summary


@pytest.mark.parametrize("name", COMPONENTS)
def test_methods_shows_every_option_with_its_default_and_meaning(name, capsys):
    assert main(["methods", name]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("\n"))) <= 80
    # A long default has several lines.
    option = r"^  (\w+) \((required|optional|default: .*?)\)$"
    _, *blocks = re.split(option, printed, flags=re.MULTILINE | re.DOTALL)
    assert blocks[::3] == [field.name for field in fields(COMPONENTS[name])]
    for field, meaning in zip(fields(COMPONENTS[name]), blocks[2::3], strict=True):
        assert meaning.strip(), "every option is explained"
        assert all(choice in meaning for choice in choices_of(field) or ())


@pytest.mark.parametrize("command", [[], ["explain"], ["methods"], ["plan"], ["doctor"]])
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("\n"))) <= 80
    assert command or all(name in printed for name in ("explain", "methods", "plan", "doctor"))
