"""Pieces: a bucket cut into equal parts along the first dimension of its parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchcomp.checkpoints.pieces import Pieces
from torchcomp.engine.bucket import Bucket, BucketShape, memory_order

FORMATS = ["contiguous", "transposed", "permuted", "sliced", "channels_last"]


def laid_out(shape: tuple[int, ...], form: str) -> Tensor:
    """A parameter of this shape, in one of several memory formats."""
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1
    if form == "transposed" and len(shape) > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "permuted" and len(shape) > 2:
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "sliced" and shape:
        return values.repeat_interleave(2, -1)[..., ::2]
    if form == "channels_last" and len(shape) == 4:
        return values.contiguous(memory_format=torch.channels_last)
    return values


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
PARAMETERS = st.lists(st.builds(laid_out, SHAPES, st.sampled_from(FORMATS)), min_size=1, max_size=4)


def bucket_of(tensors: list[Tensor]) -> tuple[dict[str, Tensor], Bucket]:
    parameters = {str(index): tensor for index, tensor in enumerate(tensors)}
    return parameters, Bucket.read(BucketShape.of(parameters, parameters), parameters)


def cut_of(pieces: Pieces, parts: dict[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The pieces, in memory that was used before."""
    out = torch.full((pieces.ranks * pieces.piece.numel,), torch.nan)
    return pieces.cut(parts, out.to(dtype or pieces.whole.dtype))


def cut_by_rows(parameter: Tensor) -> bool:
    """Whether the values of a row are next to each other in a bucket."""
    flat = torch.arange(parameter.numel())
    whole = memory_order(parameter, flat)
    each = whole[0].numel() if parameter.dim() and len(whole) else 0
    return bool(parameter.dim()) and all(
        sorted(row.flatten().tolist()) == list(range(i * each, (i + 1) * each))
        for i, row in enumerate(whole)
    )


def expected(parameter: Tensor, part: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's piece: rows as FSDP2 shards them, with zeros where there are none."""
    values = parameter if cut_by_rows(parameter) else part
    each = -(-len(values) // ranks)
    rows = values[rank * each : (rank + 1) * each]
    return torch.cat([rows, values.new_zeros(each - len(rows), *values.shape[1:])])


@given(PARAMETERS, st.integers(1, 6))
def test_each_rank_has_its_rows_and_zeros(tensors: list[Tensor], ranks: int) -> None:
    parameters, bucket = bucket_of(tensors)
    pieces, parts = Pieces(bucket.shape, ranks), bucket.parts()
    cut = cut_of(pieces, parts)
    for rank, flat in enumerate(cut.view(ranks, -1)):
        found = Bucket(pieces.piece, flat).tensors()
        assert list(found) == list(parameters)
        for name, parameter in parameters.items():
            wanted = expected(parameter, parts[name], rank, ranks)
            if parameter.numel():
                assert found[name].shape == wanted.shape
            assert torch.equal(found[name].reshape(-1), wanted.reshape(-1))
    for name, parameter in parameters.items():  # what stands for a piece has no memory of its own
        own = Pieces(BucketShape.of((name,), parameters), ranks)
        like = own.like(parameter)
        assert (tuple(like.shape),) == own.piece.shapes
        assert like.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        assert BucketShape.of((name,), {name: like}).sizes == own.piece.sizes
    # `join` is the inverse.
    back = torch.full_like(bucket.flat, torch.nan)
    pieces.join(cut, Bucket(bucket.shape, back).parts())
    assert torch.equal(back, bucket.flat)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    values = torch.tensor([-0.0, torch.inf, torch.nan, 1e-7, 3.0], dtype=dtype)
    bucket = Bucket(BucketShape.of(("x",), {"x": values}), values)
    pieces = Pieces(bucket.shape, 2)
    back = torch.zeros_like(values)
    pieces.join(cut_of(pieces, bucket.parts()), {"x": back})
    assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))
