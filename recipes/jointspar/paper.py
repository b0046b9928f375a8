"""Train in the paper's setting: large batches with linear scaling, warm-up and LARS.

    python recipes/jointspar/paper.py --config recipes/jointspar/configs/cifar10.yaml \\
        --dry-run --workers 16
    torchrun --nproc-per-node 4 recipes/jointspar/paper.py \\
        --config recipes/jointspar/configs/cifar10.yaml --data FOLDER

Every key of a configuration is a flag, and a flag overrides the file. ``--dry-run`` prints the
resolved configuration, the layers and what the run would send, and trains nothing. A run leaves
``metrics.jsonl``, a line a step, and ``summary.json`` in ``--out``.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# The recipes are scripts: they import their neighbours as modules beside them.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import yaml
from errors import nearest
from image_data import Batches as PhotographBatches
from image_data import open_batches
from image_data.augment import Augmentation
from image_data.presets import Preset
from image_sets import FACTS, Batches, RecipeError, TrainOrder, open_images
from layer_training import Course, Method, train
from models import build_model
from networks import small_network
from ranks import Ranks, count_in_environment, join, leave, place, rank_in_environment, threads_of
from settings import Settings
from torch import Tensor, nn

import torchcomp
from torchcomp.algorithms.layers import check_several, default_layers

KINDS = ("dense", "jointspar", "uniform", "topk")


@dataclass(frozen=True)
class Setting:
    """A configuration: where the paper is silent, the values are ours (docs/jointspar.md).

    Attributes:
        dataset: one of the paper's six, or digits.
        model: "mlp", "conv", or as recipes/train.py has it.
        small_stem: for torchvision's ResNets on small images.
        batch: images of one worker in a step.
        epochs: passes over the training images.
        warmup_epochs: of them, with a rate that rises linearly.
        rate: peak rate of one worker; it is multiplied by their number.
        drops: epochs at which the rate is divided by 10.
        momentum: of LARS.
        weight_decay: of LARS.
        trust: LARS's trust coefficient.
        shift: random shifts of training images by at most so many pixels.
        mirror: whether to mirror training images at random.
        method: dense, jointspar, uniform or topk.
        budget: share of the layers' costs, or for topk of dense DDP's bytes; 1 for dense.
        costs: what the budget counts: layers (the paper), bytes or time.
        p_min: least probability of a layer.
        alpha: step size of its bandit.
        seed: of weights, order and draws.
    """

    dataset: str = "digits"
    model: str = "conv"
    small_stem: bool = False
    batch: int = 1024
    epochs: int = 90
    warmup_epochs: int = 5
    rate: float = 0.1
    drops: tuple[int, ...] = (30, 50, 70)
    momentum: float = 0.9
    weight_decay: float = 5e-4
    trust: float = 0.01
    shift: int = 0
    mirror: bool = False
    method: str = "jointspar"
    budget: float = 0.6
    costs: str = "layers"
    p_min: float = 0.0125
    alpha: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("dataset", self.dataset, FACTS)
        _check_choice("method", self.method, KINDS)
        _check_choice("costs", self.costs, ("layers", "bytes", "time"))
        for name in ("batch", "epochs"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise RecipeError(
                f"warmup_epochs must be from 0 to below the {self.epochs} epochs, found "
                f"{self.warmup_epochs}"
            )
        ordered = list(self.drops) == sorted(set(self.drops))
        if not ordered or any(not 0 < drop < self.epochs for drop in self.drops):
            raise RecipeError(
                f"drops must rise and lie between 1 and {self.epochs - 1}, found {self.drops}"
            )
        if (self.method == "dense") != (self.budget == 1):
            raise RecipeError(
                f"budget {self.budget:g} does not fit method {self.method}: dense sends all, "
                "budget 1, and the others a share below 1"
            )

    def course(self, steps_per_epoch: int, workers: int) -> Course:
        """Length and rates in steps."""
        return Course(
            steps=self.epochs * steps_per_epoch,
            warmup=self.warmup_epochs * steps_per_epoch,
            drops=tuple(drop * steps_per_epoch for drop in self.drops),
            rate=self.rate * workers,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            trust=self.trust,
            p_min=self.p_min,
            alpha=self.alpha,
        )

    def module(self) -> nn.Module:
        """The network."""
        facts = FACTS[self.dataset]
        if self.model in ("mlp", "conv"):
            return small_network(self.model, facts)
        return build_model(
            self.model,
            channels=facts.channels,
            classes=facts.classes,
            small_stem=self.small_stem,
        )


def main() -> None:
    """Run what the command line asks for; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    try:
        setting = resolve(arguments)
        if arguments.dry_run:
            print(describe(setting, arguments.workers or count_in_environment()))
        else:
            run(setting, arguments.data, arguments.out)
    except (RecipeError, torchcomp.SpecError, torchcomp.UnsupportedModelError) as error:
        sys.exit(f"error (rank {rank_in_environment()}): {error}")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line; flags of keys are left out unless given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="YAML file to read first")
    parser.add_argument("--data", type=Path, help="folder of the data set; digits needs none")
    parser.add_argument("--out", type=Path, default=Path("runs/jointspar_paper"))
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and stop")
    parser.add_argument("--workers", type=int, help="that --dry-run plans for [those started]")
    for spec in fields(Setting):
        flag = "--" + spec.name.replace("_", "-")
        options: dict[str, Any] = {"default": argparse.SUPPRESS}
        if spec.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif spec.type in (int, float, str):
            parser.add_argument(flag, type=spec.type, **options)
        else:
            parser.add_argument(flag, type=int, nargs="*", **options)
    return parser.parse_args(words)


def resolve(arguments: argparse.Namespace) -> Setting:
    """Defaults, then the configuration file, then the flags."""
    values = read_yaml(arguments.config) if arguments.config is not None else {}
    names = [spec.name for spec in fields(Setting)]
    values |= {name: value for name, value in vars(arguments).items() if name in names}
    if "drops" in values:
        values["drops"] = tuple(values["drops"])
    return Setting(**values)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file; every key must be one of a setting's, and of its type."""
    if not path.is_file():
        raise RecipeError(f"no configuration file {path}: --config wants the path of a YAML file")
    values = yaml.safe_load(path.read_text())
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no settings: expected lines of the form 'key: value'")
    kinds = {spec.name: type(spec.default) for spec in fields(Setting)}
    for key, value in values.items():
        if key not in kinds:
            hint = nearest(str(key), kinds)
            raise RecipeError(f"unknown key {key!r} in {path}; the nearest is {hint!r}")
        kind = list if kinds[key] is tuple else kinds[key]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise RecipeError(f"{path}: {key} must be {kind.__name__}, found {value!r}")
    return values


def describe(setting: Setting, workers: int) -> str:
    """The resolved configuration, the layers, and what a run on so many workers would send."""
    facts = FACTS[setting.dataset]
    steps_per_epoch = facts.train_images // (workers * setting.batch)
    if not steps_per_epoch:
        raise RecipeError(
            f"{workers} workers of {setting.batch} images are more than {setting.dataset}'s "
            f"{facts.train_images:,}: an epoch would have no step"
        )
    course = setting.course(steps_per_epoch, workers)
    with torch.device("meta"):
        module = setting.module()
    layers = default_layers(module.named_parameters())
    check_several(layers)
    dense = torchcomp.explain("mean", model=module, world_size=workers).dense_bytes_sent
    rows = {
        "images": f"{facts.train_images:,} to train, {facts.test_images:,} to test",
        "batch": f"{workers} workers x {setting.batch}",
        "steps": f"{course.steps:,} ({setting.epochs} epochs of {steps_per_epoch:,})",
        "rate": f"{course.rate_at(0):g} first, {course.rate:g} after {course.warmup:,} steps of "
        f"warm-up, {course.rate_at(course.steps - 1):g} last",
        "layers": f"{len(layers)}: {', '.join([*layers][:3])}, ..., {[*layers][-1]}",
        "bytes of a step": f"{setting.budget * dense:,.0f} at first, {dense:,} dense",
    }
    configuration = yaml.safe_dump({**asdict(setting), "drops": [*setting.drops]}, sort_keys=False)
    plan = "\n".join(f"  {name:<16} {text}" for name, text in rows.items())
    return f"configuration\n{_indented(configuration)}\nplan\n{plan}"


def run(setting: Setting, folder: Path | None, out: Path) -> None:
    """Join the other ranks, train, write the summary, and leave together."""
    ranks = place(Settings())
    torch.set_num_threads(threads_of(Settings(), ranks))
    join(ranks)
    out.mkdir(parents=True, exist_ok=True)
    data = _open(setting, folder, ranks)
    torch.manual_seed(setting.seed)
    module = setting.module().to(ranks.device)
    course = setting.course(data.steps_per_epoch, ranks.count)
    method = Method(setting.method, setting.budget, costs=setting.costs)
    outcome = train(module, data, method, course, setting.seed, out / "metrics.jsonl")
    if ranks.leads:
        summary = {**asdict(setting), "workers": ranks.count, **asdict(outcome)}
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"test accuracy {outcome.test:.2f} %, {outcome.bytes_share:.1%} of dense DDP's bytes")
    leave()


class Photographs:
    """ImageNet, decoded as it is asked for; the test images are shared out among the ranks."""

    def __init__(self, batches: PhotographBatches) -> None:
        self._batches = batches
        self._stream: Iterator[tuple[Tensor, Tensor]] = iter(())

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in an epoch."""
        return self._batches.order.steps_per_epoch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's images and labels; steps are asked for in order."""
        epoch, place_in_epoch = divmod(step, self.steps_per_epoch)
        if not place_in_epoch:
            self._stream = self._batches.train(epoch, 0)
        images, labels = next(self._stream)
        return images.contiguous(), labels

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Nothing is held out; per cent of the test images of all ranks."""
        model.eval()
        counts = torch.zeros(2, device=next(model.parameters()).device)
        for images, labels in self._batches.test():
            right = (model.module(images).argmax(1) == labels).sum()
            counts += torch.stack([right, right.new_tensor(len(labels))])
        dist.all_reduce(counts)
        model.train()
        return float("nan"), 100 * float(counts[0] / counts[1])


def _open(setting: Setting, folder: Path | None, ranks: Ranks) -> Batches | Photographs:
    batch = setting.batch * ranks.count
    if setting.dataset == "imagenet":
        if folder is None:
            raise RecipeError("--data is not given: imagenet is read from there, never downloaded")
        options = Settings(
            dataset="imagenet", data_path=str(folder), batch_size=batch, seed=setting.seed
        )
        workers = threads_of(options, ranks)
        return Photographs(open_batches(options, ranks.rank, ranks.count, ranks.device, workers))
    images = open_images(setting.dataset, folder, hold_out=0)
    order = TrainOrder(len(images.train.labels), batch, ranks.rank, ranks.count, setting.seed)
    return Batches(images, order, _augmentation(setting, order))


def _augmentation(setting: Setting, order: TrainOrder) -> Augmentation | None:
    if not (setting.shift or setting.mirror):
        return None
    facts = FACTS[setting.dataset]
    # Images are standardised before: what a shift brings in is the mean.
    preset = Preset(
        channels=facts.channels,
        size=facts.size,
        mean=(0.0,) * facts.channels,
        std=(1.0,) * facts.channels,
        shift=setting.shift,
        mirror=setting.mirror,
        photographs=False,
    )
    return Augmentation(preset, order)


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in choices:
        hint = nearest(value, choices)
        raise RecipeError(
            f"{name} {value!r} is not one of {', '.join(choices)}; the nearest is {hint!r}"
        )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines()) + "\n"


if __name__ == "__main__":
    main()
