"""The phases of a training loop, with ranks that are stepped by hand on a clock of their own."""

import pytest
import torch

from torchcomp.advisor.doctor import phases
from torchcomp.advisor.doctor.job import NotMeasured
from torchcomp.advisor.doctor.phases import (
    BF16,
    MODES,
    NO_EXCHANGE,
    PLAIN,
    WARM_UP,
    Finished,
    Phases,
)


class Job:
    """What phases need of a rank: its number, its device, and what rank 0 has said."""

    device = torch.device("cpu")

    def __init__(self, rank, said):
        self.rank, self.store, self.said = rank, self, said

    def set(self, key, value):
        self.said[key] = value

    def get(self, key):
        return self.said[key]


class Ranks:
    """Ranks that compute for different times, and wait for each other in an exchange."""

    def __init__(self, monkeypatch, seconds, modes=MODES):
        said = {}
        self.seconds, self.now, self.clocks = seconds, 0.0, [0.0] * len(seconds)
        self.phases = [Phases(Job(rank, said), 1e3, modes) for rank in range(len(seconds))]
        for each in self.phases:
            each._attached.append({})
        monkeypatch.setattr(phases, "_mark", lambda device: self.now)

    def step(self):
        """Take one step on each rank. The exchange begins in the last bucket, after the mark."""
        exchanges = self.phases[0].mode != NO_EXCHANGE
        for rank, each in enumerate(self.phases):
            self.clocks[rank] += self.seconds[rank]
            self.now = self.clocks[rank]
            each.step(0)
        if exchanges:
            self.clocks = [max(self.clocks)] * len(self.clocks)

    def train(self):
        steps = 0
        while not self.phases[0].finished:
            self.step()
            steps += 1
        return steps


def test_the_lead_of_a_fast_rank_is_in_no_measured_step(monkeypatch):
    ranks = Ranks(monkeypatch, (0.1, 0.3))
    assert ranks.train() == 144
    for rank, seconds in enumerate((0.1, 0.3)):
        times = {each.mode: each.seconds for each in ranks.phases[rank].results()}
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
    assert [len(each.seconds) for each in ranks.phases[0].results()] == [3, 3, 3]


def test_one_rank_measures_one_mode(monkeypatch):
    ranks = Ranks(monkeypatch, (0.1,), (NO_EXCHANGE,))
    for _ in range(WARM_UP + 1 + 3):
        ranks.step()
    assert ranks.phases[0].results()[0].seconds == pytest.approx([0.1] * 3)


def test_the_first_model_that_exchanges_gradients_counts(monkeypatch):
    ranks = Ranks(monkeypatch, (0.1,))
    (only,) = ranks.phases
    only._attached[:] = [{"frozen": torch.zeros(1)}, {"trained": torch.zeros(2)}]
    only.step(1)
    only.step(0)
    assert only.steps == 1
    assert list(only.parameters) == ["trained"]


def test_a_script_without_an_exchange_is_ended(monkeypatch):
    (only,) = Ranks(monkeypatch, (0.1,)).phases
    only._attached.clear()
    for _ in range(99):
        only.optimized()
    with pytest.raises(Finished):
        only.optimized()
    with pytest.raises(NotMeasured, match="100 steps of the optimizers"):
        only.results()


def test_steps_of_optimizers_with_a_model_end_nothing(monkeypatch):
    (only,) = Ranks(monkeypatch, (0.1,)).phases
    for _ in range(200):
        only.optimized()
    assert not only.finished
