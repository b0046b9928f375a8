"""With overlap=True, a run is the same bit for bit."""

import os
import sys
from functools import partial
from threading import Event

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import torchcomp
from tests.local_sgd.script import Script, batch, mlp, sgd, synchronised_steps
from tests.support.commands import run as run_command
from tests.support.outcomes import assert_refused, caught, equal_on_all, flat
from tests.support.ranks import on_processes, on_threads
from torchcomp.local_sgd import averages as averages_module

TOTAL, ENDS = 11, [3, 6, 9, 11]
OVERLAP = {"overlap": True}
SMALL = 0.0002


def run(local, build=mlp, wait=True, **ddp):
    """The weights after each step, and the run's counters."""
    script, weights = Script(total_steps=TOTAL, build=build, local=local, **ddp), []
    for step in range(TOTAL):
        script.step(step)
        if wait:
            script.sync.wait()
        weights.append(script.weights())
    stats = script.sync.stats
    script.sync.close()
    return torch.stack(weights), stats


class Attention(nn.Module):
    """Its attention reads the weights of a child that it does not call."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        x = x.unsqueeze(1)
        return self.head(self.attention(x, x, x)[0].squeeze(1))


@pytest.mark.parametrize("build", [mlp, Attention])
def test_it_is_the_plain_average_bit_for_bit(build):
    plain = on_threads(3, partial(run, {}, build=build))
    overlapped = on_threads(3, partial(run, OVERLAP, build=build, bucket_cap_mb=SMALL))
    for (mine, counted), (wanted, expected) in zip(overlapped, plain, strict=True):
        assert torch.equal(mine, wanted)
        assert counted.total_bytes_sent == expected.total_bytes_sent
        assert counted.total_dense_bytes_sent == expected.total_dense_bytes_sent


def after_a_round(read):
    """The weights after `read`, after the last step of a round, and the averages."""
    script = Script(total_steps=TOTAL, local=OVERLAP, bucket_cap_mb=SMALL)
    script.train(0, 3)
    read(script)
    seen = script.weights()
    script.sync.wait()
    return seen, script.weights()


READS = {
    "directly": lambda script: None,
    "model.state_dict": lambda script: script.model.state_dict(),
    "forward": lambda script: script.model(batch(0, 0)[0]),
    "sync.state_dict": lambda script: script.sync.state_dict(),
    "close": lambda script: script.sync.close(),
}


@pytest.mark.parametrize("how", READS)
def test_reading_through_the_model_waits_for_the_averages(how):
    seen, averages = zip(*on_threads(2, after_a_round, READS[how]), strict=True)
    assert equal_on_all(averages)
    assert equal_on_all(seen) == (how != "directly")


def first_layer_before_the_last_mean():
    """Delay the last layer's all-reduce until the first layer has computed its output.

    Return whether it computed in time, and whether the last layer used the average.
    """
    script = Script("every(2)", total_steps=4, local=OVERLAP, bucket_cap_mb=SMALL)
    computed, waited = Event(), []
    async_exchange = script.sync._steps.averages.async_exchange
    all_reduce = async_exchange.all_reduce

    def late(values):
        if values.numel() <= 3 + 24:  # the bias and the weight of the last layer
            waited.append(computed.wait(timeout=30))
        all_reduce(values)

    async_exchange.all_reduce = late
    first, last = script.model.module[0], script.model.module[2]
    script.train(0, 2)
    before = flat(last.parameters())
    first.register_forward_hook(lambda *_: computed.set())
    seen = []
    last.register_forward_hook(lambda *_: seen.append(flat(last.parameters())))
    script.model(batch(0, 0)[0])
    ended = all(waited), not torch.equal(seen[0], before)
    script.sync.close()
    return ended


def over_gloo():
    # The same buckets, because gloo's order of summation depends on them.
    plain = run({}, bucket_cap_mb=SMALL)[0]
    overlapped = run(OVERLAP, wait=False, bucket_cap_mb=SMALL)[0]
    return plain, overlapped, first_layer_before_the_last_mean()


def test_over_gloo_a_layer_computes_during_the_next_all_reduce_and_no_bit_changes():
    plain, overlapped, order = zip(*on_processes(2, over_gloo), strict=True)
    assert order == ((True, True),) * 2
    assert synchronised_steps([list(weights) for weights in plain]) == ENDS
    for mine, wanted in zip(overlapped, plain, strict=True):
        for step in set(range(TOTAL)) - {end - 1 for end in ENDS}:
            assert torch.equal(mine[step], wanted[step])


SCRIPT = """
import os, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torchcomp
from torchcomp.local_sgd import averages

averages.AT_EXIT_SECONDS = {seconds}
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = torchcomp.LocalSGD(model, optimizer, "every(1)", total_steps=2, overlap=True)
started = threading.Event()

def slow(values):
    started.set()
    threading.Event().wait({lasts})
    print("averaged", flush=True)

sync._steps.averages.async_exchange.all_reduce = slow
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert started.wait(60)
print("the script ends", flush=True)
"""


@pytest.mark.parametrize(("seconds", "lasts", "ends"), [(0.1, None, False), (60, 0.5, True)])
def test_a_process_ends_after_a_slow_average_but_not_behind_a_stuck_one(seconds, lasts, ends):
    script = SCRIPT.format(seconds=seconds, lasts=lasts)
    # `run_command` fails if the process is still there after the tests' patience.
    printed = run_command([sys.executable, "-c", script]).stdout
    assert "the script ends" in printed
    assert ("averaged" in printed) == ends


DONE = "rank 0 is done"


def store():
    return distributed_c10d._get_default_store()


def unjoined(ends):
    """Train for a round whose averages rank 1 never joins: it ends, or waits for rank 0."""
    script, started = Script("every(2)", local=OVERLAP), Event()

    def never(values):
        if ends:
            os._exit(0)
        started.set()
        store().wait([DONE])

    if dist.get_rank() == 1:
        script.sync._steps.averages.async_exchange.all_reduce = never
    script.train(0, 2)
    if dist.get_rank() == 1:
        started.wait()
        store().wait([DONE])
        os._exit(0)
    return script


def after_a_loss():
    sync = unjoined(ends=True).sync
    return [
        type(caught(call)) for call in (sync.state_dict, sync.state_dict, sync.wait, sync.close)
    ]


def test_after_a_lost_average_there_is_no_state_to_save():
    found, _ = on_processes(2, after_a_loss, catch=True)
    assert found == [torchcomp.RankFailureError] * 4


def leave_by_an_exception():
    averages_module.AT_EXIT_SECONDS = 0.2
    script = unjoined(ends=False)

    def raise_inside():
        with script.sync:
            raise KeyError

    found = [caught(raise_inside), caught(script.sync.state_dict)]
    store().set(DONE, "")
    return [type(error) for error in found]


def test_an_exception_does_not_wait_for_a_rank_that_never_joins():
    # Rank 1 ends only when rank 0 has left the block, so waiting for it would be a timeout.
    found, _ = on_processes(2, leave_by_an_exception, catch=True)
    assert found == [KeyError, torchcomp.RankFailureError]


def test_a_sum_that_overflows_raises_on_every_rank_before_any_all_reduce():
    def body():
        script = Script("every(1)", optimizer=sgd, local=OVERLAP)
        # The value of each rank is finite.
        nn.init.constant_(script.model.module[2].bias.detach(), 1e308)
        for parameter in script.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        local = script.weights()
        try:
            script.optimizer.step()
        finally:
            script.sync.wait()
            assert torch.equal(local, script.weights())

    assert_refused(2, body, torchcomp.NonFiniteError, "step 1")
