"""PowerSGD: matrices of low rank in place of gradients, by one power iteration per step."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchcomp.aggregators.base import Cost
from torchcomp.aggregators.residual import Residual
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.checks import check_count, check_positive
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow
from torchcomp.keys import Key
from torchcomp.state import Kind, Slot, State
from torchcomp.traffic import Load


@dataclass(frozen=True)
class PowerSGD(Residual):
    """``powersgd(rank=2)``: error feedback with messages of low rank, which an all-reduce adds up.

    A parameter is a matrix, its first dimension by all others. With g its gradient on this rank,
    e its residual (0 at the start), and Q of `rank` columns (random at the start):

    1. M = g + e
    2. P <- mean of M Q, its columns made orthonormal
    3. R = M^T P;  e <- M - P R^T
    4. Q <- mean of R;  g <- P Q^T      (plus: e takes up what rounding to g's dtype loses)

    The next step starts from this Q, but where a column is zero, from its last one. Vectors, and
    matrices too small to gain, are sent as they are, with P; so ``explain`` needs a model.

    A rank's residual is what its own message lacks, as in the paper's Algorithm 2. As P R^T has
    the mean P Q^T, the sum of all applied means plus the mean residual equals the sum of all mean
    gradients, up to rounding. (PyTorch's hook keeps M - P Q^T: the same means, but residuals that
    take up, for good, what ranks differ by.)

    Reference: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019.

    Attributes:
        rank: columns of P and Q; fewer where a matrix has fewer rows or columns.
        min_ratio: a matrix is compressed if that makes it more than this many times smaller.
        memory_dtype: dtype of the residual (see Residual); P and Q are float32 or wider.
    """

    name: ClassVar[str] = "powersgd"

    rank: int = 2
    min_ratio: float = 1.0
    memory_dtype: str | None = None

    def __post_init__(self) -> None:
        check_count("rank", self.rank, owner=self.name)
        check_positive("min_ratio", self.min_ratio, owner=self.name)
        super().__post_init__()

    @property
    def depends_on_grouping(self) -> bool:
        return False

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return _plan(self, shape)[:2]

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0) -> Cost:
        _, q, numel = _plan(self, shape)
        return Cost("allreduce", numel * q.dtype.itemsize, Load(summed=numel * q.dtype.itemsize))

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        error, basis, _ = _plan(self, bucket.shape)
        flats = (bucket.flat, *state.open(error, bucket.flat.device))
        g, e, residual = (Bucket(bucket.shape, flat).tensors() for flat in flats)
        x = {name: (g[name].to(basis.dtype) + e[name]).contiguous() for name in g}
        m = {name: x[name].flatten(1) for name in basis.names}
        # Transposed, because products of a few long rows are several times faster.
        before, after = state.open(basis, bucket.flat.device)
        rows = (zip(m, torch.split(z, list(basis.sizes)), strict=True) for z in (before, after))
        q, r = ({n: part.view(-1, m[n].shape[1]) for n, part in each} for each in rows)
        # The lengths of Q's columns do not matter to step 2. Near 1 they keep M Q in range.
        sent = [normalize(q[n], torch.inf, 1, 1e-37) @ m[n].T if n in m else x[n] for n in g]
        first = torch.cat([part.flatten() for part in sent]).div_(exchange.world_size)
        exchange.all_reduce(first)
        p = dict(zip(g, torch.split(first, [part.numel() for part in sent]), strict=True))
        for name in m:
            p[name] = torch.linalg.qr(p[name].view(len(q[name]), -1).T).Q
            torch.mm(p[name].T, m[name], out=r[name])
            m[name].addmm_(p[name], r[name], alpha=-1)
        if m:
            exchange.all_reduce(after.div_(exchange.world_size))
        for name, out in g.items():
            mean = (p[name] @ r[name] if name in m else p[name]).view(out.shape)
            rest = x[name] if name in m else torch.zeros_like(mean)
            narrow(mean, out.dtype, out)
            residual[name].copy_(rest if out.dtype == mean.dtype else rest + mean.sub_(out))
            if name in m:
                r[name].copy_(torch.where(r[name].any(1, keepdim=True), r[name], q[name]))


@lru_cache(maxsize=1024)
def _plan(method: PowerSGD, shape: BucketShape) -> tuple[Slot, Slot, int]:
    """The slots of a bucket, and the number of elements that a rank sends of it."""
    error, sizes, sent = method.error_slot(shape), {}, shape.numel
    for name, size, numel in zip(shape.names, shape.shapes, shape.sizes, strict=True):
        if len(size) > 1 and numel:
            n, m = size[0], numel // size[0]
            r = min(method.rank, n, m)
            if r * (n + m) * method.min_ratio < numel:
                sizes[name] = r * m
                sent += r * (n + m) - numel
    dtype = torch.promote_types(shape.wide().dtype, error.dtype)
    names, numels = tuple(sizes), tuple(sizes.values())
    return error, Slot("q", Kind.ESTIMATE, names, numels, dtype, init=_draw), sent


def _draw(name: str, out: Tensor) -> None:
    """The first Q of a parameter: the same in all runs, on all ranks."""
    out.copy_(torch.from_numpy(Key(0).of_tensor(name).shared().standard_normal(out.numel())))
