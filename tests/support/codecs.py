"""Codecs of artificial buckets, and the bytes of their messages without the frame."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.compressors import Compressor
from torchcomp.compressors.base import Encoded, Vectors
from torchcomp.engine.keys import Key
from torchcomp.routes import wire
from torchcomp.routes.codec import Codec, vectors_of
from torchcomp.routes.wire import HEADER, Frames, Layout, Parts


def codec_of(
    compressor: Compressor,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    checksum: bool = False,
) -> Codec:
    names = tuple(f"layer{i}" for i in range(len(sizes)))
    vectors = vectors_of(compressor, names, tuple(sizes), dtype)
    return Codec(vectors, torch.device(device), dtype, checksum=checksum)


def nbytes_of(codec: Codec) -> int:
    """Return the size of the messages of a codec in bytes, without their frames."""
    return sum(codec.frames.lengths)


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


def message_of(parts: Parts, layout: Layout) -> Tensor:
    """Return the bytes of one message, without its frame."""
    return payload(Frames([layout], torch.device("cpu")).pack([parts]), wire.nbytes(layout)).clone()


def payload(frame: Tensor, length: int) -> Tensor:
    """Return the message of a frame, a view."""
    return frame[HEADER : HEADER + length]


def framed(message: Tensor, frames: Frames) -> Tensor:
    """Return the frame with these bytes as its message."""
    frame = frames.outgoing.clone()
    payload(frame, len(message)).copy_(message)
    if frames.checksum:
        frames.seal(frame)
    return frame


def received(message: Tensor, layout: Layout) -> Parts:
    """Return the fields of the bytes of one message."""
    frames = Frames([layout], message.device)
    return frames.unpack(framed(message, frames))[0][0]


def packed(codec: Codec, message: Encoded) -> Tensor:
    """Return the bytes of the message of a codec with one frame."""
    frames, nbytes = codec.frames, nbytes_of(codec)
    # Not zeros, so that a byte that `pack` fails to write shows. The message is copied first: it
    # can be in that memory already.
    parts = [tuple(part.clone() for part in own) for own in message.parts]
    payload(frames.outgoing, nbytes).fill_(0xA5)
    return payload(frames.pack(parts), nbytes).clone()


def unpacked(codec: Codec, message: Tensor) -> Sequence[Parts]:
    """Return the fields by vector of the bytes of a message."""
    return codec.frames.unpack(framed(message, codec.frames))[0]


def is_intact(frame: Tensor, frames: Frames) -> bool:
    headers = frames.headers(frame[None])
    return headers is None or torch.equal(headers, frames.expected)
