"""All settings are both flags and keys of a file. Unknown and invalid ones raise."""

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from recipes.errors import RecipeError, exit_on_user_error
from recipes.options import as_plain_dict, read_yaml
from recipes.settings import Settings, read_settings

# Flags that a setting needs beside it.
COMPANIONS = {
    "dataset": ["--data-path", "x"],
    "guard": ["--compress", "mean"],
    "lr_inside": ["--compress", "mean"],
    "outer": ["--sync", "every(2)"],
    "milestones": ["--schedule", "step"],
    "schedule": ["--milestones", "1,2"],
}


def written(tmp_path, text):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return str(path)


def another(spec):
    """Return a valid value of a setting that is not its default, and the flags for it."""
    limits, default = spec.metadata, spec.default
    flag = "--" + spec.name.replace("_", "-")
    if isinstance(default, bool):
        return not default, [flag.replace("--", "--no-", 1) if default else flag]
    if isinstance(default, tuple):
        return (1, 2), [flag, "1,2"]
    if "choices" in limits:
        value = next(each for each in reversed(limits["choices"]) if each != default)
    elif isinstance(default, str):
        value = "something"
    else:
        value = default + 1 if isinstance(default, int) else default / 2 + 1e-7
    return value, [flag, str(value)]


@pytest.mark.parametrize("spec", fields(Settings), ids=lambda spec: spec.name)
def test_every_key_is_a_flag_and_back(spec, tmp_path):
    value, flags = another(spec)
    by_flag = read_settings([*flags, *COMPANIONS.get(spec.name, [])])
    assert getattr(by_flag, spec.name) == value
    path = written(tmp_path, yaml.safe_dump(as_plain_dict(by_flag)))
    assert read_settings(["--config", path]) == by_flag


def test_a_file_overrides_its_base_and_flags_override_both(tmp_path):
    (tmp_path / "root.yaml").write_text("lr: 0.3\nepochs: 4\nfinal_lr: 1e-7\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "middle.yaml").write_text("base: ../root.yaml\nepochs: 5\nlr: 0.4\n")
    path = written(tmp_path, "base: sub/middle.yaml\nlr: 0.5\n")
    # YAML reads 1e-7, without a dot, as a string.
    assert read_yaml(Settings, Path(path)) == {"lr": 0.5, "epochs": 5, "final_lr": 1e-7}
    expected = replace(Settings(), lr=0.2, epochs=5, final_lr=1e-7)
    assert read_settings(["--config", path, "--lr", "0.2"]) == expected
    (tmp_path / "other.yaml").write_text("base: some.yaml\n")
    with pytest.raises(RecipeError, match=r"other\.yaml: base: some\.yaml"):
        read_yaml(Settings, Path(written(tmp_path, "base: other.yaml\n")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("a.yaml", r"'a\.yaml'.*--config a\.yaml"),
        ("--momentun 0.9", "'--momentun'.*--momentum"),
        ("--lr nan", "--lr: .*'nan'"),
        ("--lr 0", r"--lr .* 0, .*0\.0"),
        ("--lr", "--lr: expected one argument"),
        ("--epochs 2.5", r"--epochs: .*'2\.5'"),
        ("--epochs 0", "--epochs .*1, .*0"),
        ("--momentum 1", r"--momentum .*below 1, .*1\.0"),
        ("--optimizer adam", "--optimizer 'adam' .*sgd, adamw.* adamw"),
        ("--dataset cifar10", "--dataset cifar10 .*--data-path"),
        ("--dataset folder --dry-run", "--dataset folder .*--data-path"),
        ("--schedule step", "--schedule step .*--milestones"),
        ("--schedule step --milestones 5,3", "--milestones 5,3.* 19.*--epochs 20"),
        ("--milestones 5", "--milestones .*step.*cosine"),
        ("--milestones x", "--milestones: .*'x'"),
        ("--lr-inside --compress ef(topk(0.1)) --sync every(3)", "--lr-inside .*--sync"),
        ("--guard 5", "--guard .*--compress"),
        ("--nesterov --momentum 0", "--nesterov .*--momentum"),
        ("--lr 1e-9", "--final-lr .*--lr 1e-09.* 1e-06"),
        ("--config nowhere.yaml", r"--config nowhere\.yaml"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(RecipeError, match=message):
        read_settings(flags.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", r"'epoch' .*some\.yaml.*'epochs'"),
        ("base: a.yaml", r"some\.yaml: base: .*a\.yaml"),
        ("base: some.yaml", r"some\.yaml: base: some\.yaml"),
        ("amp: no", "amp: .*quote.* False"),
        ("epochs: true", "epochs: .*True"),
        ("epochs: 1.0", r"epochs: .*1\.0"),
        ("nesterov: 1", "nesterov: .*true or false.* 1"),
        ("milestones: 3", "milestones: .* 3"),
        ("lr: {", r"some\.yaml .*YAML"),
        ("- lr", r"some\.yaml .*'key: value'"),
    ],
)
def test_bad_files(text, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        read_settings(["--config", written(tmp_path, text)])


def test_rank_0_prints_the_help_and_a_rank_prints_its_error_in_one_piece(monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            read_settings(["--help"])
        assert ("--compress" in capsys.readouterr().out) == (rank == "0")
    written = list[str]()
    monkeypatch.setattr(sys.stderr, "write", written.append)
    with pytest.raises(SystemExit) as exit_, exit_on_user_error():
        raise RecipeError("first line\nsecond line")
    assert (exit_.value.code, written) == (1, ["error (rank 1): first line\nsecond line\n"])
