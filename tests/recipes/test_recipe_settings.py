"""All settings are both flags and keys of a file. Unknown and invalid ones raise."""

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from recipes.errors import RecipeError, exit_on_user_error
from recipes.options import as_plain_dict, read_yaml
from recipes.settings import Settings, read_settings

CONFIGS = sorted((Path(__file__).parents[2] / "recipes" / "configs").rglob("*.yaml"))


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return str(path)


def other_value(spec: object) -> object:
    """Return a valid value of a setting that is not its default."""
    limits, default = spec.metadata, spec.default
    if "choices" in limits:
        return limits["choices"][-1 if default != limits["choices"][-1] else 0]
    if isinstance(default, bool):
        return not default
    if isinstance(default, tuple):
        return (1, 2)
    if isinstance(default, str):
        return "something"
    return default + 1 if isinstance(default, int) else default / 2 + 1e-7


def flags_for(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


def companions(name: str) -> list[str]:
    """Return flags that a setting needs beside it."""
    needed = {
        "dataset": ["--data-path", "x"],
        "guard": ["--compress", "mean"],
        "lr_inside": ["--compress", "mean"],
        "outer": ["--sync", "every(2)"],
        "milestones": ["--schedule", "step"],
        "schedule": ["--milestones", "1,2"],
    }
    return needed.get(name, [])


@pytest.mark.parametrize("spec", fields(Settings), ids=lambda spec: spec.name)
def test_every_key_is_a_flag_and_back(spec: object, tmp_path: Path) -> None:
    value = other_value(spec)
    by_flag = read_settings(flags_for(spec.name, value) + companions(spec.name))
    assert getattr(by_flag, spec.name) == value
    path = written(tmp_path, yaml.safe_dump(as_plain_dict(by_flag)))
    assert read_settings(["--config", path]) == by_flag


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "lr: 0.3\nepochs: 4\n")
    assert read_settings(["--config", path, "--lr", "0.2"]) == replace(Settings(), lr=0.2, epochs=4)


def test_yaml_reads_small_numbers_without_a_dot(tmp_path: Path) -> None:
    assert read_yaml(Settings, Path(written(tmp_path, "final_lr: 1e-7\n"))) == {"final_lr": 1e-7}


def test_a_file_overrides_its_base_and_flags_override_both(tmp_path: Path) -> None:
    (tmp_path / "root.yaml").write_text("lr: 0.3\nepochs: 4\nmomentum: 0.5\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "middle.yaml").write_text("base: ../root.yaml\nepochs: 5\nlr: 0.4\n")
    path = written(tmp_path, "base: sub/middle.yaml\nlr: 0.5\n")
    expected = replace(Settings(), lr=0.2, epochs=5, momentum=0.5)
    assert read_settings(["--config", path, "--lr", "0.2"]) == expected
    assert read_yaml(Settings, Path(path)) == {"lr": 0.5, "epochs": 5, "momentum": 0.5}


def test_two_files_that_are_based_on_each_other(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("base: some.yaml\n")
    with pytest.raises(RecipeError, match=r"other\.yaml: base: some\.yaml"):
        read_yaml(Settings, Path(written(tmp_path, "base: other.yaml\n")))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_are_valid_and_say_whether_they_were_run(path: Path) -> None:
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Run:") for line in comment)
    read_yaml(Settings, path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning-rat", "1"], "'--learning-rat'.*--"),
        (["a.yaml"], r"'a\.yaml'.*--config a\.yaml"),
        (["--momentun", "0.9"], "'--momentun'.*--momentum"),
        (["--lr", "fast"], "--lr: .*'fast'"),
        (["--lr", "nan"], "--lr: .*'nan'"),
        (["--lr", "0"], r"--lr .* 0, .*0\.0"),
        (["--lr"], "--lr: expected one argument"),
        (["--epochs", "2.5"], r"--epochs: .*'2\.5'"),
        (["--epochs", "0"], "--epochs .*1, .*0"),
        (["--momentum", "1"], r"--momentum .*below 1, .*1\.0"),
        (["--optimizer", "adam"], "--optimizer 'adam' .*sgd, adamw.* adamw"),
        (["--dataset", "digit"], "--dataset 'digit' .* digits.$"),
        (["--dataset", "cifar10"], "--dataset cifar10 .*--data-path"),
        (["--schedule", "step"], "--schedule step .*--milestones"),
        (["--schedule", "step", "--milestones", "5,3"], "--milestones 5,3.* 19.*--epochs 20"),
        (["--schedule", "step", "--milestones", "20"], "--milestones 20.* 19.*--epochs 20"),
        (["--milestones", "5"], "--milestones .*step.*cosine"),
        (["--milestones", "x"], "--milestones: .*'x'"),
        (["--lr-inside"], "--lr-inside .*--compress"),
        (
            ["--lr-inside", "--compress", "ef(topk(0.1))", "--sync", "every(3)"],
            "--lr-inside .*--sync",
        ),
        (["--nesterov", "--momentum", "0"], "--nesterov .*--momentum"),
        (["--lr", "1e-9"], "--final-lr .*--lr 1e-09.* 1e-06"),
        (["--crop-ratio", "1.5"], r"--crop-ratio .* 1, .*1\.5"),
        (["--randaugment-magnitude", "31"], "--randaugment-magnitude .* 30, .*31"),
        (["--mixup-shares", "batch"], "--mixup-shares 'batch' .*micro-batch"),
        (["--dataset", "folder", "--dry-run"], "--dataset folder .*--data-path"),
        (["--seed", str(2**63)], "--seed .* 9223372036854775807, .*9223372036854775808"),
        (["--config", "nowhere.yaml"], r"--config nowhere\.yaml"),
    ],
)
def test_bad_flags(flags: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        read_settings(flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1", r"'learning_rte' .*some\.yaml"),
        ("epoch: 3", r"'epoch' .*some\.yaml.*'epochs'"),
        ("config: a.yaml", r"'config' .*some\.yaml"),
        ("bas: a.yaml", r"'bas' .*some\.yaml.*'base'"),
        ("base: a.yaml", r"some\.yaml: base: .*a\.yaml"),
        ("base: some.yaml", r"some\.yaml: base: some\.yaml"),
        ("base: [a.yaml]", r"some\.yaml: base: .*text"),
        ("amp: no", "amp: .*quote.* False"),
        ("epochs: true", "epochs: .*True"),
        ("epochs: 1.0", r"epochs: .*1\.0"),
        ("nesterov: 1", "nesterov: .*true or false.* 1"),
        ("lr: .inf", "lr: .*inf"),
        ("milestones: 3", "milestones: .* 3"),
        ("lr: {", r"some\.yaml .*YAML"),
        ("- lr", r"some\.yaml .*'key: value'"),
        ("", r"some\.yaml .*'key: value'"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        read_settings(["--config", written(tmp_path, text)])


@pytest.mark.parametrize(("rank", "prints"), [("0", True), ("1", False)])
def test_only_rank_0_prints_the_help(
    rank: str, prints: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as exit_:
        read_settings(["--help"])
    assert exit_.value.code == 0
    assert ("--compress" in capsys.readouterr().out) == prints


def test_a_rank_prints_its_error_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[str]()
    monkeypatch.setattr(sys.stderr, "write", written.append)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as exit_, exit_on_user_error():
        raise RecipeError("first line\nsecond line")
    assert exit_.value.code == 1
    assert written == ["error (rank 3): first line\nsecond line\n"]
