"""Every setting of a training run: its default, its limits, its help, in one place.

`Settings` is the single source: the command line's flags and a configuration file's keys are both
read off its fields, so that neither can know a name that the other does not.
"""

import argparse
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from errors import RecipeError, nearest


def option(default: Any, text: str, **limits: Any) -> Any:
    """Declare a setting; ``limits`` are ``choices``, ``least``, ``above``, ``below``, ``most``."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass(frozen=True)
class Settings:
    """A resolved configuration: defaults, then the configuration file, then the command line."""

    dataset: str = option(
        "digits",
        "digits is embedded; the others are read from --data-path",
        choices=("digits", "cifar10", "imagenet", "folder"),
    )
    data_path: str = option("", "CIFAR-10 archive, image folder, or the folder of .beton files")
    data_cache: str = option("", "folder for .beton files made on the fly (default: user's cache)")
    loader: str = option(
        "auto",
        "auto is ffcv, or torchvision where ffcv is not installed",
        choices=("auto", "ffcv", "torchvision"),
    )
    workers: int = option(
        0, "loader threads or processes a rank (0: as many as --threads)", least=0
    )
    image_size: int = option(
        0, "photographs: pixels a side (0: the data set's, which is 224)", least=0
    )
    crop_ratio: float = option(
        0.875, "photographs: share of the shorter side that a test image keeps", above=0, most=1
    )
    randaugment_ops: int = option(0, "RandAugment: operations an image (0: none)", least=0)
    randaugment_magnitude: int = option(10, "RandAugment: their strength, of 30", least=0, most=30)
    mixup: float = option(0.0, "MixUp: alpha of Beta(alpha, alpha) (0: none)", least=0)

    model: str = option(
        "smallcnn", "smallcnn, simple_vit/b16 or ti16, torchvision/NAME or timm/NAME"
    )
    small_stem: bool = option(False, "torchvision ResNets: a 3x3 stem without pooling, for CIFAR")
    channels_last: bool = option(False, "keep images and weights in channels_last order")
    label_smoothing: float = option(
        0.0, "share of a label spread over all classes", least=0, below=1
    )

    epochs: int = option(20, "passes over the training set", least=1)
    batch_size: int = option(64, "images a step, over all ranks", least=1)
    accumulate: int = option(1, "micro-batches that a rank splits its batch into", least=1)
    optimizer: str = option("sgd", "sgd or adamw", choices=("sgd", "adamw"))
    momentum: float = option(0.9, "sgd's momentum", least=0, below=1)
    nesterov: bool = option(False, "sgd's Nesterov momentum")
    beta1: float = option(0.9, "adamw's first decay", least=0, below=1)
    beta2: float = option(0.999, "adamw's second decay", least=0, below=1)
    weight_decay: float = option(0.0005, "weight decay on all parameters", least=0)
    clip_norm: float = option(0.0, "largest norm of a rank's gradient (0: any)", least=0)
    lr: float = option(0.1, "peak learning rate", above=0)
    final_lr: float = option(1e-6, "rate where warm-up begins and where the decay ends", least=0)
    schedule: str = option(
        "cosine",
        "cosine, linear, step-cosine (its powers of two) or step",
        choices=("cosine", "linear", "step-cosine", "step"),
    )
    warmup_steps: int = option(0, "steps of linear warm-up", least=0)
    milestones: tuple[int, ...] = option((), "epochs at which the step schedule drops")
    gamma: float = option(0.1, "the step schedule's factor", above=0)

    compress: str = option(
        "none", 'how gradients (with --sync: changes) are compressed, e.g. "ef(topk(0.01))"'
    )
    sync: str = option("none", 'local steps, e.g. "qsr(alpha=0.0175, h_base=4)"')
    outer: str = option("none", 'local steps: outer step, e.g. "nesterov(lr=0.7, momentum=0.9)"')
    bn_images: int = option(
        4096,
        "local steps: training images, over all ranks, that batch normalisation's statistics are "
        "estimated from before an evaluation (0: the mean of the ranks' own)",
        least=0,
    )

    device: str = option("auto", "auto is cuda where there is one", choices=("auto", "cpu", "cuda"))
    amp: str = option("off", "autocast to bf16 or fp16", choices=("off", "bf16", "fp16"))
    threads: int = option(0, "torch's threads a rank (0: this machine's cores shared)", least=0)
    deterministic: bool = option(True, "cuda: only cuDNN's repeatable algorithms, at some cost")
    seed: int = option(0, "of weights, order and augmentation", least=0, most=2**63 - 1)

    out: str = option("runs/train", "folder for metrics, summary, weights and checkpoints")
    checkpoint_every: int = option(0, "steps between checkpoints (0: none)", least=0)
    resume: bool = option(False, "go on from the last complete checkpoint in --out")
    log_every: int = option(10, "steps between lines in metrics.jsonl", least=1)
    eval_every: int = option(1, "epochs between evaluations", least=1)
    dry_run: bool = option(False, "print the configuration and the plan, and stop")
    plan_ranks: int = option(0, "ranks that --dry-run plans for (0: those started)", least=0)
    shrink: bool = option(False, "train a shrunken copy for a step, and stop")

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check_limits(spec.name, getattr(self, spec.name), spec.metadata)
        _check_together(self)


_KINDS: dict[str, Any] = {spec.name: spec.type for spec in fields(Settings)}


def read_settings(arguments: list[str]) -> Settings:
    """Resolve the command line and the configuration file that it names."""
    flags = _read_flags(arguments)
    config = flags.pop("config", None)
    values = read_yaml(Path(config)) if config is not None else {}
    values |= {name: convert(_flag(name), _KINDS[name], raw) for name, raw in flags.items()}
    return Settings(**values)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file; every key must be a setting."""
    if not path.is_file():
        raise RecipeError(f"no configuration file {path}: --config wants the path of a YAML file")
    try:
        raw = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {error}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} holds no settings: expected lines of the form 'key: value'")
    for key in raw:
        if key not in _KINDS:
            hint = nearest(str(key), _KINDS)
            raise RecipeError(f"unknown key {key!r} in {path}; the nearest setting is {hint!r}")
    return {key: convert(f"{path}: {key}", _KINDS[key], value) for key, value in raw.items()}


def resolved(settings: Settings) -> dict[str, Any]:
    """Return plain values that a YAML or JSON file can hold."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items()}


def convert(where: str, kind: Any, raw: Any) -> Any:
    """Turn a YAML value or a flag's text into a setting of ``kind``."""
    try:
        return _CONVERTERS[kind](raw)
    except (TypeError, ValueError):
        expected = _EXPECTED[kind]
        raise RecipeError(f"{where}: expected {expected}, found {raw!r}") from None


def _to_bool(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise TypeError
    return raw


def _to_int(raw: Any) -> int:
    if isinstance(raw, bool | float):
        raise TypeError
    return int(raw)


def _to_float(raw: Any) -> float:
    # YAML reads 1e-6 (no dot) as text, hence text is converted here as it is for flags.
    if isinstance(raw, bool) or not math.isfinite(float(raw)):
        raise TypeError
    return float(raw)


def _to_text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise TypeError
    return raw


def _to_epochs(raw: Any) -> tuple[int, ...]:
    parts = [part for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
    return tuple(_to_int(part) for part in parts)


_CONVERTERS: dict[Any, Any] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_text,
    tuple[int, ...]: _to_epochs,
}
_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text (quote it)",
    tuple[int, ...]: "a list of epochs such as 30,60,80",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(message)


def _read_flags(arguments: list[str]) -> dict[str, Any]:
    parser = _parser()
    flags, unknown = parser.parse_known_args(arguments)
    if unknown and not unknown[0].startswith("-"):
        raise RecipeError(
            f"{unknown[0]!r} is no flag; a configuration file is given as --config {unknown[0]}"
        )
    if unknown:
        known = ["--config", *map(_flag, _KINDS)]
        hint = nearest(unknown[0], known)
        raise RecipeError(f"unknown flag {unknown[0]!r}; the nearest flag is {hint}")
    return vars(flags)


def _parser() -> _Parser:
    parser = _Parser("recipes/train.py", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="YAML", help="read settings from this file first")
    for spec in fields(Settings):
        text = f"{spec.metadata['help']} [{spec.default}]".replace("%", "%%")
        if spec.type is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(_flag(spec.name), action=action, help=text)
        else:
            parser.add_argument(_flag(spec.name), metavar="VALUE", help=text)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_limits(name: str, value: Any, limits: Any) -> None:
    if "choices" in limits and value not in limits["choices"]:
        known = ", ".join(limits["choices"])
        hint = nearest(value, limits["choices"])
        raise RecipeError(f"{_flag(name)} {value!r} is not one of {known}; nearest: {hint}")
    if "least" in limits and value < limits["least"]:
        raise RecipeError(f"{_flag(name)} must be at least {limits['least']}, found {value}")
    if "above" in limits and value <= limits["above"]:
        raise RecipeError(f"{_flag(name)} must be above {limits['above']}, found {value}")
    if "most" in limits and value > limits["most"]:
        raise RecipeError(f"{_flag(name)} must be at most {limits['most']}, found {value}")
    if "below" in limits and value >= limits["below"]:
        raise RecipeError(f"{_flag(name)} must be below {limits['below']}, found {value}")


def _check_together(settings: Settings) -> None:
    if settings.nesterov and settings.momentum == 0:
        raise RecipeError("--nesterov needs --momentum above 0: it looks ahead along the momentum")
    if settings.final_lr > settings.lr:
        raise RecipeError(f"--final-lr {settings.final_lr} is above the peak --lr {settings.lr}")
    if settings.schedule == "step-cosine" and settings.final_lr == 0:
        raise RecipeError("--schedule step-cosine needs --final-lr above 0: it takes its logarithm")
    if settings.outer != "none" and settings.sync == "none":
        raise RecipeError(f"--outer {settings.outer} follows the averages of --sync: give it, too")
    # Without training, a data set is opened only where its size is not known beforehand.
    opened = settings.dataset == "folder" or not (settings.dry_run or settings.shrink)
    if settings.dataset != "digits" and opened and not settings.data_path:
        raise RecipeError(f"--dataset {settings.dataset} needs --data-path: it is not embedded")
    _check_milestones(settings)


def _check_milestones(settings: Settings) -> None:
    epochs = settings.milestones
    if bool(epochs) != (settings.schedule == "step"):
        raise RecipeError("--milestones belongs to --schedule step, which needs at least one")
    if list(epochs) != sorted(set(epochs)) or any(not 0 < e < settings.epochs for e in epochs):
        raise RecipeError(
            f"--milestones must rise and lie between 1 and {settings.epochs - 1} (--epochs "
            f"{settings.epochs}), found {', '.join(map(str, epochs))}"
        )
