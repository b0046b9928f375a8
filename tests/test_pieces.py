"""Pieces: a bucket cut into equal parts along the first dimension of its parameters."""

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
    if form == "sliced" and shape:
        return values.repeat_interleave(2, -1)[..., ::2]
    if form == "channels_last" and len(shape) == 4:
        return values.contiguous(memory_format=torch.channels_last)
    for name, dims, axes in (("transposed", 1, (0, -1)), ("permuted", 2, (1, 2))):
        if form == name and len(shape) > dims:
            return values.transpose(*axes).contiguous().transpose(*axes)
    return values


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
PARAMETERS = st.lists(st.builds(laid_out, SHAPES, st.sampled_from(FORMATS)), min_size=1, max_size=4)


def expected(parameter: Tensor, part: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's piece: rows as FSDP2 shards them, with zeros where there are none."""
    values = part
    if parameter.dim():
        # By rows, if the values of a row are next to each other in a bucket.
        places = memory_order(parameter, torch.arange(parameter.numel()))
        rows = places.reshape(len(places), places[:1].numel()).sort().values.flatten()
        if torch.equal(rows, torch.arange(rows.numel())):
            values = parameter
    each = -(-len(values) // ranks)
    rows = values[rank * each : (rank + 1) * each]
    return torch.cat([rows, values.new_zeros(each - len(rows), *values.shape[1:])])


@given(PARAMETERS, st.integers(1, 6))
def test_each_rank_has_its_rows_and_zeros(tensors: list[Tensor], ranks: int) -> None:
    parameters = {str(index): tensor for index, tensor in enumerate(tensors)}
    bucket = Bucket.read(BucketShape.of(parameters, parameters), parameters)
    pieces, parts = Pieces(bucket.shape, ranks), bucket.parts()
    # In memory that was used before.
    cut = pieces.cut(parts, torch.full((ranks * pieces.piece.numel,), torch.nan).double())
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
