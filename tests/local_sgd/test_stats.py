"""The byte counters: bytes of a synchronisation, and bytes that plain DDP would have sent."""

from functools import partial

import pytest

import torchcomp
from tests.local_sgd.script import Script, convnet, cosine
from tests.support.ranks import on_threads, with_fake_ranks
from tests.support.threads import snapshots


def counted(steps, **options):
    script = Script(**options)
    script.train(0, steps)
    return script.sync.stats


RUN = {"total_steps": 20, "warmup_steps": 2, "lr": partial(cosine, peak=0.1, warmup=2, total=20)}


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_a_run_sends_what_explain_predicts(world_size):
    # BatchNorm's running mean and variance are averaged, its int64 counter of batches is not.
    spec, model = "qsr(alpha=0.2, h_base=2)", {"build": convnet, "shape": (3, 4, 4)}
    last = with_fake_ranks(world_size, partial(counted, 20, spec=spec, **model, **RUN))
    plan = torchcomp.explain(spec, model=convnet(), world_size=world_size, **RUN)
    plain = torchcomp.explain("mean", model=convnet(), world_size=world_size)
    assert last.syncs == plan.syncs == len(torchcomp.sync_steps(spec, **RUN))
    assert round(last.total_bytes_sent / 20) == plan.bytes_sent
    assert last.total_dense_bytes_sent == 20 * plain.bytes_sent


@pytest.mark.parametrize("overlap", [False, True])
def test_another_thread_reads_the_counters_of_whole_steps_only(overlap):
    def body():
        script = Script(spec="every(2)", total_steps=30, local={"overlap": overlap})
        finished = {script.sync.stats}
        with snapshots(lambda: script.sync.stats) as seen:
            for step in range(30):
                script.step(step)
                finished.add(script.sync.stats)
        assert len(seen) > 1
        assert seen <= finished

    on_threads(2, body)
