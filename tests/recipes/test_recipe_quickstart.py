"""The quickstart's table, its flags, and runs that fail."""

import sys

import pytest

from recipes import quickstart
from recipes.quickstart import METHODS, Result, draw_results, table


def test_the_table_fits_in_80_columns_and_the_plot_is_written(tmp_path):
    summary = {"bytes_per_step": 1e5, "dense_bytes_per_step": 1e6, "synchronisations": 12_345}
    run = Result({**summary, "test_accuracy": 0.97}, [(9, 1)])
    runs = {name: [run, run] for name in METHODS}
    assert max(map(len, table(runs).splitlines())) <= 80
    draw_results(runs, tmp_path / "accuracy.png", ranks=2)
    assert (tmp_path / "accuracy.png").exists()


def test_a_run_that_fails_or_hangs_returns_an_exit_code(monkeypatch, capsys):
    assert quickstart.call([sys.executable, "-c", "raise SystemExit(3)"], {}) == 3
    monkeypatch.setattr(quickstart, "_TIMEOUT_SECONDS", 0.2)
    assert quickstart.call([sys.executable, "-c", "import time; time.sleep(60)"], {}) == 1
    assert "0.2 s" in capsys.readouterr().err


def test_methods_are_spec_strings(tmp_path, monkeypatch, capsys):
    assert quickstart.flags_of("dense") == []
    assert quickstart.flags_of("every(8)") == ["--sync", "every(8)"]
    assert quickstart.flags_of("auto(steps=40)") == ["--compress", "auto(steps=40)"]
    for words, named in ((["--methods", "topkk"], "topkk"), (["--ranks", "0"], "--ranks")):
        monkeypatch.setattr(sys, "argv", ["quickstart", *words, "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            quickstart.main()
        assert named in f"{ended.value} {capsys.readouterr().err}"
        assert list(tmp_path.iterdir()) == []
