"""The quickstart's table and plot, its flags, and runs that fail."""

import re
import sys

import pytest

from recipes import quickstart
from recipes.quickstart import METHODS, Result, draw_results, table


def results(seeds):
    return {
        method: [
            result(accuracy=0.97 + 0.01 * seed, sent=10.0 ** (6 - index)) for seed in range(seeds)
        ]
        for index, method in enumerate(METHODS)
    }


def result(accuracy, sent):
    summary = {
        "test_accuracy": accuracy,
        "bytes_per_step": sent,
        "dense_bytes_per_step": 1e6,
        "synchronisations": 12_345,
    }
    return Result(summary, [(int(sent * step), accuracy * step / 10) for step in range(6, 11)])


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_table_fits_in_80_columns(seeds):
    lines = table(results(seeds)).splitlines()
    assert [re.split(r"  +", line)[0] for line in lines] == ["method", *METHODS]
    assert max(map(len, lines)) <= 80
    assert "10.0x" in lines[2]
    assert ("±" in lines[1]) == (seeds > 1)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_plot_is_written(seeds, tmp_path):
    draw_results(results(seeds), tmp_path / "runs" / "accuracy.png", ranks=2)
    assert (tmp_path / "runs" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_or_hangs_returns_an_exit_code(monkeypatch, capsys):
    assert quickstart.call([sys.executable, "-c", "raise SystemExit(3)"], {}) == 3
    monkeypatch.setattr(quickstart, "_TIMEOUT_SECONDS", 0.2)
    assert quickstart.call([sys.executable, "-c", "import time; time.sleep(60)"], {}) == 1
    assert "0.2 s" in capsys.readouterr().err


def test_methods_are_spec_strings():
    assert quickstart.flags_of("dense") == []
    assert quickstart.flags_of("ef(topk(0.5))") == ["--compress", "ef(topk(0.5))"]
    assert quickstart.flags_of("every(8)") == ["--sync", "every(8)"]
    assert quickstart.flags_of("auto(steps=40)") == ["--compress", "auto(steps=40)"]
    parsed = quickstart.parse(["--methods", "dense", "every(8)", "--ranks", "4", "--", "--lr", "1"])
    assert (parsed.methods, parsed.ranks) == (["dense", "every(8)"], 4)
    assert parsed.extra == ["--lr", "1"]


@pytest.mark.parametrize(
    ("words", "names"), [(["--methods", "topkk"], ["topkk"]), (["--ranks", "0"], ["--ranks", "0"])]
)
def test_bad_input_exits_before_any_run(words, names, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart", *words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        quickstart.main()
    printed = f"{ended.value} {capsys.readouterr().err}"
    assert all(name in printed for name in names)
    assert list(tmp_path.iterdir()) == []
