"""PowerSGD: matrices of low rank in place of gradients, by one power iteration per step."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchcomp.aggregators.base import Aggregator, Cost
from torchcomp.aggregators.feedback import check_memory_dtype, memory_dtype
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.checks import check_count, check_positive
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.routes import narrow_into
from torchcomp.state import Kind, Slot, State
from torchcomp.traffic import Load


@dataclass(frozen=True)
class PowerSGD(Aggregator):
    """``powersgd(rank=2)``: error feedback with messages of low rank, which an all-reduce adds up.

    A parameter is the matrix of its first dimension by all others. With g its gradient on this
    rank, e its residual (0 at the start), and Q of `rank` columns (random at the start):

    1. M = g + e
    2. P <- mean of M Q, its columns made orthonormal
    3. R = M^T P;  e <- M - P R^T
    4. Q <- mean of R;  g <- P Q^T      (plus: e takes up what rounding to g's dtype loses)

    The next step starts from this Q, but for columns of zeros, which would stay zeros: there the
    last Q stays. Vectors, and matrices too small to gain, are sent as they are, together with P.

    A rank's residual is what its own message lacks, as in the paper's Algorithm 2. P R^T has the
    mean P Q^T, so the sum of all applied means plus the mean residual equals the sum of all mean
    gradients, up to the rounding of the residual's dtype. (PyTorch's hook keeps M - P Q^T. That
    gives the same means, but what a rank differs by from the others stays in its residual.)

    Reference: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient compression for
    distributed optimization", NeurIPS 2019.

    Attributes:
        rank: columns of P and Q; fewer where a matrix has fewer rows or columns.
        min_ratio: a matrix is compressed if that makes it more than this many times smaller.
        memory_dtype: dtype of the residual, as in ``ef``; P and Q are float32 or wider.
    """

    name: ClassVar[str] = "powersgd"

    rank: int = 2
    min_ratio: float = 1.0
    memory_dtype: str | None = None

    def __post_init__(self) -> None:
        check_count("rank", self.rank, owner=self.name)
        check_positive("min_ratio", self.min_ratio, owner=self.name)
        check_memory_dtype(self)

    @property
    def whole_model(self) -> bool:
        return False

    @property
    def depends_on_grouping(self) -> bool:
        return False

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        dtype = memory_dtype(self.memory_dtype, shape.dtype)
        sizes = {name: m * r for name, (_, m, r) in _matrices(self, shape).items()}
        return (
            Slot("error", Kind.DEBT, shape.names, shape.sizes, dtype),
            Slot("q", Kind.ESTIMATE, tuple(sizes), tuple(sizes.values()), shape.wide().dtype),
        )

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0) -> Cost:
        saved = sum(n * m - (n + m) * r for n, m, r in _matrices(self, shape).values())
        nbytes = (shape.numel - saved) * shape.wide().dtype.itemsize
        return Cost("allreduce", nbytes, Load(summed=nbytes))

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        def draw(name: str, out: Tensor) -> None:
            out.copy_(torch.from_numpy(key.of_tensor(name).shared().standard_normal(out.numel())))

        shape, device = bucket.shape, bucket.flat.device
        error, basis = self.slots(shape, exchange.world_size, exchange.rank)
        flats = (bucket.flat, *state.open(error, device))
        g, e, residual = (Bucket(shape, flat).tensors() for flat in flats)
        before, after = state.open(basis, device, draw)
        q, r, wide = _columns(self, shape, before), _columns(self, shape, after), after.dtype

        x = {name: (g[name].to(wide) + e[name]).contiguous() for name in g}
        m = {name: x[name].flatten(1) for name in q}
        # The length of Q's columns does not matter to step 2: at 1, M Q stays in range.
        sent = [m[n] @ normalize(q[n], dim=0) if n in q else x[n] for n in g]
        first = torch.cat([part.flatten() for part in sent]).mul_(1.0 / exchange.world_size)
        exchange.all_reduce(first)
        p = dict(zip(g, torch.split(first, [part.numel() for part in sent]), strict=True))
        for name in q:
            p[name] = torch.linalg.qr(p[name].view(len(m[name]), -1)).Q
            torch.mm(m[name].T, p[name], out=r[name])
            m[name].addmm_(p[name], r[name].T, alpha=-1)
        exchange.all_reduce(after.mul_(1.0 / exchange.world_size))
        for name, out in g.items():
            mean = (p[name] @ r[name].T if name in q else p[name]).view(out.shape)
            rest = x[name] if name in q else torch.zeros_like(mean)
            narrow_into(out, mean)
            residual[name].copy_(rest if out.dtype == wide else rest + mean.sub_(out))
            if name in q:
                r[name].copy_(torch.where(r[name].any(0), r[name], q[name]))


@lru_cache(maxsize=1024)
def _matrices(method: PowerSGD, shape: BucketShape) -> dict[str, tuple[int, int, int]]:
    """Rows, columns and rank of the parameters that are compressed."""
    found = {}
    for name, size in zip(shape.names, shape.shapes, strict=True):
        n, m = (size[0], prod(size[1:])) if len(size) > 1 else (1, 1)
        r = min(method.rank, n, m)
        if (n + m) * r * method.min_ratio < n * m:
            found[name] = (n, m, r)
    return found


def _columns(method: PowerSGD, shape: BucketShape, flat: Tensor) -> dict[str, Tensor]:
    """The matrices that lie in the slot "q" of a bucket."""
    matrices = _matrices(method, shape)
    parts = torch.split(flat, [m * r for _, m, r in matrices.values()])
    return {n: part.view(-1, matrices[n][2]) for n, part in zip(matrices, parts, strict=True)}
