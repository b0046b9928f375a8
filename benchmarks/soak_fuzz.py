"""Mutated messages and specs: each is refused, or used as it is. Nothing crashes or hangs.

Case i of a target is made from the seed and i alone. Worker processes run the cases, so that a
crash or a hang ends one of them, and the case is known.
"""

import multiprocessing
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from multiprocessing.context import SpawnContext
from typing import Any, ClassVar

import torch
from torch import Tensor

import torchcomp
from tests.support.codecs import codec_of
from tests.support.models import METHODS
from tests.support.vectors import normal
from tests.test_compressors import EXAMPLES
from torchcomp.engine.keys import Key
from torchcomp.kernels import backend
from torchcomp.routes import wire
from torchcomp.routes.codec import Codec
from torchcomp.specs.spec import COMPONENTS

SLOW = 1.0
"""Seconds of CPU time that a case may take."""

HANG = 30.0
"""Seconds of wall time of a hang: longer than SLOW, because other programs share the cores."""

_PREPARES = 300.0  # seconds in which a worker must have begun, with kernels that it compiles

_BATCH = 1000
_KEY = Key(seed=7, step=3)


class Problem(AssertionError):
    """A case ended in another way than it may."""


@dataclass
class Outcome:
    """What became of the cases of a target.

    Attributes:
        counts: number of cases by result.
        problems: at most one line for each case that ended in another way.
        slowest: the largest CPU time of a case, in seconds.
    """

    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0


# --- Messages -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Valid:
    """A valid frame, and what decodes it."""

    codec: Codec
    plain: Codec  # the same without Numba
    numel: int
    dtype: torch.dtype
    frame: bytes


class Messages:
    """Frames and messages of every compressor, decoded into a tensor between two margins."""

    RESULTS: ClassVar = ("refused", "unchanged", "other length", "decoded")
    _MARGIN: ClassVar = 1024
    _MARK: ClassVar = 7.0

    @cached_property
    def _valid(self) -> list[_Valid]:
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        sizes = ((5, 0, 64, 1), (1,), (257,), (1000,), (70_000,))
        found = []
        for number, case in enumerate(product(EXAMPLES, dtypes, sizes)):
            compressor, dtype, shape = case
            # Every other frame has a checksum.
            form = {"dtype": dtype, "checksum": number % 2 == 0}
            codec, plain = (codec_of(compressor, shape, **form) for _ in range(2))
            numel = sum(shape)
            if codec.frames.nbytes <= 5000:
                with backend.plain_torch("cpu"):
                    plain.encode(torch.zeros(numel, dtype=dtype), _KEY)  # chooses its kernels
                codec.encode(normal(numel, dtype=dtype), _KEY)
                frame = codec.frames.outgoing().numpy().tobytes()
                found.append(_Valid(codec, plain, numel, dtype, frame))
        return found

    def in_batch(self, number: int) -> Any:
        """The context of a batch: every fourth one runs the kernels without Numba."""
        return backend.plain_torch("cpu") if number % 4 == 3 else nullcontext()

    def prepare(self) -> None:
        """Make the valid messages, and load all kernels, so that no case takes their time."""
        for number, valid in product((0, 3), self._valid):
            with self.in_batch(number):
                for each in range(8):
                    self._decode(valid, valid.frame, random.Random(each))

    def run(self, dice: random.Random) -> str:
        """Run a case. Return one of RESULTS, or raise."""
        valid, other = dice.choice(self._valid), dice.choice(self._valid)
        if dice.random() < 0.4:
            return self._receive(valid, _mutated(valid.frame, other.frame, dice), other, dice)
        header, message = valid.frame[: wire.HEADER], valid.frame[wire.HEADER :]
        changed = _mutated(message, other.frame, dice)
        if dice.random() < 0.8:  # else most of those of another length would never be decoded
            changed = (changed + other.frame * len(message))[: len(message)]
        return self._decode(valid, header + changed, dice)

    def _receive(self, valid: _Valid, changed: bytes, other: _Valid, dice: random.Random) -> str:
        """Check a frame in the receiver's buffer, whose size the receiver knows."""
        size = len(valid.frame)
        changed = (changed + other.frame * size)[:size]
        frames = valid.codec.frames
        headers = frames.headers(_tensor(changed)[None])
        if headers is not None:
            if torch.equal(headers, frames.expected):
                raise Problem("a finding for an intact frame")
            return "refused"
        words = zip(memoryview(changed).cast("q"), memoryview(valid.frame).cast("q"), strict=True)
        differing = [at for at, (one, another) in enumerate(words) if one != another]
        # Without a checksum, only the header shows a change.
        if len(differing) == 1 and (frames.checksum or 8 * differing[0] < wire.HEADER):
            raise Problem("a frame was accepted of which one word has changed")
        # A splice of two frames of one length can be the whole second one.
        return self._decode(valid, changed, dice) if differing else "unchanged"

    def _decode(self, valid: _Valid, frame: bytes, dice: random.Random) -> str:
        fast = backend.fast_form("sparse", "cpu") is not None
        codec, margin = valid.codec if fast else valid.plain, self._MARGIN
        whole = torch.full((valid.numel + 2 * margin,), self._MARK, dtype=valid.dtype)
        out = whole[margin : margin + valid.numel]
        raw, odd = _tensor(frame), dice.randrange(2)
        if odd:  # at an odd address
            raw = torch.cat([raw[:1], raw])[1:]
        try:
            messages = codec.frames.unpack(raw)
        except ValueError:
            if len(frame) == codec.frames.nbytes:
                raise
            return "other length"
        if len(frame) != codec.frames.nbytes:
            raise Problem("a frame of another length was accepted")
        if dice.randrange(2):
            codec.mean(messages, out, _KEY, 1)
        else:
            codec.mean(messages * 2, out, _KEY, 2)
        if not (whole[:margin] == self._MARK).all() or not (whole[-margin:] == self._MARK).all():
            raise Problem("wrote outside of the tensor")
        return "decoded"


def _tensor(content: bytes) -> Tensor:
    # `frombuffer` refuses an empty buffer.
    return torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)[:-1]


def _mutated(content: bytes, other: bytes, dice: random.Random) -> bytes:
    """Apply one to three random changes."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        at, kind = dice.randrange(len(changed) + 1), dice.randrange(7)
        stop = min(len(changed), at + dice.choice((1, 2, 4, 8, 64)))
        if kind == 0:  # flip bits
            for _ in range(dice.choice((1, 1, 2, 8))):
                if changed:
                    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        elif kind == 1:  # overwrite
            changed[at:stop] = bytes([dice.choice((0, 1, 127, 128, 255))]) * (stop - at)
        elif kind == 2:  # truncate
            del changed[at:]
        elif kind == 3:  # extend
            changed += dice.randbytes(dice.choice((1, 7, 8, 100)))
        elif kind == 4:  # splice
            changed[at:] = other[dice.randrange(len(other) + 1) :]
        elif kind == 5:  # insert or remove in the middle
            changed[at : dice.choice((at, stop))] = dice.randbytes(dice.choice((0, 1, 8)))
        else:  # noise
            changed[at:stop] = dice.randbytes(stop - at)
    return bytes(changed)


# --- Specs ----------------------------------------------------------------------------------------


class Specs:
    """Mutated spec strings of every component."""

    RESULTS: ClassVar = ("SpecError", "valid")
    _TOKENS: ClassVar = re.compile(r"\w+(?:\.\w+)?|\"[^\"]*\"|\s+|.", re.DOTALL)
    _ODD: ClassVar = (
        *("0", "-1", "1e999", "1e-320", "nan", "-inf", "True", "None", "9" * 30, "0x10", "1_0"),
        *("1j", '"', "'", '""', "b'x'", "f'{x}'", "\\", "\0", "\n", "#", ";"),
        *("ä", "\U0001d7cf", "\ud800"),  # a letter, a digit of mathematics, half of a pair
        *("(", ")", "[", "]", "{", "}", "*", "**", "=", "==", ":=", ",", ".", "...", "@", "%"),
        *("lambda: 0", "x for x in y", "if", "not", "await", "yield", "__import__", "up=", "k="),
        *COMPONENTS,
    )

    @cached_property
    def _valid(self) -> list[str]:
        examples = [component.example for component in COMPONENTS.values()]
        return [*METHODS, *examples]

    def in_batch(self, number: int) -> Any:
        return nullcontext()

    def prepare(self) -> None:
        """Parse a spec, so that no case takes the time of imports."""
        torchcomp.parse(self._valid[0])

    def run(self, dice: random.Random) -> str:
        """Run a case. Return one of RESULTS, or raise."""
        spec = self._mutated(dice)
        try:
            built = torchcomp.parse(spec)
        except torchcomp.SpecError:
            return "SpecError"
        text = str(built)
        again = torchcomp.parse(text)
        if again != built or str(again) != text:
            raise Problem(f"{spec!r} is parsed as {text!r}, and that as {str(again)!r}")
        return "valid"

    def _mutated(self, dice: random.Random) -> str:
        tokens = self._TOKENS.findall(dice.choice(self._valid))
        for _ in range(dice.choice((1, 1, 2, 3, 5))):
            at, kind = dice.randrange(len(tokens) + 1), dice.randrange(7)
            if kind == 0:
                tokens.insert(at, dice.choice(self._ODD))
            elif kind == 1:
                tokens[at : at + 1] = [dice.choice(self._ODD)]
            elif kind == 2:
                del tokens[at : at + dice.choice((1, 1, 2, 5))]
            elif kind == 3:  # splice
                tokens[at:] = self._TOKENS.findall(dice.choice(self._valid))[at:]
            elif kind == 4:  # repeat
                tokens[at:at] = tokens[max(0, at - 4) : at] * dice.choice((1, 2, 50))
            elif kind == 5:  # nest
                name = dice.choice((*COMPONENTS, "", "-"))
                depth = dice.choice((1, 2, 90))
                tokens = [f"{name}("] * depth + tokens + [")"] * depth
            else:  # one character
                text = "".join(tokens)
                at = dice.randrange(len(text) + 1)
                odd = dice.choice(
                    ("", chr(dice.randrange(1, 0x3000)), chr(dice.randrange(32, 127)))
                )
                tokens = self._TOKENS.findall(text[:at] + odd + text[at + 1 :])
        return "".join(tokens)


# --- Workers --------------------------------------------------------------------------------------


Target = type[Messages] | type[Specs]
"""What makes and runs cases. The class is passed to the workers, so it is in a module."""

# Numbers that a worker shares: the next case, its start in nanoseconds, the largest CPU time of a
# case in nanoseconds, and then the number of cases by result.
_NEXT, _BEGAN, _SLOWEST, _COUNTS = range(4)


def fuzz(
    target: Target,
    cases: int,
    seed: int,
    *,
    workers: int = 1,
    bounds_checked: bool = False,
    hang: float = HANG,
) -> Outcome:
    """Run cases 0 to `cases` - 1 of a target.

    Args:
        target: the class that makes and runs the cases.
        cases: number of cases.
        seed: seed of all cases.
        workers: number of processes.
        bounds_checked: whether Numba checks every index of its kernels.
        hang: seconds after which a worker that is still in the same case is ended.
    """
    share = -(-cases // workers)
    ranges = [(first, min(cases, first + share)) for first in range(0, cases, share)]
    outcome = Outcome()
    with _environment(bounds_checked):
        context = multiprocessing.get_context("spawn")
        running = [_Worker(context, target, seed, hang, *each) for each in ranges]
        try:
            left = running
            while left := [worker for worker in left if worker.goes_on(outcome.problems)]:
                time.sleep(0.1)
        finally:
            for worker in running:
                worker.end()
    for worker in running:
        for name, count in zip(target.RESULTS, worker.shared[_COUNTS:], strict=True):
            outcome.counts[name] = outcome.counts.get(name, 0) + count
        outcome.slowest = max(outcome.slowest, worker.shared[_SLOWEST] / 1e9)
    return outcome


@contextmanager
def _environment(bounds_checked: bool) -> Iterator[None]:
    """The variables that Numba reads when a worker imports it."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"OMP_NUM_THREADS": "1"}
        if bounds_checked:
            # Not the usual cache: it does not tell kernels with checks from those without.
            os.environ |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": folder}
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


class _Worker:
    """A process that runs a range of cases. If it crashes or hangs, the next one goes on."""

    def __init__(
        self,
        context: SpawnContext,
        target: Target,
        seed: int,
        hang: float,
        first: int,
        last: int,
    ) -> None:
        self._context, self._arguments = context, (target, seed)
        self._hang, self._last = hang, last
        self.shared: Any = context.Array("q", [first, 0, 0, *[0] * len(target.RESULTS)])
        self._start()

    def _start(self) -> None:
        # A new one for each process: one that is killed can leave it locked. Simple, because a
        # Queue writes in a thread, and loses what it has not written when the process crashes.
        self._problems: Any = self._context.SimpleQueue()
        self.shared[_BEGAN] = time.monotonic_ns() + int(_PREPARES * 1e9)
        arguments = (*self._arguments, self._last, self.shared, self._problems)
        self._process = self._context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()

    def goes_on(self, problems: list[str]) -> bool:
        """Note what the process has found, or how it ended. Return whether cases are left."""
        # First: what it has written before it ended is then read below.
        alive = self._process.is_alive()
        while not self._problems.empty():
            problems.append(self._problems.get())
        case, waited = self.shared[_NEXT], (time.monotonic_ns() - self.shared[_BEGAN]) / 1e9
        if case >= self._last and not alive:
            return False
        if alive and waited < self._hang:
            return True
        code = self._process.exitcode
        how = "hangs" if code is None else f"ends the process with exit code {code}"
        problems.append(f"case {case}: {how}")
        self.end()
        self.shared[_NEXT] = case + 1
        if case + 1 < self._last:
            self._start()
        return case + 1 < self._last

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


def _work(kind: Target, seed: int, last: int, shared: Any, problems: Any) -> None:
    torch.set_num_threads(1)
    target = kind()
    target.prepare()
    numbers = shared.get_obj()  # only this process writes: without the lock
    for first in range(numbers[_NEXT], last, _BATCH):
        with target.in_batch(first // _BATCH):
            for case in range(first, min(first + _BATCH, last)):
                numbers[_NEXT], numbers[_BEGAN] = case, time.monotonic_ns()
                began = time.process_time_ns()
                try:
                    result = target.run(random.Random(seed << 32 | case))
                except Exception as error:
                    problems.put(f"case {case}: {type(error).__name__}: {error}"[:500])
                    continue
                taken = time.process_time_ns() - began
                numbers[_COUNTS + target.RESULTS.index(result)] += 1
                numbers[_SLOWEST] = max(numbers[_SLOWEST], taken)
    numbers[_NEXT] = last
