"""PowerSGD: low-rank approximation of gradients, by one power iteration per step."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchcomp.aggregators.base import Cost, Residual, ResidualDtype
from torchcomp.engine import host
from torchcomp.engine.bucket import Bucket, BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared, write_rounded
from torchcomp.engine.state import Kind, Slot
from torchcomp.exchange.traffic import Load
from torchcomp.specs.checks import check_count, check_positive


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
    Vectors, and matrices that are too small to gain, are sent uncompressed together with P.

    A rank's residual is what its own message lacks, as in the paper's Algorithm 2. Nothing is lost,
    up to rounding: the sum of all applied means plus the mean residual equals the sum of all mean
    gradients. PyTorch's hook keeps M - P Q^T: its residuals accumulate what differs between ranks.

    Reference: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019.

    Attributes:
        rank: number of columns of P and Q, reduced for a matrix with fewer rows or columns.
        min_ratio: compress a matrix if that makes it more than this many times smaller.
        memory_dtype: dtype of the residual; see Residual. P and Q are float32 or wider.
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
    def per_tensor(self) -> bool:
        # Only the last digits of a product depend on the bucket: on where it puts a matrix.
        return True

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return _plan(self, shape)[:2]

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0, node: int = 1) -> Cost:
        _, q, numel = _plan(self, shape)
        return Cost("allreduce", numel * q.dtype.itemsize, Load(summed=numel * q.dtype.itemsize))

    def prepare(self, bucket: Prepared) -> None:
        bucket.work = _Matrices(bucket.shape, bucket.slots["q"], bucket.device)

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        e, e_next = bucket.open("error")
        q, q_next = bucket.open("q")
        work, exchange = bucket.work, bucket.exchange
        # Step 1. In place, if the residual can store the sum.
        total = e_next if e_next.dtype == q.dtype else torch.empty_like(e, dtype=q.dtype)
        x = [part.contiguous() for part in work.split(torch.add(g, e, out=total))]
        m = [x[i].flatten(1) for i in work.compressed]
        # Q and R are stored transposed: products with a few long rows are several times faster.
        after = work.bases(q_next)
        # Step 2 does not depend on the lengths of Q's columns. Lengths near 1 keep M Q in range.
        sent = list(x)
        for i, matrix, rows in zip(work.compressed, m, work.bases(work.near_1(q)), strict=True):
            sent[i] = rows @ matrix.T
        first = torch.cat([part.flatten() for part in sent])
        exchange.all_reduce(first, divide=True)
        means = list(torch.split(first, work.sizes_sent))
        for i, matrix, r in zip(work.compressed, m, after, strict=True):
            p = means[i] = _orthonormal(means[i].view(len(r), -1))
            # Step 3. R must be subtracted before the all-reduce replaces it with its mean.
            torch.mm(p.T, matrix, out=r)
            matrix.addmm_(p, r, alpha=-1)
        if m:
            exchange.all_reduce(q_next, divide=True)  # step 4: R are views of it
        grads, exact = work.split(g), g.dtype == q.dtype
        for i, r in zip(work.compressed, after, strict=True):
            if exact and i not in work.strided:  # nothing is rounded
                torch.mm(means[i], r, out=grads[i].flatten(1))
            else:
                write_rounded((means[i] @ r).view_as(grads[i]), grads[i], x[i])
        for i in work.dense:
            write_rounded(means[i].view_as(grads[i]), grads[i], x[i].zero_())
        if total is not e_next or work.strided:
            # What is not there already.
            for part, kept in zip(x, work.split(e_next), strict=True):
                kept.copy_(part)
        work.keep_zero_rows(q, q_next)


def _orthonormal(rows: Tensor) -> Tensor:
    """Return P, (n, rank), made orthonormal, from its transpose. A zero column can stay zero."""
    if len(rows) > 1:
        columns: Tensor = torch.linalg.qr(rows.T).Q
        return columns
    # Much faster than a QR decomposition. Below this length, squares underflow in float32. P is
    # then shorter than 1, so less is sent, and nothing is lost.
    return normalize(rows, 2, 1, 1e-18).T


class _Matrices:
    """The matrices in a bucket, with the slot `basis` for Q."""

    def __init__(self, shape: BucketShape, basis: Slot, device: torch.device) -> None:
        self._shape, self._sizes = shape, list(basis.sizes)
        # Parameters by number: those that are compressed, the others, and those not contiguous.
        numbers = {name: i for i, name in enumerate(shape.names)}
        self.compressed = [numbers[name] for name in basis.names]
        self.dense = set(numbers.values()).difference(self.compressed)
        strides = [torch.empty(size, device="meta").stride() for size in shape.shapes]
        both = enumerate(zip(shape.strides, strides, strict=False))
        self.strided = {i for i, (own, contiguous) in both if own != contiguous}
        self.sizes_sent = list(shape.sizes)  # elements of each in the first message
        self._widths = [shape.sizes[i] // shape.shapes[i][0] for i in self.compressed]  # of Q^T
        self._rows: list[int] = []  # length of each row of all Q^T
        for i, size, width in zip(self.compressed, basis.sizes, self._widths, strict=True):
            self._rows += [width] * (size // width)
            self.sizes_sent[i] = size // width * shape.shapes[i][0]
        # The lengths of the columns of a Q, with that Q and its version.
        self._lengths: tuple[Tensor | None, int, Tensor] = None, 0, torch.empty(0)
        row_of = torch.repeat_interleave(torch.tensor(self._rows, dtype=torch.int64))
        self._row_of = host.copy_to(row_of, device)  # of each element

    def split(self, flat: Tensor) -> list[Tensor]:
        return list(Bucket(self._shape, flat).tensors().values())

    def bases(self, flat: Tensor) -> list[Tensor]:
        """Return each Q^T; (rank, width)."""
        both = zip(torch.split(flat, self._sizes), self._widths, strict=True)
        return [part.view(-1, width) for part, width in both]

    def near_1(self, q: Tensor) -> Tensor:
        """Return all Q, each column divided by its largest magnitude."""
        if not self._rows:
            return q
        # Usually, `keep_zero_rows` has looked at this Q at the end of the last step.
        of, version, lengths = self._lengths
        if of is not q or version != q._version:
            lengths = self._lengths_of(q)
            self._lengths = q, q._version, lengths
        return q / lengths.clamp(min=1e-37)

    def keep_zero_rows(self, before: Tensor, after: Tensor) -> None:
        """Replace columns of the new Q that are zero: they would stay zero in all later steps."""
        if self._rows:
            lengths = self._lengths_of(after)
            zero = lengths == 0
            torch.where(zero, before, after, out=after)
            lengths = torch.where(zero, self._lengths[2], lengths)
            self._lengths = after, after._version, lengths

    def _lengths_of(self, q: Tensor) -> Tensor:
        norms = torch.stack(torch._foreach_norm(torch.split(q, self._rows), torch.inf))
        return norms.index_select(0, self._row_of)


@lru_cache(maxsize=1024)
def _plan(method: PowerSGD, shape: BucketShape) -> tuple[Slot, Slot, int]:
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
    # Seeded by the name alone: the same in all runs, at whatever step a parameter first appears.
    out.copy_(torch.from_numpy(Key(0).of_tensor(name).shared().standard_normal(out.numel())))
