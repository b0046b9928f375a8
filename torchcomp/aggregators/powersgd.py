"""PowerSGD: low-rank approximation of gradients, by one power iteration per step."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchcomp.aggregators.base import Cost
from torchcomp.aggregators.residual import Residual, ResidualDtype
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.checks import check_count, check_positive
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow
from torchcomp.keys import Key
from torchcomp.state import Kind, Slot, State
from torchcomp.traffic import Load


@dataclass(frozen=True)
class PowerSGD(Residual):
    """``powersgd(rank=2)``: low-rank matrices with error feedback.

    A parameter is viewed as a matrix: its first dimension by all others. Let g be its gradient on
    this rank and e its residual, which starts at 0. Q has `rank` columns and starts random.

    1. M = g + e
    2. P <- mean of M Q, with its columns made orthonormal
    3. R = M^T P;  e <- M - P R^T
    4. Q <- mean of R;  g <- P Q^T      (e also keeps the error of rounding to g's dtype)

    The next step starts from this Q. A column that became zero keeps its previous value instead.
    Vectors, and matrices that are too small to gain, are sent uncompressed together with P. The
    size of a message therefore depends on the shapes, and ``explain`` needs a model.

    A rank's residual is what its own message lacks, as in the paper's Algorithm 2. The mean of
    P R^T is P Q^T. Nothing is lost, up to rounding: the sum of all applied means plus the mean
    residual equals the sum of all mean gradients. PyTorch's hook keeps M - P Q^T instead. It
    applies the same means, but its residuals accumulate the differences between ranks permanently.

    Reference: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019.

    Attributes:
        rank: number of columns of P and Q, reduced for a matrix with fewer rows or columns.
        min_ratio: compress a matrix if that makes it more than this many times smaller.
        memory_dtype: dtype of the residual. The default is fp32, or the gradient's dtype if that is
            wider. P and Q are float32 or wider.
    """

    name: ClassVar[str] = "powersgd"
    example: ClassVar[str] = "powersgd(rank=2)"

    rank: int = 2
    min_ratio: float = 1.0
    memory_dtype: ResidualDtype = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("rank", self.rank, owner=self.name)
        check_positive("min_ratio", self.min_ratio, owner=self.name)

    @property
    def depends_on_grouping(self) -> bool:
        # Each matrix is approximated separately, whichever bucket it is in.
        return False

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return _plan(self, shape)[:2]

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0, node: int = 1) -> Cost:
        _, q, numel = _plan(self, shape)
        return Cost("allreduce", numel * q.dtype.itemsize, Load(summed=numel * q.dtype.itemsize))

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        error, basis, _ = _plan(self, bucket.shape)
        flats = (bucket.flat, *state.open(error, bucket.flat.device))
        g, e, residual = (Bucket(bucket.shape, flat).tensors() for flat in flats)
        # Step 1. Contiguous, so that `m` are views of `x` and step 3 works in place.
        x = {name: (g[name].to(basis.dtype) + e[name]).contiguous() for name in g}
        m = {name: x[name].flatten(1) for name in basis.names}
        # Q and R are stored transposed: products with a few long rows are several times faster.
        before, after = state.open(basis, bucket.flat.device)
        rows = (zip(m, torch.split(z, list(basis.sizes)), strict=True) for z in (before, after))
        q, r = ({n: part.view(-1, m[n].shape[1]) for n, part in each} for each in rows)
        # Step 2 does not depend on the lengths of Q's columns. Lengths near 1 keep M Q in range.
        sent = [normalize(q[n], torch.inf, 1, 1e-37) @ m[n].T if n in m else x[n] for n in g]
        first = torch.cat([part.flatten() for part in sent]).div_(exchange.world_size)
        exchange.all_reduce(first)
        p = dict(zip(g, torch.split(first, [part.numel() for part in sent]), strict=True))
        for name in m:
            p[name] = torch.linalg.qr(p[name].view(len(q[name]), -1).T).Q
            # Step 3. R must be subtracted before the all-reduce replaces it with its mean.
            torch.mm(p[name].T, m[name], out=r[name])
            m[name].addmm_(p[name], r[name], alpha=-1)
        if m:
            exchange.all_reduce(after.div_(exchange.world_size))  # step 4: `r` are views of `after`
        for name, out in g.items():
            mean = (p[name] @ r[name] if name in m else p[name]).view(out.shape)
            unsent = x[name] if name in m else torch.zeros_like(mean)
            narrow(mean, out.dtype, out)
            residual[name].copy_(unsent if out.dtype == mean.dtype else unsent + mean.sub_(out))
            if name in m:
                # A zero column would stay zero in all later power iterations.
                r[name].copy_(torch.where(r[name].any(1, keepdim=True), r[name], q[name]))


@lru_cache(maxsize=1024)
def _plan(method: PowerSGD, shape: BucketShape) -> tuple[Slot, Slot, int]:
    """Return the slots of a bucket, and the number of elements that a rank sends for it."""
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
    """Draw the initial Q of a parameter: the same in all runs, on all ranks."""
    # Seeded by the name alone: it must not depend on the step at which a parameter first appears.
    out.copy_(torch.from_numpy(Key(0).of_tensor(name).shared().standard_normal(out.numel())))
