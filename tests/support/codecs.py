"""Codecs of artificial buckets, and the bytes of their messages without the frame."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.codec import Codec, Message, codec
from torchcomp.compressors import Compressor
from torchcomp.wire import HEADER, Frames, Layout, Parts


def codec_of(
    compressor: Compressor, sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> Codec:
    names = tuple(f"layer{i}" for i in range(len(sizes)))
    return codec(compressor, names, tuple(sizes), dtype)


def message_of(parts: Parts, layout: Layout) -> Tensor:
    """Return the bytes of one message, without its frame."""
    return payload(Frames([layout], torch.device("cpu")).pack([parts]), wire.nbytes(layout)).clone()


def payload(frame: Tensor, length: int) -> Tensor:
    """Return the message of a frame, a view."""
    return frame[HEADER : HEADER + length]


def framed(message: Tensor, frames: Frames) -> Tensor:
    """Return the frame with these bytes as its message."""
    frame = frames.outgoing().clone()
    payload(frame, len(message)).copy_(message)
    if frames.checksum:
        frames.seal(frame)
    return frame


def fields_of(message: Tensor, layout: Layout) -> Parts:
    """Return the fields of the bytes of one message."""
    frames = Frames([layout], message.device)
    return frames.unpack(framed(message, frames))[0][0]


def packed(codec: Codec, message: Message) -> Tensor:
    """Return the bytes of the message of a codec with one frame."""
    frames = codec.frames(torch.device("cpu"))
    # Not zeros, so that a byte that `pack` fails to write shows.
    payload(frames.outgoing(), codec.nbytes).fill_(0xA5)
    frame = frames.pack([encoded.parts for encoded in message])
    return payload(frame, codec.nbytes).clone()


def unpacked(codec: Codec, message: Tensor) -> Sequence[Parts]:
    """Return the fields by vector of the bytes of a message."""
    frames = codec.frames(message.device)
    return frames.unpack(framed(message, frames))[0]


def inspected(frame: Tensor, frames: Frames) -> int:
    """Return what is found in a received frame."""
    headers = frames.headers(frame[None])
    if headers is None:
        return wire.INTACT
    (words,) = (headers ^ frames.expected).tolist()
    return frames.finding(*words)
