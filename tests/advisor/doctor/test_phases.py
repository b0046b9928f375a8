"""The phases of a training loop, with ranks that are stepped by hand on a clock of their own."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchcomp.advisor.doctor import training
from torchcomp.advisor.doctor.job import Job, NotMeasured
from torchcomp.advisor.doctor.training import BF16, NO_EXCHANGE, PLAIN, Phases
from torchcomp.advisor.moments import Moment


class Ranks:
    """Ranks that compute for different times, and wait for each other in an exchange."""

    def __init__(self, monkeypatch, seconds, models=1):
        store = dist.HashStore()
        self.seconds, self.now, self.clocks = seconds, 0.0, [0.0] * len(seconds)
        jobs = [Job(rank, 2, rank, 0, "gloo", 1.0, store) for rank in range(len(seconds))]
        self.phases = [Phases(job, 1e3) for job in jobs]
        monkeypatch.setattr(training.DistributedDataParallel, "register_comm_hook", Mock())
        monkeypatch.setattr(training, "now", lambda device: Moment(self.now, self.now))
        for each in self.phases:
            for number in range(models):
                weights = nn.ParameterDict({f"weight{number}": torch.zeros(2)})
                each.attach(Mock(module=weights))

    def step(self):
        """Take one step on each rank. The exchange begins in the last bucket, after the mark."""
        exchanges = self.phases[0].mode != NO_EXCHANGE
        for rank, each in enumerate(self.phases):
            self.clocks[rank] += self.seconds[rank]
            self.now = self.clocks[rank]
            each.step(0)
        if exchanges:
            self.clocks = [max(self.clocks)] * len(self.clocks)


def test_the_lead_of_a_fast_rank_is_in_no_measured_step(monkeypatch):
    ranks, steps = Ranks(monkeypatch, (0.1, 0.3)), 0
    while not ranks.phases[0].finished:
        ranks.step()
        steps += 1
    assert steps == 144
    for rank, seconds in enumerate((0.1, 0.3)):
        times = ranks.phases[rank].results()
        assert times[NO_EXCHANGE] == pytest.approx([seconds] * 43)
        assert times[PLAIN] == pytest.approx([0.3] * 43)
        assert times[BF16] == pytest.approx([0.3] * 43)


def test_a_loop_that_ends_early_says_how_many_steps_it_needs(monkeypatch):
    ranks = Ranks(monkeypatch, (0.1, 0.1))
    for _ in range(15):
        ranks.step()
    with pytest.raises(NotMeasured, match=f"15 steps .*{BF16!r}.* 16 steps"):
        ranks.phases[0].results()
    ranks.step()
    assert [*map(len, ranks.phases[0].results().values())] == [3, 3, 3]


def test_the_first_model_that_exchanges_gradients_counts(monkeypatch):
    (only,) = Ranks(monkeypatch, (0.1,), models=2).phases
    for number in (1, 0, 0, 0):
        only.step(number)
    assert list(only.parameters) == ["weight1"]
    with pytest.raises(NotMeasured, match="1 steps"):
        only.results()
