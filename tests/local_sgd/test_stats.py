"""The byte counters: bytes of a synchronisation, and bytes that plain DDP would have sent."""

import logging
from functools import partial

import pytest

import torchcomp
from tests.local_sgd.script import Script, convnet, cosine
from tests.support.ranks import on_threads, with_fake_ranks
from tests.support.threads import snapshots

STEPS = 8
# 83 elements of float64; 83 is not divisible by 2, 3 or 4 ranks.
NBYTES = 83 * 8


def counted(steps=STEPS, **options):
    script = Script(**{"spec": "every(3)", "total_steps": STEPS} | options)
    seen = [script.sync.stats]
    for step in range(steps):
        script.step(step)
        seen.append(script.sync.stats)
    return seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_synchronisation_sends_one_all_reduce_of_the_parameters(world_size):
    once = 2 * (world_size - 1) * NBYTES // world_size
    for seen in on_threads(world_size, counted):
        assert [stats.steps for stats in seen] == list(range(STEPS + 1))
        assert [stats.syncs for stats in seen] == [0, 0, 0, 1, 1, 1, 2, 2, 3]
        assert [stats.bytes_sent for stats in seen] == [0, 0, 0] + 6 * [once]
        steps = [stats.dense_bytes_sent // max(once, 1) for stats in seen]
        assert steps == ([0, 0, 0, 3, 3, 3, 3, 3, 2] if once else [0] * 9)
        for stats in seen:
            assert stats.total_bytes_received == stats.total_bytes_sent == stats.syncs * once


RUN = {"total_steps": 20, "warmup_steps": 2, "lr": partial(cosine, peak=0.1, warmup=2, total=20)}


@pytest.mark.parametrize("world_size", [2, 64])
def test_a_run_sends_what_explain_predicts(world_size):
    # BatchNorm's running mean and variance are averaged, its int64 counter of batches is not.
    spec, model = "qsr(alpha=0.2, h_base=2)", {"build": convnet, "shape": (3, 4, 4)}
    last = with_fake_ranks(world_size, partial(counted, 20, spec=spec, **model, **RUN))[-1]
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


def test_the_constructor_logs_schedule_steps_and_bytes_on_rank_0(caplog):
    caplog.set_level(logging.INFO, "torchcomp")
    local = {"compress": "ef(topk(0.1))"}
    on_threads(2, lambda: Script(spec="every(3)", total_steps=STEPS, local=local))
    (record,) = [record for record in caplog.records if record.levelno == logging.INFO]
    for value in ("every(3)", "ef(topk(0.1))", f"total_steps={STEPS}", NBYTES):
        assert str(value) in record.getMessage()
