"""Streaming: fragments of the parameters synchronise one after another."""

from functools import partial
from itertools import chain

import pytest

from tests.local_sgd import reference
from tests.local_sgd.script import Script, constant, mlp
from tests.support.outcomes import assert_close
from tests.support.ranks import on_threads

TOTAL = 14
# With every(6) and two fragments, one synchronises at 3, 9, ... and the other at 6, 12, ...; both
# synchronise at the end. The first of the four parameters has most of the bytes.
ENDS = [(3, 9, 14), (6, 12, 14), (6, 12, 14), (6, 12, 14)]


def streamed(pieces=2, build=mlp, **local):
    """The parameters and the total bytes after each step, and the names of each fragment."""
    script = Script("every(6)", total_steps=TOTAL, build=build, local={"fragments": pieces} | local)
    seen, nbytes = [], []
    for step in range(TOTAL):
        script.step(step)
        seen.append([p.detach().clone() for p in script.model.module.parameters()])
        nbytes.append(script.sync.stats.total_bytes_sent)
    fragments = script.sync.state_dict()["local_sgd"]["fragments"]
    return seen, nbytes, [fragment["names"] for fragment in fragments]


@pytest.mark.parametrize("compress", ["mean", "ef(identity)"])
def test_equals_the_float64_reference_at_every_step(compress):
    runs, _, names = zip(*on_threads(3, partial(streamed, compress=compress)), strict=True)
    assert list(map(sorted, names[0])) == [["0.weight"], ["0.bias", "2.bias", "2.weight"]]
    crew = [reference.Worker(rank, reference.Momentum()) for rank in range(3)]
    for step, actual in enumerate(zip(*runs, strict=True), 1):
        for worker in crew:
            worker.step(step - 1, constant(step))
        for index, mean in enumerate(reference.means_of(crew)):
            for worker in crew if step in ENDS[index] else ():
                worker.weights[index].copy_(mean)
        for mine, worker in zip(actual, crew, strict=True):
            for value, weight in zip(mine, worker.weights, strict=True):
                assert_close(value, weight)


def test_a_synchronisation_sends_only_its_fragment():
    whole, pieces = (on_threads(2, streamed, count)[0][1] for count in (1, 4))
    sent = [after - before for before, after in zip([0, *pieces], pieces, strict=False)]
    # ceil(6 p / 4) for p = 1 to 4, and again every 6 steps. All four synchronise at the end.
    assert [step for step, nbytes in enumerate(sent, 1) if nbytes] == [2, 3, 5, 6, 8, 9, 11, 12, 14]
    assert max(sent[:-1]) < whole[-1] / 3
    assert sum(sent[:6]) == sent[-1] == whole[-1] / 3


def test_fragments_of_a_schedule_that_follows_the_learning_rate():
    def seen(steps):
        script = Script("qsr(alpha=0.2, h_base=2)", total_steps=40, local={"fragments": 2})
        script.train(0, steps)
        return script.sync.next_sync

    # H = 16 at a learning rate of 0.05. Rounds end at 8 and 16, then at 24 and 32, then at 40.
    assert [on_threads(1, seen, steps)[0] for steps in (7, 8, 17, 33)] == [8, 16, 24, 40]


@pytest.mark.parametrize(("pieces", "width"), [(2, 64), (3, 1), (4, 8)])
def test_no_fragment_is_empty(pieces, width):
    (_, _, fragments), _ = on_threads(2, partial(streamed, pieces, build=partial(mlp, width)))
    assert len(fragments) == pieces
    assert all(fragments)
    assert sorted(chain.from_iterable(fragments)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
