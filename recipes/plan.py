"""The plan of a run, printed by ``--dry-run``: settings, steps, synchronisations and traffic."""

from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import nn

import torchcomp
from recipes.errors import RecipeError
from recipes.image_data.batches import DatasetSizes, dataset_sizes, preset_of
from recipes.image_data.order import TrainOrder
from recipes.models import build_model, check_model
from recipes.optimizers import lr_function
from recipes.options import as_plain_dict
from recipes.settings import Settings
from torchcomp.specs.auto import Auto
from torchcomp.specs.learning_rates import LRFunction
from torchcomp.specs.spec import (
    candidates,
    parse_aggregator,
    parse_outer_step,
    parse_registered,
    parse_schedule,
)


def total_steps(settings: Settings, steps_per_epoch: int) -> int:
    total = settings.epochs * steps_per_epoch
    if settings.warmup_steps >= total:
        raise RecipeError(
            f"--warmup-steps {settings.warmup_steps} must be below the run's {total} steps "
            f"({settings.epochs} epochs of {steps_per_epoch}); shorten the warm-up or raise "
            "--epochs"
        )
    return total


def check_micro_batches(settings: Settings, world_size: int) -> None:
    """Check that every rank gets equal micro-batches and, with MixUp, images to mix."""
    micro_batches = world_size * settings.accumulate
    if settings.batch_size % micro_batches:
        raise RecipeError(
            f"--batch-size {settings.batch_size} cannot be divided into {micro_batches} equal "
            f"micro-batches ({world_size} ranks x --accumulate {settings.accumulate}); "
            "--batch-size counts the images of all ranks"
        )
    if settings.mixup:
        _check_images_to_mix(settings, world_size)


def _check_images_to_mix(settings: Settings, world_size: int) -> None:
    # MixUp pairs images of one rank, so that no image is sent for it.
    per_rank = settings.batch_size // world_size
    if settings.mixup_shares == "image" and per_rank % 2:
        raise RecipeError(
            f"--mixup {settings.mixup:g} mixes pairs of images, but --batch-size "
            f"{settings.batch_size} gives each of the {world_size} ranks {per_rank} images; "
            "choose a --batch-size that gives an even number"
        )
    if settings.mixup_shares == "micro-batch" and per_rank == settings.accumulate:
        raise RecipeError(
            f"--mixup-shares micro-batch mixes the images of a micro-batch, but --batch-size "
            f"{settings.batch_size} gives micro-batches of 1 image ({world_size} ranks x "
            f"--accumulate {settings.accumulate}); raise --batch-size or lower --accumulate"
        )


def describe(settings: Settings, world_size: int) -> str:
    """Return the resolved configuration and the plan as text."""
    check_specs(settings)
    check_micro_batches(settings, world_size)
    sizes = dataset_sizes(settings)
    # For its checks and its number of steps; the rank does not matter.
    order = TrainOrder(sizes.train_images, settings.batch_size, 0, world_size, settings.seed)
    per_epoch = order.steps_per_epoch
    total = total_steps(settings, per_epoch)
    lr_at = lr_function(settings, per_epoch)
    # Step-cosine rounds the decay but not warm-up, so warm-up can end above the first decay step.
    peak = max(lr_at(max(settings.warmup_steps - 1, 0)), lr_at(settings.warmup_steps))
    model = _model_without_memory(settings, sizes)
    cost = plan_cost(settings, model, lr=lr_at, total_steps=total, world_size=world_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = {
        "model": f"{settings.model}, {parameters:,} parameters",
        "images": f"{sizes.train_images:,} to train, {sizes.test_images:,} to test",
        "ranks": f"{world_size}, {settings.batch_size // world_size} images each per step",
        "steps": f"{total:,} ({settings.epochs} epochs of {per_epoch:,})",
        "learning rate": f"{lr_at(0):g} first, {peak:g} at most, {lr_at(total - 1):g} last",
        "synchronisations": f"{cost.synchronisations:,}",
        "bytes in all": f"{cost.total_bytes:,} sent by each rank",
    }
    return f"{as_text(as_plain_dict(settings), rows)}\n{cost.plan}"


def dense_bytes(model: nn.Module, world_size: int) -> int:
    """Return the bytes that a rank sends per step without torchcomp."""
    return int(torchcomp.explain("mean", model=model, world_size=world_size).dense_bytes_sent)


def averaging_method(settings: Settings) -> str:
    """Return the spec that averages gradients or, with ``--sync``, pseudo-gradients."""
    # "mean" is the spec of an uncompressed average.
    return "mean" if settings.compress == "none" else settings.compress


def outer_step(settings: Settings) -> str | None:
    """Return the spec of the outer step, or None for plain averaging."""
    return None if settings.outer == "none" else settings.outer


def check_specs(settings: Settings) -> None:
    if settings.compress != "none":
        parse = parse_registered if settings.sync == "none" else parse_aggregator
        method = parse(settings.compress)
        if isinstance(method, Auto):
            candidates(method)
    if settings.sync != "none":
        parse_schedule(settings.sync)
    if settings.outer != "none":
        parse_outer_step(settings.outer)


@dataclass(frozen=True)
class Cost:
    plan: torchcomp.Plan  # bytes per rank and step, averaged over the run
    synchronisations: int  # how often the ranks exchange gradients or weights
    total_bytes: int  # bytes that a rank sends in the whole run


def plan_cost(
    settings: Settings, model: nn.Module, *, lr: LRFunction, total_steps: int, world_size: int
) -> Cost:
    method = averaging_method(settings)
    if settings.sync == "none":
        if isinstance(parse_registered(method), torchcomp.Auto):
            method = "mean"  # at most: nothing is known yet of what it will choose
        plan = torchcomp.explain(method, model=model, world_size=world_size)
        return Cost(plan, total_steps, total_steps * plan.bytes_sent)
    # A schedule's plan has the mean bytes per step, which are rounded. For an exact total,
    # multiply the bytes of one synchronisation.
    bytes_per_sync = torchcomp.explain(
        "every(1)", model=model, world_size=world_size, total_steps=1, compress=method
    ).bytes_sent
    plan = torchcomp.explain(
        settings.sync,
        model=model,
        world_size=world_size,
        lr=lr,
        total_steps=total_steps,
        warmup_steps=settings.warmup_steps,
        compress=method,
        outer=outer_step(settings),
    )
    assert plan.syncs is not None, "the plan of a schedule has a number of synchronisations"
    return Cost(plan, plan.syncs, plan.syncs * bytes_per_sync)


def as_text(configuration: dict[str, Any], rows: dict[str, str]) -> str:
    """Return a configuration in YAML, followed by the rows of a plan."""
    width = max(map(len, rows))
    plan = "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
    # In the order of the fields, and valid as a configuration file.
    settings = yaml.safe_dump(configuration, sort_keys=False)
    return f"configuration\n{_indented(settings)}\nplan\n{_indented(plan)}"


def _model_without_memory(settings: Settings, sizes: DatasetSizes) -> nn.Module:
    preset = preset_of(settings)
    # The meta device allocates nothing, so the plan of a large model takes seconds anywhere.
    with torch.device("meta"):
        model = build_model(
            settings.model,
            channels=preset.channels,
            classes=sizes.classes,
            small_stem=settings.small_stem,
        )
    check_model(model, settings.model, channels=preset.channels, size=preset.size)
    return model


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines()) + "\n"
