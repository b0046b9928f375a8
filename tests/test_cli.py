"""Command line: its output, its error messages and its exit status."""

import re
import subprocess
import sys

import pytest

import torchcomp
from tests.support.patience import PATIENCE
from torchcomp.__main__ import main

SIZE = ["--numel", "25557032", "--world-size", "8"]


def refused(arguments, capsys):
    """Run a command that must print to stderr only; return its exit status and its output."""
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    assert printed.out == ""
    return status, printed.err


@pytest.mark.parametrize("numel", ["25557032", "25.557032e6", "2.5557032e7"])
def test_explain_prints_the_plan(numel, capsys):
    assert main(["explain", "ef(topk(0.01))", "--numel", numel, "--world-size", "8"]) == 0
    plan = torchcomp.explain("ef(topk(0.01))", numel=25_557_032, world_size=8)
    assert capsys.readouterr() == (f"{plan}\n", "")


def test_explain_prints_the_plan_of_a_schedule(capsys):
    assert main(["explain", "every(4)", *SIZE, "--total-steps", "100"]) == 0
    assert re.search(r"\b25\b.*\b100\b.*\b25\.0%", capsys.readouterr().out)


@pytest.mark.parametrize(("decay", "syncs"), [("cosine", "9,711"), ("linear", "8,741")])
def test_explain_counts_the_published_synchronisations(decay, syncs, capsys):
    run = ["--total-steps", "93.6e3", "--warmup-steps", "1e4", "--lr", "0.008", "--decay", decay]
    assert main(["explain", "qsr(alpha=0.0175, h_base=4)", *SIZE, *run]) == 0
    assert re.search(rf" {syncs} .*\b93,600\b", capsys.readouterr().out)


def test_explain_takes_compressed_averages_and_outer_steps(capsys):
    options = {"compress": "ef(topk(0.01))", "outer": "nesterov", "total_steps": 8}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words = [word.replace("_", "-") for word in words]
    assert main(["explain", "every(4)", *SIZE, *words]) == 0
    plan = torchcomp.explain("every(4)", numel=25_557_032, world_size=8, **options)
    assert capsys.readouterr().out == f"{plan}\n"


def test_bad_spec_is_shown_with_its_caret_and_exits_2(capsys):
    status, printed = refused(["explain", "ef(topp(0.01))", *SIZE], capsys)
    assert status == 2
    message, *rest = printed.split("\n")
    assert all(word in message for word in ("torchcomp", "'topp'", "'topk'"))
    assert rest == ["  ef(topp(0.01))", "     ^", ""]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "mean", "--numel", "5", "--world-size", "0"], ["world_size", " 0"]),
        (["explain", "mean", "--numel", "-5", "--world-size", "2"], ["numel", "-5"]),
        (["explain", "mean", "--numel", "2.5", "--world-size", "2"], ["--numel", "2.5"]),
        (["explain", "mean", "--numel", "nan", "--world-size", "2"], ["--numel", "nan"]),
        (["explain", "mean", "--numel", "inf", "--world-size", "2"], ["--numel", "inf"]),
        (["explain", "mean", "--numel", "many", "--world-size", "2"], ["--numel", "many"]),
        (["explain", "mean", "--numel", "5", "--world-size", "two"], ["--world-size", "two"]),
        (["explain", "mean", "--numel", "5"], ["required", "--world-size"]),
        (["explain", "mean", "--world-size", "2"], ["required", "--numel"]),
        (["explain", *SIZE], ["required", "spec"]),
        (["explain", "every(4)", *SIZE], ["'every(4)'", "total_steps"]),
        (["explain", "every(4)", *SIZE, "--total-steps", "0"], ["total_steps", " 0"]),
        (["explain", "qsr(0.1, 4)", *SIZE, "--total-steps", "9"], ["qsr", "--lr"]),
        (["explain", "qsr(0.1, 4)", *SIZE, "--total-steps", "9", "--lr", "-1"], ["peak", "-1"]),
        (
            ["explain", "qsr(0.1, 4)", *SIZE, "--total-steps", "9", "--lr", "1e-9"],
            ["final", "1e-06", "peak", "1e-09"],
        ),
        (
            ["explain", "every(2)", *SIZE, "--total-steps", "9", "--outer", "mean"],
            ["outer step", "'mean'"],
        ),
        (["explain", "", *SIZE], ["torchcomp", "empty"]),
        (["explian", "mean", *SIZE], ["'explian'"]),
        ([], ["required", "command"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_arguments_are_explained_on_stderr_and_exit_2(arguments, words, capsys):
    status, printed = refused(arguments, capsys)
    assert status == 2
    # argparse prints the usage, with the names of all options, in front of its error.
    message = printed.partition("error: ")[2] or printed
    assert [word for word in words if word not in message] == []
    assert "Traceback" not in printed


def test_a_narrow_terminal_still_shows_everything(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "--help"])
    assert stopped.value.code == 0
    help_text = capsys.readouterr().out
    assert all(
        option in help_text for option in ("--numel", "--world-size", "--total-steps", "--lr")
    )
    assert main(["explain", "mean", *SIZE]) == 0
    plan = torchcomp.explain("mean", numel=25_557_032, world_size=8)
    assert capsys.readouterr().out == f"{plan}\n"


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "explain" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"{torchcomp.__version__}\n")


def module(*arguments):
    """Run ``python -m torchcomp`` in a process of its own."""
    command = [sys.executable, "-m", "torchcomp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.thorough
def test_a_reader_that_leaves_early_sees_no_traceback():
    command = [sys.executable, "-m", "torchcomp", "explain", "mean", *SIZE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait(PATIENCE) == 0


def test_module_runs_as_a_program():
    good = module("explain", "ef(topk(0.01))", *SIZE)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("ef(topk(0.01))")


@pytest.mark.thorough
def test_module_exits_2_on_bad_input():
    bad = module("explain", "ef(topk(2.0))", *SIZE)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert re.match(r"torchcomp: .*topk.*ratio.*2\.0", bad.stderr)
