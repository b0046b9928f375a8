"""State dicts with one change: they are refused as a whole, or they load as they are."""

import pytest
import torch

from tests.engine import small
from tests.support.cases import only
from tests.support.mutations import mutated, outcome
from torchcomp import RankMismatchError

METHODS = {
    "ef": ["ef(topk(0.3))"],
    "mean": ["mean"],
    "exact": ['bidirectional(topk(0.3), topk(0.3, scope="model"), selection="exact")'],
    "shard": ['bidirectional(topk(0.3), topk(0.3), memory_dtype="bf16")'],
    "flush": ["ef(topk(0.3))", "mean"],
    "powersgd": ["powersgd(rank=1)"],
    "ef21": ["ef21(topk(0.3))"],
    "dgc": ["dgc(topk(0.3), momentum=0.9)"],
}
PARTS = ("flushing", "groups", "buckets", "slots")
"""The entries that depend on the method. The others are changed for one method only."""


def attacked(exchange, methods, parts):
    """Load changed state dicts on rank 0. Return the number of legal ones, and all problems."""
    first, *others = methods
    averager = small.averager(exchange, first, dtype=torch.float32)
    small.train(averager, 0, 2, torch.float32)
    for method in others:
        averager.use(method)
    before = averager.state_dict()
    legal, wrong = [], []
    for path, number, changed in mutated(before, parts) if exchange.rank == 0 else ():
        found = outcome(averager, before, changed)
        if found == "legal":
            legal.append((path, number, changed))
        elif found is not None:
            wrong.append(f"{path}, change {number}: {found}")
    # A legal state must also train, unless it differs in a value that must match on all ranks.
    for path, number, changed in exchange.gather_objects(legal)[0]:
        averager.load_state_dict(before if exchange.rank else changed)
        try:
            small.step(averager, small.gradients(5, exchange.rank, torch.float32))
        except RankMismatchError:
            pass
        except Exception as error:
            wrong.append(f"{path}, change {number}: at the next step {error!r}")
    return len(legal), wrong


@pytest.mark.parametrize("name", only(METHODS, now=["ef", "exact", "flush"]))
def test_a_changed_state_dict_is_refused_as_a_whole_or_loaded_as_it_is(name):
    parts = None if name == "ef" else PARTS
    (legal, wrong), (_, also_wrong) = small.on_ranks(2, lambda e: attacked(e, METHODS[name], parts))
    assert wrong + also_wrong == []
    assert legal
