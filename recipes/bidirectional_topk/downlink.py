"""Downlink traffic: the union of the workers' supports, in entries and in bytes."""

import statistics
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from recipes.bidirectional_topk.problems import Problem
from recipes.bidirectional_topk.simulation import LoggedExchange, Workers
from recipes.bidirectional_topk.training import train
from torchcomp import Plan, explain
from torchcomp.compressors import TopK

RATIO = 0.001
LR = 0.1
_TOPK = f'topk({RATIO}, scope="model")'
DENSE = "mean"
# Both routes of error feedback give the same result. The all-gather is faster to simulate.
ONE_WAY = f'ef({_TOPK}, exchange="allgather")'
SHARDED = f'ef({_TOPK}, exchange="sharded")'
BOTH_WAYS = f'bidirectional({_TOPK}, {_TOPK}, selection="exact")'
BY_SHARD = f'bidirectional({_TOPK}, {_TOPK}, selection="shard")'
WATCHED = {"unidirectional": ONE_WAY, "bidirectional": BOTH_WAYS}
# Steps that one worker trains before the measurement. With fresh weights all gradients point in a
# similar direction. Later each one follows the ten images of its worker.
PHASES = {"start": 0, "trained": 1000}
# The thesis's unions by N, for K = 0.001 d: MNIST and Fashion-MNIST models, CIFAR-10's VGG19.
PUBLISHED = {20: 19.4, 50: 46.5, 100: 86.0}


@dataclass(frozen=True)
class Downlink:
    """One row of the table: a model, its training phase, a method, a number of workers.

    Attributes:
        union: number of entries that at least one worker sent, in units of K; mean over the second
            half of the steps.
        random_union: the expected union of random supports.
        union_bytes: size of a server's message with the union, or with all d values if those are
            smaller.
        k_bytes: size of a server's message with K entries.
        up, down, control: bytes that a rank received in the last step for its shard, as downlink
            messages, and for counts and the threshold search. Counted by its exchange; mean over
            the ranks.
        up_most: the largest number of bytes that a rank received for its shard.
        by_shard: bytes that a rank receives in total with ``selection="shard"``.
        gather, sharded: bytes that a rank receives under error feedback with an uncompressed
            downlink, by its two routes.
    """

    dataset: str
    model: str
    phase: str
    method: str
    workers: int
    d: int
    k: int
    steps: int
    union: float
    random_union: float
    union_bytes: int
    k_bytes: int
    up: float
    down: float
    control: float
    up_most: int
    by_shard: int
    gather: int
    sharded: int

    @property
    def saving(self) -> float:
        """By what factor the message of a server shrinks."""
        return self.union_bytes / self.k_bytes

    def cells(self) -> list[object]:
        """Return the row of the CSV."""
        rounded = {"union": f"{self.union:.3f}", "random_union": f"{self.random_union:.3f}"}
        published = PUBLISHED.get(self.workers, "")
        return [*(asdict(self) | rounded).values(), published, f"{self.saving:.2f}"]

    @classmethod
    def of(cls, row: dict[str, str]) -> "Downlink":
        """Read a row of the CSV."""
        types: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        return cls(**{name: read(row[name]) for name, read in types.items()})


COLUMNS = (*(field.name for field in fields(Downlink)), "published_union", "saving")


class UnionLog:
    """The size of the union after every step, in units of what one worker sent."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.sizes: list[float] = []

    def __call__(self, step: int) -> None:
        """Record the step that has just been taken."""
        masks = torch.stack([torch.cat(list(each.values())) for each in self.workers.supports])
        self.sizes.append(float(masks.any(0).sum()) / float(masks[0].sum()))

    @property
    def late(self) -> float:
        """Mean over the second half of the steps."""
        return statistics.fmean(self.sizes[len(self.sizes) // 2 :])


def measure(problem: Problem, phase: str, method: str, count: int, steps: int) -> Downlink:
    """Train for some steps and count what the workers sent and received."""
    model = problem.build(seed=0)
    single_worker = Workers(model, DENSE, 1)
    train(problem, single_worker, model, lr=LR, steps=PHASES[phase], seed=1)
    workers = Workers(model, WATCHED[method], count, watch=True)
    log = UnionLog(workers)
    train(problem, workers, model, lr=LR, steps=steps, seed=0, after_step=log)
    d = sum(parameter.numel() for parameter in model.parameters())
    k = TopK(RATIO).kept(d)
    received = [phases(exchange) for exchange in workers.exchanges]
    up, down, control = (round(statistics.fmean(way), 1) for way in zip(*received, strict=True))
    return Downlink(
        dataset=problem.dataset,
        model=problem.model,
        phase=phase,
        method=method,
        workers=count,
        d=d,
        k=k,
        steps=steps,
        union=log.late,
        random_union=random_union(d, k, count),
        union_bytes=min(_server_bytes(d, round(log.late * k)), 4 * d),
        k_bytes=_server_bytes(d, k),
        up=up,
        down=down,
        control=control,
        up_most=max(up for up, _, _ in received),
        by_shard=_plan(BY_SHARD, d, count).bytes_received,
        gather=_plan(ONE_WAY, d, count).bytes_received,
        sharded=_plan(SHARDED, d, count).bytes_received,
    )


def random_union(d: int, k: int, count: int) -> float:
    """Return the expected union of ``count`` random supports of ``k`` of ``d``, in units of k."""
    return d * (1 - (1 - k / d) ** count) / k


def phases(exchange: LoggedExchange) -> tuple[int, int, int]:
    """Return the bytes a rank received for its shard, as downlink messages, and as control."""
    messages = [received.nbytes for received in exchange.log if received.payload]
    control = sum(received.nbytes for received in exchange.log if not received.payload)
    # Bidirectional TopK has two exchanges of messages; an all-gather has only the downlink.
    up, down = messages if len(messages) == 2 else (0, sum(messages))
    return up, down, control


def _server_bytes(d: int, entries: int) -> int:
    return _plan(f"topk(k={entries})", d, 1).message_bytes


def _plan(spec: str, d: int, count: int) -> Plan:
    return explain(spec, numel=d, world_size=count)


def task(dataset: str, steps: int) -> str:
    """Return the settings that all rows of a table share."""
    return f"{dataset}, {steps} steps, lr {LR:g}, K = {RATIO:g} d"


def order_of(row: dict[str, str]) -> tuple[str, str, str, int]:
    """Return the key by which rows of the CSV are sorted."""
    return row["model"], row["phase"], row["method"], int(row["workers"])


def saving_line(rows: list[Downlink]) -> tuple[float, float, float]:
    """Return slope, intercept and R^2 of the saving against the number of workers."""
    n, saving = [row.workers for row in rows], [row.saving for row in rows]
    slope, intercept = statistics.linear_regression(n, saving)
    return slope, intercept, statistics.correlation(n, saving) ** 2


def by_model(rows: list[Downlink], method: str) -> dict[str, list[Downlink]]:
    """Group one method's rows by model and phase, in order of N."""
    groups: dict[str, list[Downlink]] = {}
    for row in sorted(rows, key=lambda row: row.workers):
        if row.method == method:
            groups.setdefault(f"{row.model}, {row.phase}", []).append(row)
    return groups


def downlink_table(rows: list[Downlink]) -> str:
    """Return unions and savings as text, with the line through the savings."""
    lines = [f"{'':<30}{'N':>4}{'union/K':>9}{'random':>8}{'thesis':>8}{'union B':>9}{'K B':>6}"]
    lines[0] += f"{'saving':>8}"
    for row in rows:
        published = str(PUBLISHED.get(row.workers, "-"))
        lines.append(
            f"{f'{row.model}, {row.phase}, {row.method}':<30}{row.workers:>4}{row.union:>9.2f}"
            f"{row.random_union:>8.2f}{published:>8}{row.union_bytes:>9,}{row.k_bytes:>6}"
            f"{row.saving:>7.2f}x"
        )
    for name, group in by_model(rows, "bidirectional").items():
        slope, intercept, fit = saving_line(group)
        lines.append(f"{name}: saving = {intercept:.2f} + {slope:.3f} N, R^2 = {fit:.4f}")
    return "\n".join(lines)
