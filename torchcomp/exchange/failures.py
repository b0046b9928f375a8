"""What a rank says when a collective fails: the ranks report their failures in the job's store."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from torchcomp.specs.errors import RankFailureError

if TYPE_CHECKING:
    from torchcomp.exchange.process_group import ProcessGroupExchange

SECONDS = 1.0  # for which a rank waits for the reports of others, and for a silent store
ADVICE = "Look at the logs of the ranks, then restart all ranks from their last checkpoint"
_LOST, _CAUSE = "lost ", "cause "
_LACKS = (EMFILE, ENFILE, ENOMEM, ENOBUFS)  # of this rank
Reports = dict[int, str]
R = TypeVar("R")


def explain(exchange: "ProcessGroupExchange", call: str, error: Exception) -> None:
    """Raise RankFailureError if the error of a collective is the loss of another rank."""
    if any(os.strerror(number) in str(error) for number in _LACKS):
        report_cause(exchange, error)
    elif _is_loss(error):
        text = str(error).partition(" This is typically")[0]
        who = _who(exchange, _report(exchange, f"{_LOST}{text}", wait=True))
        ranks, rank = exchange.global_ranks, exchange.global_ranks[exchange.rank]
        raise RankFailureError(
            f"{call} among ranks {', '.join(map(str, ranks))} failed on rank {rank}: {who}. "
            f"{ADVICE}. The backend says: {text}"
        ) from error


def answered(seconds: float, ask: Callable[[], R]) -> R:
    """Return what `ask` returns or raises within some seconds, or raise dist.DistStoreError."""
    # Their own timeouts do not end a store behind a lost link, or gloo's wait for a rank that is
    # stopped while it connects.
    answer: Future[R] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except FutureTimeoutError:
        raise dist.DistStoreError(f"no answer of the store or a rank for {seconds:g} s") from None


def report_cause(exchange: "ProcessGroupExchange", error: BaseException) -> None:
    """Tell the other ranks why this one leaves an exchange."""
    # A rank that lost a connection has reported that already.
    if not isinstance(error, RankFailureError):
        _report(exchange, f"{_CAUSE}{type(error).__name__}: {error}", wait=False)


def _report(exchange: "ProcessGroupExchange", text: str, *, wait: bool) -> Reports:
    """Report a failure of this rank; with `wait`, return the reports of all ranks."""
    found: Reports = {}

    def talk() -> None:
        store = PrefixStore(f"{exchange.family}/failures", distributed_c10d._get_default_store())
        store.set(str(exchange.global_ranks[exchange.rank]), text)
        end = time.monotonic() + SECONDS
        while wait and len(found) < len(exchange.witnesses) and time.monotonic() < end:
            for other in exchange.witnesses:
                if other not in found and store.check([str(other)]):
                    found[other] = store.get(str(other)).decode()
            if any(each.startswith(_CAUSE) for each in found.values()):
                return
            time.sleep(0.02)

    # Whatever a store raises, the user needs the error of the collective.
    with suppress(Exception):
        answered(SECONDS + 1, talk)
    return dict(found)


def _is_loss(error: Exception) -> bool:
    """Whether the backend lost a connection, rather than refused a tensor."""
    # gloo raises plain RuntimeErrors, which start with the path of its source, or "Wait timeout" if
    # a rank does not connect; NCCL DistBackendErrors, also for a tensor that it refuses.
    text = str(error)
    return not isinstance(error, RankFailureError) and (
        "gloo/transport" in text
        or text.startswith("Wait timeout")
        or (isinstance(error, dist.DistError) and "ncclInvalid" not in text)
    )


def _who(exchange: "ProcessGroupExchange", found: Reports) -> str:
    causes = [(n, text) for n, text in sorted(found.items()) if text.startswith(_CAUSE)]
    if causes:
        return "; ".join(f"rank {n} failed first with {t.removeprefix(_CAUSE)}" for n, t in causes)
    if exchange.global_ranks[exchange.rank] not in found:
        return "the lost rank is not known, because the store of the job does not answer either"
    silent = [str(rank) for rank in exchange.witnesses if rank not in found]
    if silent:
        return (
            f"no report from rank{'s' * (len(silent) > 1)} {', '.join(silent)}: ended after fewer "
            "steps, killed, stopped, waiting in another call or not reachable"
        )
    return (
        "all ranks have lost a connection: a rank was stopped for longer than the timeout, or a "
        "link failed"
    )
