"""Time the kernels: select, encode, subtract, decode and quantise.

Times are compared with the *floor*: 12 bytes per entry, at the speed of a copy in the same run.
Error feedback with TopK must read the gradient and the residual and write the new residual.

Rows, in the order in which they are measured:

    copy                      a copy of the vector: 8 bytes per entry
    select cold, warm         add and select without, and with, the threshold of the step before
    message                   the values and the Elias-Fano code of the indices, in their frame
    pack                      copy a message into its frame: nothing, if kernels write there
    subtract                  subtract what is sent
    encode cold, warm         select, encode and subtract, as ``ef(topk(...))`` calls it
    decode 8, decode 64       check the headers of 8 or 64 ranks and average their messages
    step of 8, step of 64     encode warm, and then decode
    add + torch.topk          what selection costs without these kernels
    quantise, dequantise      the whole vector as int8, in its frame
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.gpu.device import Device
from torchcomp.compressors import Compressor, Quantize, TopK
from torchcomp.compressors.base import Vectors
from torchcomp.engine.keys import Key
from torchcomp.kernels import backend
from torchcomp.routes.codec import Codec, vectors_of

KEY = Key(0)
Row = dict[str, Any]

# Bytes per entry that a row must move at least; 12 for all others.
_BYTES = {"copy": 8, "quantise": 5, "dequantise": 5}


def codec_of(compressor: Compressor, x: torch.Tensor) -> Codec:
    """Return the codec of a vector."""
    return Codec(vectors_of(compressor, ("w",), (x.numel(),), x.dtype), x.device, x.dtype)


class Training:
    """The gradient and the residual of one rank, on a device, and the messages of others."""

    def __init__(self, device: Device, n: int, ratio: float, seed: int) -> None:
        self.generator = torch.Generator(device.place).manual_seed(seed)
        make = {"device": device.place, "generator": self.generator}
        # One of two scales per entry, as the layers of a model have.
        self.scale = 0.1 + 0.9 * (torch.rand(n, **make) < 0.1)
        self.g, self.e, self.x = (torch.empty(n, device=device.place) for _ in range(3))
        self.e.normal_(generator=self.generator)
        self.topk = TopK(ratio)
        self.codec = codec_of(self.topk, self.g)
        self.draw()
        self.index = self.topk.select_sum(self.g, self.e, self.x, self.codec.vectors)
        # Not in the frame yet, unless the kernels write there.
        self.encoded = self.topk.encode_selected(self.x, self.index, self.codec.vectors, KEY)

    def draw(self) -> None:
        """Draw a new gradient."""
        self.g.normal_(generator=self.generator).mul_(self.scale)

    def draw_cold(self) -> None:
        """Draw a new gradient for kernels that have just been prepared."""
        self.draw()
        used = self.codec.vectors
        self.codec.vectors = vectors = Vectors(used, used.device, used.dtype)
        vectors.frames = used.frames
        self.prepared = vectors.kernels

    def select(self) -> None:
        self.topk.select_sum(self.g, self.e, self.x, self.codec.vectors)

    def message(self) -> None:
        self.topk.encode_selected(self.x, self.index, self.codec.vectors, KEY)

    def pack(self) -> None:
        self.codec.pack(self.encoded)

    def subtract(self) -> None:
        self.codec.subtract(self.encoded, self.x, KEY)

    def encode(self) -> None:
        g, e, x = self.g, self.e, self.x
        self.codec.encode_sum(g, e, x, KEY)
        # The sum minus what was sent is the new residual.
        self.e, self.x = x, e

    def decoder(self, ranks: int) -> Callable[[], None]:
        """Return a function that averages the frames of `ranks` ranks, all different."""
        frames, sent = self.codec.frames, []
        for _ in range(ranks):
            self.draw()
            self.encode()
            sent.append(frames.outgoing().clone())
        received, expected = torch.stack(sent), frames.expected.repeat(ranks, 1)

        def decode() -> None:
            headers = frames.headers(received)
            if headers is not None:
                headers.bitwise_xor(expected)
            self.codec.mean_of(received, self.g, KEY, ranks)

        return decode

    def torch_topk(self) -> None:
        torch.add(self.g, self.e, out=self.x)
        torch.topk(self.x.abs(), self.topk.kept(self.x.numel()), sorted=False)


def measure(
    device: Device, n: int, ratio: float, form: str, repeats: int, seed: int
) -> Iterator[Row]:
    """Yield the rows of one size, in one form of the kernels.

    Args:
        device: the device to measure on.
        n: entries of the vector.
        ratio: share of them that is kept.
        form: "fast", the form that training uses, or "torch".
        repeats: measurements of which a row has the median.
        seed: seed of the vectors.
    """
    with backend.plain_torch(device.kind) if form == "torch" else nullcontext():
        run = Training(device, n, ratio, seed)
        used = form if form == "torch" or backend.fast_form("sparse", device.kind) else "torch"
        common = {"part": "kernel", "n": n, "k": run.topk.kept(n), "form": used}
        copy = device.milliseconds(lambda: run.x.copy_(run.g), repeats)
        floor = 1.5 * copy  # a copy moves 8 bytes per entry and the floor 12
        for what, work, before in _cases(run):
            # Functions that time something prepare it on their first use.
            milliseconds = device.milliseconds(work(), repeats, before)
            nbytes = _BYTES.get(what, 12) * n
            yield {
                **common,
                "what": what,
                "gpu_ms": f"{milliseconds:.4f}",
                "gb_s": f"{nbytes / milliseconds / 1e6:.1f}",
                "floor_ms": f"{floor:.4f}",
            }


Case = tuple[str, Callable[[], Callable[[], object]], Callable[[], object]]


def _cases(run: Training) -> list[Case]:
    def nothing() -> None:
        pass

    def step(ranks: int) -> Callable[[], None]:
        decode = run.decoder(ranks)

        def both() -> None:
            run.encode()
            decode()

        return both

    quantised = codec_of(Quantize("int8"), run.g)
    quantised.encode(run.g, KEY)
    received = quantised.frames.outgoing().view(1, -1)
    return [
        ("copy", lambda: lambda: run.x.copy_(run.g), nothing),
        ("encode warm", lambda: run.encode, run.draw),
        ("decode 8", lambda: run.decoder(8), nothing),
        ("step of 8", lambda: step(8), run.draw),
        ("step of 64", lambda: step(64), run.draw),
        ("decode 64", lambda: run.decoder(64), nothing),
        ("encode cold", lambda: run.encode, run.draw_cold),
        ("select warm", lambda: run.select, run.draw),
        ("select cold", lambda: run.select, run.draw_cold),
        ("message", lambda: run.message, nothing),
        ("pack", lambda: run.pack, nothing),
        ("subtract", lambda: run.subtract, nothing),
        ("add + torch.topk", lambda: run.torch_topk, nothing),
        ("quantise", lambda: lambda: quantised.encode(run.g, KEY), nothing),
        ("dequantise", lambda: lambda: quantised.mean_of(received, run.x, KEY, 1), nothing),
    ]
