"""Averagers on ranks of this process, with gradients that are a function of step and rank."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.engine import small
from torchcomp import Averager
from torchcomp.engine.keys import Key
from torchcomp.exchange import Exchange, run_in_process

on_ranks = run_in_process
Named = dict[str, Tensor]

SEED = 5
SHAPES = {
    "conv": (8, 4, 3, 3),
    "scale": (),
    "wide": (6, 40),
    "bias": (12,),
    "tall": (50, 9),
    "small": (2, 3),
    "empty": (0, 3),
}
ONE = (tuple(SHAPES),)
SEVERAL = (("small", "tall"), ("bias", "wide", "empty"), ("scale", "conv"))
OTHERS = (("conv", "wide", "tall"), ("scale",), ("empty", "bias", "small"))


def parameters(dtype: torch.dtype = torch.float64) -> Named:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    tensors["conv"] = tensors["conv"].to(memory_format=torch.channels_last)
    return tensors


def gradient(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Named:
    """Return a gradient: a slowly changing part, equal on all ranks, plus noise of each rank."""
    return {
        name: (_normal(name, step // 5, -1, shape) + 0.3 * _normal(name, step, rank, shape)).to(
            dtype
        )
        for name, shape in SHAPES.items()
    }


def _normal(name: str, step: int, rank: int, shape: tuple[int, ...]) -> Tensor:
    seed = zlib.crc32(f"{name} {step} {rank}".encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def history(steps: int, world_size: int) -> list[list[Named]]:
    return [[gradient(step, rank) for rank in range(world_size)] for step in range(steps)]


def first_q(name: str, rows: int, columns: int) -> Tensor:
    """The first Q of PowerSGD."""
    numbers = Key(0).of_tensor(name).shared().standard_normal((columns, rows))
    return torch.from_numpy(numbers).T


def averager(
    spec: str, exchange: Exchange, dtype: torch.dtype = torch.float64, **options: Any
) -> Averager:
    options = {"seed": SEED, "groups": SEVERAL} | options
    return Averager(spec, exchange, parameters(dtype), **options)


def step(
    engine: Averager, tensors: Named, scale: float = 1.0, groups: Any = None, **finish: Any
) -> Named:
    """Average `tensors` in one step, in these buckets, and return their means."""
    scaled = {name: tensor * scale for name, tensor in tensors.items()}
    _, means = small.step(engine, scaled, scale, groups=groups, **finish)
    return {name: mean.contiguous() / scale for name, mean in means.items()}


def steps(
    engine: Averager,
    numbers: Sequence[int],
    dtype: torch.dtype = torch.float64,
    scale: Callable[[int], float] = lambda number: 1.0,
) -> list[Named]:
    rank = engine.exchange.rank
    return [step(engine, gradient(n, rank, dtype), scale(n)) for n in numbers]


def assert_equal(actual: Named, expected: Named) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


def assert_near(actual: Named, expected: Named, tolerance: float = 1e-11) -> None:
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def mean(tensors: Sequence[Named]) -> Named:
    return {name: sum(each[name] for each in tensors) / len(tensors) for name in tensors[0]}


total = small.total
