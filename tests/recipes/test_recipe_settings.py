"""All settings are both flags and keys of a file. Unknown and invalid ones raise."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from recipes.errors import RecipeError, exit_on_user_error
from recipes.options import as_plain_dict, read_yaml
from recipes.settings import Settings, read_settings


def written(tmp_path, text):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return str(path)


# One setting of each type.
FLAGS = {
    "--channels-last": ("channels_last", True),
    "--no-deterministic": ("deterministic", False),
    "--epochs 3": ("epochs", 3),
    "--lr 1e-2": ("lr", 0.01),
    "--optimizer adamw": ("optimizer", "adamw"),
    "--data-path x": ("data_path", "x"),
    "--schedule step --milestones 1,2": ("milestones", (1, 2)),
}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_key_is_a_flag_and_back(flags, tmp_path):
    name, value = FLAGS[flags]
    by_flag = read_settings(flags.split())
    assert getattr(by_flag, name) == value != getattr(Settings(), name)
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


BAD_FILES = {
    "epoch: 3": r"'epoch' .*some\.yaml.*'epochs'",
    "base: some.yaml": r"some\.yaml: base: some\.yaml",
    "amp: no": "amp: .*quote.* False",
    "epochs: 1.0": r"epochs: .*1\.0",
    "nesterov: 1": "nesterov: .*true or false.* 1",
    "milestones: 3": "milestones: .* 3",
    "lr: {": r"some\.yaml .*YAML",
    "- lr": r"some\.yaml .*'key: value'",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_files(text, tmp_path):
    with pytest.raises(RecipeError, match=BAD_FILES[text]):
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
