"""What has to come down to a worker: the union of the supports, in entries and in bytes."""

import statistics
from dataclasses import asdict, dataclass

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
# Both routes of error feedback have one result; the all-gather is the faster one to simulate.
ONE_WAY = f'ef({_TOPK}, exchange="allgather")'
SHARDED = f'ef({_TOPK}, exchange="sharded")'
BOTH_WAYS = f'bidirectional({_TOPK}, {_TOPK}, selection="exact")'
BY_SHARD = f'bidirectional({_TOPK}, {_TOPK}, selection="shard")'
WATCHED = {"unidirectional": ONE_WAY, "bidirectional": BOTH_WAYS}
# Steps of ordinary training by one worker before the measurement. At the start all gradients point
# one way; later each follows its own ten images.
PHASES = {"start": 0, "trained": 1000}
# The sheet's numbers, by N, for K = 0.001 d: MNIST and Fashion-MNIST models, CIFAR-10's VGG19.
PUBLISHED = {20: 19.4, 50: 46.5, 100: 86.0}


@dataclass(frozen=True)
class Downlink:
    """One row of the table: a model, how long it was trained, a method, a number of workers.

    Attributes:
        union: entries that some worker sent, in units of K; mean over the later steps.
        random_union: the same if supports were random.
        union_bytes: a server's message of the union, or of all d values where that is smaller.
        answer_bytes: a server's message of the K entries that are left of it.
        up, down, control: bytes that a rank received in the last step, counted by its exchange:
            for its shard, as downlink messages, and for counts and the search for the threshold;
            mean over the ranks.
        up_most: the most that a rank received for its shard.
        by_shard: bytes that a rank receives in all with selection="shard".
        gather, sharded: the same under error feedback without compression on the way back, by its
            two routes.
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
    answer_bytes: int
    up: float
    down: float
    control: float
    up_most: int
    by_shard: int
    gather: int
    sharded: int

    @property
    def saving(self) -> float:
        """How many times fewer bytes come down from a server."""
        return self.union_bytes / self.answer_bytes

    def cells(self) -> dict[str, object]:
        """Return the row as the CSV has it."""
        rounded = {"union": f"{self.union:.3f}", "random_union": f"{self.random_union:.3f}"}
        published = PUBLISHED.get(self.workers, "")
        return {
            **asdict(self),
            **rounded,
            "published_union": published,
            "saving": f"{self.saving:.2f}",
        }


class UnionLog:
    """The size of the union after every step, in units of what one worker sent."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.sizes: list[float] = []

    def __call__(self, step: int) -> None:
        """Note the step that has just been taken."""
        masks = torch.stack([torch.cat(list(each.values())) for each in self.workers.supports])
        self.sizes.append(float(masks.any(0).sum()) / float(masks[0].sum()))

    @property
    def late(self) -> float:
        """Mean over the second half of the steps."""
        return statistics.fmean(self.sizes[len(self.sizes) // 2 :])


def measure(problem: Problem, phase: str, method: str, count: int, steps: int) -> Downlink:
    """Train a little, and see what the workers sent and received."""
    model = problem.build(seed=0)
    alone = Workers(model, DENSE, 1)
    train(problem, alone, model, lr=LR, steps=PHASES[phase], seed=1)
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
        answer_bytes=_server_bytes(d, k),
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
    """Return the bytes that came to the owner of a shard, in downlink messages, and besides."""
    messages = [received.nbytes for received in exchange.log if received.payload]
    control = sum(received.nbytes for received in exchange.log if not received.payload)
    up, down = messages if len(messages) == 2 else (0, sum(messages))
    return up, down, control


def _server_bytes(d: int, entries: int) -> int:
    return _plan(f"topk(k={entries})", d, 1).message_bytes


def _plan(spec: str, d: int, count: int) -> Plan:
    return explain(spec, numel=d, world_size=count)
