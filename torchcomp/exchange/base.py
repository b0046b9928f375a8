"""Exchange: the collectives of a set of ranks, with byte counters and checks of received messages.

Every call is straight-line code and blocks the stream or thread that makes it, but for
`sum_control`, whose result is asked for later. No call is chained to a future: a second collective
issued from a callback can pair with the wrong collective of another rank.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcomp import host, wire
from torchcomp.errors import RankMismatchError, WireError
from torchcomp.kernels import checksum
from torchcomp.profiling import label
from torchcomp.traffic import Load, Traffic, sum_bytes

Built = TypeVar("Built")
Found = tuple[Sequence[int], Tensor, Tensor]
"""Senders of frames, and two numbers for each frame; see :func:`.checksum.inspect`."""


class Exchange(ABC):
    """Collectives among `world_size` ranks. All ranks make the same calls in the same order.

    Args:
        rank: rank of this process among them.
        world_size: number of ranks.
        device: device of small control messages ("cuda" for NCCL).
        global_ranks: the name of each rank in error messages, which is its rank in the whole job.
            By default, ranks are numbered from 0.

    Attributes:
        members: the ranks in the job that each rank stands for: itself, or all ranks of its node.
        must_conclude: whether :meth:`conclude` must communicate, because frames were received or
            numbers were handed to :meth:`max_at_end` since its last call.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.global_ranks = tuple(global_ranks or range(world_size))
        self.members: tuple[tuple[int, ...], ...] = tuple((each,) for each in self.global_ranks)
        self.must_conclude = False
        self._load = Load()
        # Of this step. On CUDA findings stay on the device: reading them here would make the host
        # wait in the middle of the step.
        self._found: list[Found] = []
        # (numbers of this rank, list to extend with the maxima of all ranks) of `max_at_end`.
        self._asked: list[tuple[list[int], list[int]]] = []
        self._levels: tuple[Exchange, ...] = (self,)

    @property
    def shard(self) -> int:
        """Which part of the values this rank averages: after a :meth:`split`, its rank inside."""
        return next((level.rank for level in self._levels if level is not self), 0)

    # --- To be implemented by a subclass. These methods do not count bytes. ---

    @abstractmethod
    def _all_reduce(self, values: Tensor) -> None:
        """Replace `values` (1-D, contiguous) with their sum over the ranks."""

    def _start_all_reduce(self, values: Tensor) -> Callable[[], None]:
        """Start an all-reduce. What is returned blocks the host, or the stream, until it ends."""
        self._all_reduce(values)
        return lambda: None

    @abstractmethod
    def _all_gather(self, mine: Tensor) -> Tensor:
        """Return every rank's `mine` (1-D, same length on all ranks), concatenated."""

    @abstractmethod
    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        """Send ``sizes[r]`` elements to each rank r; receive ``arriving[r]`` from each."""

    def _reduce_scatter(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this rank's part of the sum of `values` (1-D, equal parts) over the ranks."""
        sizes = [values.numel() // self.world_size] * self.world_size
        # Summed here, in rank order: gloo's reduce-scatter is an all-reduce inside, which moves
        # twice the bytes.
        parts = self._all_to_all(values, sizes, sizes).view(self.world_size, -1)
        return parts.sum(0, dtype=dtype)

    @abstractmethod
    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        """Return every rank's picklable `value`, in rank order.

        This pickles and is slow. Use it for error messages and checkpoints, not in every step.

        Args:
            value: the value of this rank.
            dst: the only rank that receives the values; the others get an empty list. With None,
                every rank receives them.
        """

    # --- Collectives ---

    @label("all_reduce")
    def all_reduce(self, values: Tensor) -> None:
        """Replace `values` (1-D, contiguous) with their sum over the ranks."""
        self._all_reduce(values)
        self._load.summed += values.nbytes

    @label("reduce_scatter")
    def reduce_scatter(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's part of the sum of `values` over the ranks.

        Args:
            values: 1-D, contiguous; one part for each rank, in rank order, all of the same length.
            dtype: dtype of the sum, by default that of `values`. gloo adds in it; NCCL adds in the
                dtype of `values`.
        """
        moved = values.nbytes // self.world_size * (self.world_size - 1)
        self._load.sent += moved
        self._load.received += moved
        return self._reduce_scatter(values, dtype or values.dtype)

    @label("all_gather")
    def all_gather_rows(self, message: Tensor) -> Tensor:
        """Return every rank's `message` (1-D, same length on all ranks), a row for each rank."""
        rows = self._all_gather(message)
        moved = message.nbytes * (self.world_size - 1)
        self._load.sent += moved
        self._load.received += moved
        return rows.view(self.world_size, -1)

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """Return every rank's `message` (1-D, same length on all ranks), in rank order."""
        return list(self.all_gather_rows(message).unbind())

    def all_gather_v(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return every rank's `mine` (1-D), in rank order.

        Args:
            mine: this rank's tensor.
            sizes: number of elements of each rank's tensor.
        """
        # torch's all_gather_single needs equal lengths. An all-to-all takes uneven splits.
        copies = [mine.numel()] * self.world_size
        return self.all_to_all(mine.repeat(self.world_size), copies, sizes)

    @label("all_to_all")
    def all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> list[Tensor]:
        """Send each rank its part of `outgoing`, and receive one part from each rank.

        Args:
            outgoing: 1-D; the parts for rank 0, 1, ..., concatenated.
            sizes: number of elements of each outgoing part.
            arriving: number of elements that each rank sends to this rank.

        Returns:
            The received parts, in rank order.
        """
        received = self._all_to_all(outgoing, sizes, arriving)
        # A rank's part for itself does not cross its link, so it is not counted.
        itemsize, rank = outgoing.element_size(), self.rank
        self._load.sent += itemsize * (sum(sizes) - sizes[rank])
        self._load.received += itemsize * (sum(arriving) - arriving[rank])
        return list(torch.split(received, list(arriving)))

    @label("any_of")
    def any_of(self, flags: Tensor) -> Tensor:
        """Return the elementwise maximum of all ranks' `flags` (1-D integers)."""
        # Counted apart from messages: the plan of a step contains no checks.
        self._load.control += flags.nbytes * (self.world_size - 1)
        return self._all_gather(flags).view(self.world_size, -1).amax(0)

    def anywhere(self, flags: Tensor) -> Tensor:
        """Do as :meth:`any_of`; after a :meth:`split`, for the ranks of both levels."""
        for level in self._levels:
            flags = level.any_of(flags)
        return flags

    @label("sum_control")
    def sum_control(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Start to add up `numbers` (1-D, contiguous) over the ranks, in place.

        After a :meth:`split`, over those of both levels. Counted apart from messages, as in
        :meth:`any_of`.

        Returns:
            A function that waits for the sums, and returns them on the CPU.
        """
        # Inside the node first, so that the message between nodes is the one on its way.
        *inside, last = reversed(self._levels)
        for level in inside:
            level._all_reduce(numbers)
        wait = last._start_all_reduce(numbers)
        for level in self._levels:
            self._load.control += sum_bytes(numbers.nbytes, level.world_size)
        # An accelerator copies after the all-reduce. On the CPU, nothing is copied.
        received = host.copy_from(numbers)

        @label("sum_control")
        def sums() -> Tensor:
            wait()
            return received()

        return sums

    # --- Checks of received frames ---

    def receive(
        self, senders: Sequence[int], frames: Sequence[Tensor], lengths: Sequence[int]
    ) -> list[Tensor]:
        """Check frames, record the findings, and return their messages (1-D uint8, views).

        A bad frame does not raise here: the other ranks would wait in their next collective.
        :meth:`conclude` raises instead, on every rank.

        Args:
            senders: rank that sent each frame.
            frames: 1-D uint8; empty if there is no message.
            lengths: expected length of each message in bytes.
        """
        sent = [i for i, length in enumerate(lengths) if length]
        if sent:
            self.must_conclude = True
            found = checksum.inspect([frames[i] for i in sent], [lengths[i] for i in sent])
            if found is not None:
                self._found.append(([self.global_ranks[senders[i]] for i in sent], *found))
        return [wire.payload(f, length) for f, length in zip(frames, lengths, strict=True)]

    def max_at_end(self, numbers: Iterable[int]) -> list[int]:
        """As :meth:`any_of` for the host's numbers, with the message of the next :meth:`conclude`.

        Args:
            numbers: from 0 to 255, or flags; as many on every rank.

        Returns:
            A list that is empty until `conclude` fills it with the elementwise maximum over the
            ranks. It stays empty if the step is discarded before.
        """
        combined: list[int] = []
        self._asked.append((list(numbers), combined))
        self.must_conclude = True
        return combined

    def same_at_end(self, digest: bytes) -> Callable[[], bool]:
        """As :meth:`same` for a short digest, with the message of the next :meth:`conclude`.

        Returns:
            A function for after `conclude`: whether all ranks have the same digest.
        """
        # As in `same`: the complements find the minimum.
        bounds = self.max_at_end([*digest, *(255 - byte for byte in digest)])
        count = len(digest)
        return lambda: all(
            high + low == 255 for high, low in zip(bounds[:count], bounds[count:], strict=True)
        )

    def conclude(self, finite: Tensor | None, where: str, advice: str) -> bool:
        """Combine the checks of this step over the ranks, with one message and one wait.

        If there is nothing to combine, it neither communicates nor waits. All ranks call this
        method. After a :meth:`split`, all ranks of both levels do.

        Args:
            finite: scalar bool, whether all values that this rank checked are finite. None if it
                checked none.
            where: the step or call, for the error.
            advice: what state the failed step leaves, for the error.

        Returns:
            Whether the values are finite on all ranks.

        Raises:
            WireError: on every rank, if a frame received since the last call was not intact. It
                names the senders and the findings.
        """
        return self.conclude_later(finite, where, advice)()

    def conclude_later(self, finite: Tensor | None, where: str, advice: str) -> Callable[[], bool]:
        """Do as :meth:`conclude`, but wait for the result only when it is asked for.

        Returns:
            A function that waits for the result, and returns it or raises. All ranks call it.
        """
        levels = self._levels
        if not any(level.must_conclude for level in levels):
            if finite is None:
                return lambda: True
            # Without frames, every rank has checked the whole mean, so `finite` matches already.
            if len(levels) == 1:
                known = host.copy_from(finite)
                return lambda: bool(known())
        found = [entry for level in levels for entry in level._found]
        asked = [question for level in levels for question in level._asked]
        message = self.anywhere(self._conclusion(finite, found, asked))
        self.reset()
        received = host.copy_from(message)

        def decide() -> bool:
            damaged, nonfinite, *others = received().tolist()  # the only wait of a step
            remaining = iter(others)
            for mine, combined in asked:
                combined.extend(islice(remaining, len(mine)))
            if damaged:
                raise self._wire_error(found, where, advice)
            return not nonfinite

        return decide

    def _wire_error(self, found: Sequence[Found], where: str, advice: str) -> WireError:
        """Return the error that names every sender of a frame that was not intact."""
        problems = {
            f"rank {sender}'s message {wire.FINDINGS[wire.finding(*numbers)]}"
            for senders, *both in found
            for sender, *numbers in zip(senders, *(each.tolist() for each in both), strict=True)
            if any(numbers)
        }
        listed = "; ".join(sorted(set().union(*self.gather_all(problems))))
        return WireError(f"cannot use a message of {where}: {listed}. {advice}")

    def _conclusion(
        self,
        finite: Tensor | None,
        found: Sequence[Found],
        asked: Sequence[tuple[list[int], list[int]]],
    ) -> Tensor:
        """Return this rank's message of :meth:`conclude`: damage, NaN, other numbers."""
        listed = [0, 0, *(number for numbers, _ in asked for number in numbers)]
        message = host.copy_to(torch.tensor(listed, dtype=torch.uint8), self.device)
        # Slices, because assigning to an index copies from the host and waits for the stream.
        if found:
            message[:1] = (
                torch.cat([each for _, *both in found for each in both]).any().to(self.device)
            )
        if finite is not None:
            message[1:2] = ~finite
        return message

    def reset(self) -> None:
        """Discard the findings of a step that has ended or failed."""
        for level in self._levels:
            level._found.clear()
            level._asked.clear()
            level.must_conclude = False

    def close(self) -> None:
        """End the connections that belong to this exchange. After a :meth:`split`, of both levels.

        No collective may follow, and none but a :meth:`sum_control` may be running. The user's
        process groups remain.
        """
        for level in self._levels:
            level._close()

    def leave(self, error: BaseException) -> None:  # noqa: B027 - most exchanges have none
        """End the connections of this level after an error, if it has connections of its own."""

    def _close(self) -> None:  # noqa: B027 - most exchanges have none
        """End the connections of this level, if it has connections of its own."""

    def count(self, load: Load) -> None:
        """Count bytes that another exchange of the same ranks moves for this one."""
        self._load.add(load)

    def take_traffic(self, dense_bytes: int) -> Traffic:
        """Return the bytes since the last call, and reset the counters.

        After a :meth:`split`, messages inside the node are counted apart.

        Args:
            dense_bytes: bytes that plain DDP would have sent instead.
        """
        between, *inside = (
            level._load.traffic(level.world_size, dense_bytes) for level in self._levels
        )
        for traffic in inside:
            between.inside += traffic.sent
            between.control += traffic.control
        for level in self._levels:
            level._load = Load()
        return between

    @staticmethod
    def split(inside: "Exchange", between: "Exchange") -> "tuple[Exchange, Exchange]":
        """Make two exchanges the levels of one hierarchy. They share counters and findings.

        Each rank of an `inside` group is in a different `between` group. :meth:`conclude` and
        :meth:`build`, called on either, then cover all ranks of both.
        """
        inside._levels = between._levels = (between, inside)
        return inside, between

    def gather_all(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank; after a :meth:`split`, of all levels.

        In rank order if there is one level. With two, in any order, the same on all ranks.
        """
        values = [value]
        for level in self._levels:
            values = [each for listed in level.gather_objects(values) for each in listed]
        return values

    # --- Values that must match on all ranks ---

    def same(self, number: int) -> bool:
        """Whether all ranks have the same 63-bit number."""
        # One message finds the minimum as well as the maximum, as the maximum of the negatives.
        bounds = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        highest, lowest = self.any_of(bounds).tolist()
        return bool(highest == -lowest)

    def verify(
        self,
        what: str,
        values: dict[str, Any],
        advice: str = "",
        on_level: dict[str, Any] | None = None,
    ) -> None:
        """Verify that `values` match across ranks, and raise on every rank if they do not.

        After a :meth:`split`, this covers all ranks of both levels.

        Args:
            what: the call that is verified, for the error.
            values: name -> printable value; compared as text.
            advice: what the user can do, appended to the error.
            on_level: further values, which must match only on the ranks of this exchange.

        Raises:
            RankMismatchError: lists every value that differs, with the ranks that have it.
        """
        found: RankMismatchError | None = None
        others = [level for level in self._levels if level is not self]
        compared = {"error": "none", **values, **(on_level or {})}
        for level in (self, *others):
            try:
                level._verify(what, compared, advice)
            except RankMismatchError as mismatch:
                found = found or mismatch
            # Pass a mismatch on to the other level. One of its ranks is in every group of this one,
            # so all ranks find it.
            compared = {"error": "none", **values} | ({"error": found} if found else {})
        if found is not None:
            raise found

    def _verify(self, what: str, values: dict[str, Any], advice: str) -> None:
        # Compare `what` as well, to detect ranks that are in different calls.
        mine = {"call": what, **{name: str(value) for name, value in values.items()}}
        # Compare a digest first: the values themselves can be long, and almost always match.
        digest = hashlib.sha256(repr(mine).encode()).digest()
        if self.same(int.from_bytes(digest[:7], "big")):
            return
        by_rank = self.gather_objects(mine)
        common = [name for name in mine if all(name in theirs for theirs in by_rank)]
        lines = [
            _ranks_by_value(name, [theirs[name] for theirs in by_rank], self.global_ranks)
            for name in common
        ]
        differing = "; ".join(line for line in lines if line)
        problem = f"{what}: values that must match on all ranks differ: {differing}"
        raise RankMismatchError(f"{problem}. {advice}".strip())

    def build(
        self,
        what: str,
        arguments: dict[str, Any],
        make: Callable[[], tuple[Built, dict[str, Any]]],
        advice: str = "",
    ) -> Built:
        """Build an object on every rank, or raise on every rank.

        Args:
            what: the call that builds, for the error.
            arguments: name -> printable argument of the call on this rank; must match across
                ranks.
            make: returns the object, and values that must match across ranks. A value replaces
                the argument of the same name, as a parsed spec replaces its string.
            advice: what the user can do if they do not match.

        Raises:
            RankMismatchError: if arguments or values differ, or `make` fails only on some ranks.
            Exception: the exception of `make`, if it fails on all ranks in the same way.
        """
        # Do not raise yet: a rank that fails alone would leave the others waiting in `verify`.
        problem: Exception | None = None
        values: dict[str, Any] = {}
        try:
            built, values = make()
        except Exception as error:
            problem = error
        summary = "none" if problem is None else str(problem).partition("\n")[0]
        self.verify(what, {**arguments, "error": summary, **values}, advice)
        if problem is not None:
            raise problem
        return built


def _ranks_by_value(name: str, values: list[Any], ranks: Sequence[int]) -> str:
    """Return "name: value on rank 0, other value on ranks 1, 2", or "" if all values are equal."""
    holders: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        text = str(value)
        short = text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
        holders.setdefault((value, short), []).append(rank)
    if len(holders) == 1:
        return ""
    return f"{name}: " + ", ".join(
        f"{short} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for (_, short), ranks in holders.items()
    )
