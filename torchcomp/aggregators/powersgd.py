"""PowerSGD: low-rank approximation of gradients, by one power iteration per step."""

from collections.abc import Iterator
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
from torchcomp.kernels.cast import narrow
from torchcomp.keys import Key
from torchcomp.prepared import Prepared
from torchcomp.state import Kind, Slot
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

    def prepare(self, bucket: Prepared) -> None:
        bucket.work = _Work(bucket.shape, _plan(self, bucket.shape)[1])

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        e, e_next = bucket.open("error")
        q, q_next = bucket.open("q")
        work, ranks, exchange = bucket.work, bucket.exchange.world_size, bucket.exchange
        # Step 1. Contiguous, so that step 3 works in place.
        grads, errors = work.split(g), work.split(e)
        x = [(a.to(q.dtype) + b).contiguous() for a, b in zip(grads, errors, strict=True)]
        # By matrix: M, and Q and R, which are stored transposed: products with a few long rows are
        # several times faster.
        matrices = [(x[i].flatten(1), old, new) for i, old, new in work.bases(q, q_next)]
        # Step 2 does not depend on the lengths of Q's columns. Lengths near 1 keep M Q in range.
        sent = list(x)
        for i, (m, old, _) in zip(work.compressed, matrices, strict=True):
            sent[i] = normalize(old, torch.inf, 1, 1e-37) @ m.T
        first = torch.cat([part.flatten() for part in sent]).div_(ranks)
        exchange.all_reduce(first)
        means = list(torch.split(first, work.sizes_sent))
        for i, (m, old, new) in zip(work.compressed, matrices, strict=True):
            means[i] = torch.linalg.qr(means[i].view(len(old), -1).T).Q
            # Step 3. R must be subtracted before the all-reduce replaces it with its mean.
            torch.mm(means[i].T, m, out=new)
            m.addmm_(means[i], new, alpha=-1)
        if matrices:
            exchange.all_reduce(q_next.div_(ranks))  # step 4: the R are views of it
        for i, (_, old, new) in zip(work.compressed, matrices, strict=True):
            means[i] = means[i] @ new
            # A zero column would stay zero in all later power iterations.
            new.copy_(torch.where(new.any(1, keepdim=True), new, old))
        for i, (out, residual) in enumerate(zip(grads, work.split(e_next), strict=True)):
            mean = means[i].view(out.shape)
            unsent = torch.zeros_like(mean) if i in work.dense else x[i]
            narrow(mean, out.dtype, out)
            residual.copy_(unsent if out.dtype == mean.dtype else unsent + mean.sub_(out))


class _Work:
    """How a bucket is divided.

    Attributes:
        compressed: numbers of the parameters that are compressed, in the order of the bucket.
        dense: numbers of the others.
        sizes_sent: number of elements of each parameter's part of the first message.
    """

    def __init__(self, shape: BucketShape, basis: Slot) -> None:
        self._shape, self._sizes = shape, list(basis.sizes)
        numbers = {name: i for i, name in enumerate(shape.names)}
        self.compressed = [numbers[name] for name in basis.names]
        self.dense = set(range(len(shape.names))).difference(self.compressed)
        self.sizes_sent = list(shape.sizes)
        self._widths = []
        for i, size in zip(self.compressed, basis.sizes, strict=True):
            rows = shape.shapes[i][0]
            self._widths.append(shape.sizes[i] // rows)
            self.sizes_sent[i] = size // self._widths[-1] * rows

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a bucket, in its shape."""
        return list(Bucket(self._shape, flat).tensors().values())

    def bases(self, before: Tensor, after: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Iterate over the matrices: number of the parameter, Q before the step and after it."""
        both = zip(torch.split(before, self._sizes), torch.split(after, self._sizes), strict=True)
        for i, width, (old, new) in zip(self.compressed, self._widths, both, strict=True):
            yield i, old.view(-1, width), new.view(-1, width)


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
