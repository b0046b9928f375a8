"""Codecs of artificial buckets, and the bytes of their messages without the frame."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.codec import Codec, codec
from torchcomp.compressors import Compressor
from torchcomp.compressors.base import Encoded, Vectors
from torchcomp.kernels import checksum
from torchcomp.keys import Key
from torchcomp.wire import Layout, Parts


def codec_of(
    compressor: Compressor,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Codec:
    names = tuple(f"layer{i}" for i in range(len(sizes)))
    return codec(compressor, names, tuple(sizes), dtype, torch.device(device))


def one(compressor: Compressor, x: Tensor, name: str = "") -> Vectors:
    """Return `x` as one vector."""
    return Vectors.of(compressor, x.numel(), x.dtype, x.device, name)


def fields_of(compressor: Compressor, x: Tensor, key: Key, name: str = "") -> Parts:
    """Return the fields of the message of `x` as one vector."""
    (parts,) = compressor.encode(x, one(compressor, x, name), key).parts
    return parts


def decoded(compressor: Compressor, parts: Parts, out: Tensor, key: Key, name: str = "") -> Tensor:
    """Write the decoded message of one vector to `out`, and return it."""
    compressor.mean([[parts]], out, one(compressor, out, name), key, 1)
    return out


def write_fields(parts: Parts, layout: Layout, out: Tensor) -> None:
    """Write the fields of one message to `out`, 1-D uint8, after the check of their layout."""
    torch.cat(wire.raw(parts, layout), out=out)


def packed(codec: Codec, message: Encoded) -> Tensor:
    # Not zeros, so that a byte that `pack` fails to write shows.
    frame = torch.full((codec.framed,), 0xA5, dtype=torch.uint8)
    codec.pack(message, frame)
    return wire.payload(frame, codec.nbytes).clone()


def sealed(message: Tensor) -> Tensor:
    """Return the frame of a message."""
    length = message.numel()
    (header,) = wire.headers((length,), message.device)
    start, zeros = header.split(wire.HEADER)
    frame = torch.cat([start, message, zeros[: -length % 8]])
    checksum.seal(frame, [length])
    return frame


def inspected(frame: Tensor, length: int) -> int:
    """Return what is found in a received frame."""
    found = checksum.inspect([frame], [length])
    return wire.INTACT if found is None else wire.finding(*(int(each) for each in found))
