"""What a run would do, without doing it: ``--dry-run``."""

from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import nn

import torchcomp
from recipes.errors import RecipeError
from recipes.image_data import Facts, facts, preset_of
from recipes.image_data.order import TrainOrder
from recipes.lr_schedules import rate_of
from recipes.models import build_model, check_model
from recipes.options import resolved
from recipes.settings import Settings
from torchcomp.learning_rates import LRFunction
from torchcomp.spec import parse_aggregator, parse_outer_step, parse_schedule


def total_steps(settings: Settings, steps_per_epoch: int) -> int:
    """Return the optimizer steps of the whole run, after checking that warm-up fits."""
    total = settings.epochs * steps_per_epoch
    if settings.warmup_steps >= total:
        raise RecipeError(
            f"--warmup-steps {settings.warmup_steps} leaves nothing of the run's {total} steps "
            f"({settings.epochs} epochs of {steps_per_epoch})"
        )
    return total


def check_micro_batches(settings: Settings, ranks: int) -> None:
    """Refuse a batch that its ranks cannot split into equal micro-batches, or MixUp's pairs."""
    pieces = ranks * settings.accumulate
    if settings.batch_size % pieces:
        raise RecipeError(
            f"--batch-size {settings.batch_size} cannot be divided into {pieces} micro-batches "
            f"({ranks} ranks x --accumulate {settings.accumulate}): it counts the images of all "
            "ranks, and every micro-batch must be as large"
        )
    each = settings.batch_size // ranks
    if settings.mixup and each % 2:
        raise RecipeError(
            f"--mixup {settings.mixup:g} mixes the images of a rank in pairs, and --batch-size "
            f"{settings.batch_size} over {ranks} ranks gives each {each}: choose one that gives an "
            "even number"
        )


def describe(settings: Settings, ranks: int) -> str:
    """Return the resolved configuration and the plan, as text."""
    check_specs(settings)
    check_micro_batches(settings, ranks)
    known = facts(settings)
    order = TrainOrder(known.train_images, settings.batch_size, 0, ranks, settings.seed)
    per_epoch = order.steps_per_epoch
    total = total_steps(settings, per_epoch)
    rate = rate_of(settings, per_epoch)
    # The highest rate is on one of the two sides of warm-up's end: step-cosine rounds only one.
    peak = max(rate(max(settings.warmup_steps - 1, 0)), rate(settings.warmup_steps))
    model = _weightless(settings, known)
    cost = planned(settings, model, rate=rate, total_steps=total, ranks=ranks)
    weights = sum(parameter.numel() for parameter in model.parameters())
    rows = {
        "model": f"{settings.model}, {weights:,} parameters",
        "images": f"{known.train_images:,} to train, {known.test_images:,} to test",
        "ranks": f"{ranks}, {settings.batch_size // ranks} images each per step",
        "steps": f"{total:,} ({settings.epochs} epochs of {per_epoch:,})",
        "learning rate": f"{rate(0):g} first, {peak:g} at most, {rate(total - 1):g} last",
        "synchronisations": f"{cost.exchanges:,}",
        "bytes in all": f"{cost.bytes_in_all:,} sent by each rank",
    }
    return f"{as_text(resolved(settings), rows)}\n{cost.plan}"


def dense_bytes(model: nn.Module, ranks: int) -> int:
    """Return the bytes that a rank sends in one dense step."""
    return int(torchcomp.explain("mean", model=model, world_size=ranks).dense_bytes_sent)


def averaging_method(settings: Settings) -> str:
    """Return the spec that averages gradients or, with ``--sync``, pseudo-gradients."""
    return "mean" if settings.compress == "none" else settings.compress


def outer_step(settings: Settings) -> str | None:
    """Return the spec of the outer step, or None for plain averaging."""
    return None if settings.outer == "none" else settings.outer


def check_specs(settings: Settings) -> None:
    """Refuse a ``--compress``, ``--sync`` or ``--outer`` that torchcomp cannot read."""
    if settings.compress != "none":
        parse_aggregator(settings.compress)
    if settings.sync != "none":
        parse_schedule(settings.sync)
    if settings.outer != "none":
        parse_outer_step(settings.outer)


@dataclass(frozen=True)
class Cost:
    """What a run exchanges.

    Attributes:
        plan: bytes per rank and step, averaged over the run.
        exchanges: of gradients or of weights, in the whole run.
        bytes_in_all: that a rank sends in the whole run.
    """

    plan: torchcomp.Plan
    exchanges: int
    bytes_in_all: int


def planned(
    settings: Settings, model: nn.Module, *, rate: LRFunction, total_steps: int, ranks: int
) -> Cost:
    """Return what the method will send."""
    how = averaging_method(settings)
    if settings.sync == "none":
        plan = torchcomp.explain(how, model=model, world_size=ranks)
        return Cost(plan, total_steps, total_steps * plan.bytes_sent)
    once = torchcomp.explain(
        "every(1)", model=model, world_size=ranks, total_steps=1, compress=how
    ).bytes_sent
    plan = torchcomp.explain(
        settings.sync,
        model=model,
        world_size=ranks,
        lr=rate,
        total_steps=total_steps,
        warmup_steps=settings.warmup_steps,
        compress=how,
        outer=outer_step(settings),
    )
    assert plan.syncs is not None, "a schedule's plan counts them"
    return Cost(plan, plan.syncs, plan.syncs * once)


def as_text(configuration: dict[str, Any], rows: dict[str, str]) -> str:
    """Return a configuration, as a file of it would have it, and the rows of a plan."""
    width = max(map(len, rows))
    plan = "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
    settings = yaml.safe_dump(configuration, sort_keys=False)
    return f"configuration\n{_indented(settings)}\nplan\n{_indented(plan)}"


def _weightless(settings: Settings, known: Facts) -> nn.Module:
    preset = preset_of(settings)
    with torch.device("meta"):
        model = build_model(
            settings.model,
            channels=preset.channels,
            classes=known.classes,
            small_stem=settings.small_stem,
        )
    check_model(model, settings.model, channels=preset.channels, size=preset.size)
    return model


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines()) + "\n"
