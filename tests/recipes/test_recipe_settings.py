"""Every key is a flag and every flag a key; whatever else is given is refused by name."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from recipes.errors import RecipeError
from recipes.options import read_yaml, resolved
from recipes.settings import Settings, read_settings

CONFIGS = sorted((Path(__file__).parents[2] / "recipes" / "configs").rglob("*.yaml"))


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return str(path)


def other_value(spec: object) -> object:
    """A legal value of a setting that is not its default."""
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
    """Further flags without which a setting makes no sense."""
    needed = {
        "dataset": ["--data-path", "x"],
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
    path = written(tmp_path, yaml.safe_dump(resolved(by_flag)))
    assert read_settings(["--config", path]) == by_flag


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "lr: 0.3\nepochs: 4\n")
    assert read_settings(["--config", path, "--lr", "0.2"]) == replace(Settings(), lr=0.2, epochs=4)


def test_yaml_reads_small_numbers_without_a_dot(tmp_path: Path) -> None:
    assert read_yaml(Settings, Path(written(tmp_path, "final_lr: 1e-7\n"))) == {"final_lr": 1e-7}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_say_what_they_are_for_and_whether_they_were_run(path: Path) -> None:
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Run:") for line in comment)
    read_yaml(Settings, path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning-rat", "1"], "unknown flag '--learning-rat'; the nearest flag is"),
        (["a.yaml"], "'a.yaml' is no flag; a configuration file is given as --config a.yaml"),
        (["--momentun", "0.9"], "unknown flag '--momentun'; the nearest flag is --momentum"),
        (["--lr", "fast"], "--lr: expected a finite number, found 'fast'"),
        (["--lr", "nan"], "--lr: expected a finite number, found 'nan'"),
        (["--lr", "0"], "--lr must be above 0, found 0.0"),
        (["--lr"], "expected one argument"),
        (["--epochs", "2.5"], "--epochs: expected a whole number, found '2.5'"),
        (["--epochs", "0"], "--epochs must be at least 1, found 0"),
        (["--momentum", "1"], "--momentum must be below 1, found 1.0"),
        (["--optimizer", "adam"], "'adam' is not one of sgd, adamw; nearest: adamw"),
        (["--dataset", "digit"], "'digit' is not one of .*; nearest: digits"),
        (["--dataset", "cifar10"], "--dataset cifar10 needs --data-path"),
        (["--schedule", "step"], "--milestones belongs to --schedule step"),
        (["--schedule", "step", "--milestones", "5,3"], "must rise and lie between 1 and 19"),
        (["--schedule", "step", "--milestones", "20"], "must rise and lie between 1 and 19"),
        (["--milestones", "x"], "expected a list of epochs such as 30,60,80, found 'x'"),
        (["--nesterov", "--momentum", "0"], "--nesterov needs --momentum above 0"),
        (["--lr", "1e-9"], "--final-lr 1e-06 is above the peak --lr 1e-09"),
        (["--crop-ratio", "1.5"], "--crop-ratio must be at most 1, found 1.5"),
        (["--randaugment-magnitude", "31"], "--randaugment-magnitude must be at most 30, found 31"),
        (["--dataset", "folder", "--dry-run"], "--dataset folder needs --data-path"),
        (["--seed", str(2**63)], "--seed must be at most 9223372036854775807, found"),
        (["--config", "nowhere.yaml"], "no configuration file nowhere.yaml"),
    ],
)
def test_bad_flags(flags: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        read_settings(flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1", "unknown key 'learning_rte' in .*some.yaml; the nearest setting is"),
        ("epoch: 3", "unknown key 'epoch' in .*; the nearest setting is 'epochs'"),
        ("config: a.yaml", "unknown key 'config'"),
        ("amp: no", "amp: expected text .quote it., found False"),
        ("epochs: true", "epochs: expected a whole number, found True"),
        ("epochs: 1.0", "epochs: expected a whole number, found 1.0"),
        ("nesterov: 1", "nesterov: expected true or false, found 1"),
        ("lr: .inf", "lr: expected a finite number, found inf"),
        ("milestones: 3", "expected a list of epochs"),
        ("lr: {", "is not YAML"),
        ("- lr", "holds no settings"),
        ("", "holds no settings"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        read_settings(["--config", written(tmp_path, text)])
