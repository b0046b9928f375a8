"""Checkpoints and statistics of JointSpar."""

import json
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.jointspar.script import backward
from tests.support.models import mlp, rows, weights, wrap
from tests.support.outcomes import reloaded
from tests.support.ranks import on_threads
from torchcomp.errors import CheckpointError, RankMismatchError
from torchcomp.jointspar import Baseline, JointSpar
from torchcomp.jointspar.sampler import SamplingOptions
from torchcomp.redistribution import redistribute

COMPRESS = ("mean", "ef(topk(0.1))", "bidirectional(topk(0.2), topk(0.2))")
OPTIONS = {"budget": 0.5, "p_min": 0.1}


class Run:
    """A training run whose state can be saved."""

    def __init__(self, state=None, **options):
        self.model = wrap(mlp())
        self.jointspar = JointSpar(self.model, **{**OPTIONS, **options})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.jointspar.load_state_dict(state["jointspar"])

    def train(self, start, stop):
        kept = []
        for step in range(start, stop):
            kept.append(self.jointspar.kept)
            self.optimizer.zero_grad()
            backward(self.model, (rows(step),))
            self.optimizer.step()
        return kept

    def state(self):
        """Return the state after saving it to a file and loading it with weights_only=True."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "jointspar": self.jointspar.state_dict(),
        }
        return reloaded(state)


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize("selection", ["shared", "per-rank"])
@pytest.mark.parametrize("cut", [1, 5])
def test_a_resumed_run_continues_bit_for_bit(compress, selection, cut):
    options = {"compress": compress, "selection": selection}

    def body():
        whole = Run(**options)
        kept = whole.train(0, 10)
        half = Run(**options)
        half.train(0, cut)
        # The seed comes from the checkpoint.
        resumed = Run(half.state(), seed=99, **options)
        assert resumed.train(cut, 10) == kept[cut:]
        assert torch.equal(weights(resumed.model), weights(whole.model))
        assert resumed.jointspar.p == whole.jointspar.p
        assert resumed.jointspar.stats.step == 10

    on_threads(2, body)


def costs_of(run):
    return run.jointspar.state_dict()["jointspar"]["costs"]


def test_a_resumed_run_with_measured_times_keeps_them():
    def body():
        first = Run(costs="time", warmup_steps=2)
        first.train(0, 1)
        early = Run(first.state(), costs="time", warmup_steps=2)
        assert costs_of(early) is None
        first.train(1, 4)
        second = Run(first.state(), costs="time", warmup_steps=2)
        assert costs_of(second) == costs_of(first) is not None
        assert second.train(4, 8) == first.train(4, 8)

    on_threads(2, body)


@pytest.mark.parametrize("compress", ["mean", "ef(topk(0.1))"])
def test_another_number_of_ranks_continues_with_the_same_p_and_sets(compress):
    def first():
        run = Run(compress=compress)
        run.train(0, 5)
        return run.state(), run.jointspar.p

    def second():
        state = {**before[dist.get_rank() % 2][0]}
        if compress != "mean":
            states = [state["jointspar"] for state, _ in before]
            state["jointspar"] = redistribute(states, 3)[dist.get_rank()]
        run = Run(state, compress=compress)
        assert run.jointspar.p == before[0][1]
        return run.train(5, 8)

    before = on_threads(2, first)
    kept = on_threads(3, second)
    assert kept == [kept[0]] * 3
    alone = on_threads(2, lambda: Run(before[dist.get_rank()][0], compress=compress).train(5, 6))
    assert alone[0] == kept[0][:1]


def test_a_residual_is_not_dropped_with_another_number_of_ranks():
    state = on_threads(2, lambda: trained_state("ef(topk(0.1))"))[0]

    def body():
        with pytest.raises(CheckpointError, match=r"torchcomp.redistribute"):
            Run(state, compress="ef(topk(0.1))")

    on_threads(3, body)


def trained_state(compress="mean", **options):
    run = Run(compress=compress, **options)
    run.train(0, 3)
    return run.state()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.7}, r"budget=0\.5.*budget=0\.7"),
        ({"compress": "ef(topk(0.1))"}, r"jointspar\(mean.*jointspar\(ef\(topk\(0\.1\)"),
        ({"selection": "per-rank"}, r'selection="shared".*selection="per-rank"'),
        ({"layers": {"a": "[0-2].*", "b": "[3-6].*"}}, r"layers.*\(a, b, 0\)"),
    ],
)
def test_another_runs_state_is_refused_and_changes_nothing(options, message):
    states = on_threads(2, trained_state)

    def body():
        run = Run(**options)
        run.train(0, 1)
        before = run.state()["jointspar"]
        with pytest.raises(CheckpointError, match=message):
            run.jointspar.load_state_dict(states[dist.get_rank()]["jointspar"])
        assert str(run.state()["jointspar"]) == str(before)
        with pytest.raises(CheckpointError, match="'version'"):
            run.jointspar.load_state_dict({})

    on_threads(2, body)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"step": "x"}, r"jointspar.*step.*'x'"),
        ({"step": -1}, r"jointspar.*step.*-1"),
        ({"layers": None}, r"jointspar.*layers.*None"),
        ({"costs": [1.0]}, r"jointspar.*costs.*\b4\b.*\b1\b"),
        ({"costs": None}, r"jointspar.*costs.*1-D.*\(\)"),
        ({"costs": [1.0, 1.0, 0.0, 1.0]}, r"jointspar.*costs.* 0\.0"),
        ({"bandit": None}, r"jointspar.*bandit.*\bp, largest, average, updates"),
        ({"bandit": {"p": [7.0] * 4}}, r"jointspar.*bandit.*'largest'"),
        ({"p": [7.0] * 4}, r"jointspar.*p\[0\].*7\.0.*0\.1.*1"),
        ({"p": [float("nan")] * 4}, r"jointspar.*p.*nan"),
        ({"applied": [0.0] * 4}, r"jointspar.*applied\[0\].*0\.0.*0\.1.*1"),
        ({"averages": {"0.weight": [1.0]}}, r"jointspar.*averages.*0\.weight.*\b2\b.*\[1\.0\]"),
        ({"averages": {"0.weight": [-1.0, 1.0]}}, r"jointspar.*averages.*0\.weight.*-1\.0"),
        ({"averages": 3}, r"jointspar.*averages.*3"),
    ],
)
def test_a_damaged_section_is_refused_and_changes_nothing(damage, message):
    def body():
        run = Run()
        run.train(0, 3)
        before = run.state()["jointspar"]
        section = {**before["jointspar"], "step": 2}
        if "p" in damage:
            section["bandit"] = {**section["bandit"], **damage}
        with pytest.raises(CheckpointError, match=message):
            run.jointspar.load_state_dict({**before, "step": 5, "jointspar": {**section, **damage}})
        assert str(run.state()["jointspar"]) == str(before)
        run.train(3, 4)

    on_threads(1, body)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"seed": -1}, r"\bseed\b.*-1$"),
        ({"seed": 2**64}, rf"\bseed\b.*{2**64}$"),
        ({"step": "x"}, r"\bstep\b.*'x'$"),
        ({"slots": None}, r"\bslots\b.*None$"),
        ({"jointspar": {}}, r"\bjointspar\b.*'step', 'layers', 'costs'"),
        ({"jointspar": None}, r"\bjointspar\b.*None$"),
        ({"rank": 1}, r"\brank 1\b.* 0\b"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, message):
    def body():
        run = Run()
        run.train(0, 3)
        before = run.state()["jointspar"]
        with pytest.raises(CheckpointError, match=message):
            run.jointspar.load_state_dict({**before, **damage})
        assert str(run.state()["jointspar"]) == str(before)
        run.train(3, 4)

    on_threads(1, body)


def test_options_of_numpy_numbers_equal_those_of_python_numbers():
    """Checkpoints and ranks compare the text of the options."""
    options = [
        SamplingOptions(number(0.5), "layers", number(0.125), Baseline(), "shared", 1)
        for number in (float, np.float32)
    ]
    assert str(options[0]) == str(options[1])


def test_a_run_with_options_of_numpy_numbers_can_be_loaded():
    def body():
        run = Run(budget=np.float64(0.5), p_min=np.float64(0.1), seed=np.int64(3))
        run.train(0, 2)
        Run(run.state(), seed=3).train(2, 3)

    on_threads(1, body)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, r"\bNoneType$"),
        ([], r"\blist$"),
        ({"jointspar": 1}, "'version'"),
    ],
)
def test_a_value_that_is_not_a_state_is_refused(state, message):
    def body():
        with pytest.raises(CheckpointError, match=message):
            Run().jointspar.load_state_dict(state)

    on_threads(1, body)


def test_the_state_of_a_handle_alone_is_refused():
    def body():
        run = Run()
        state = run.state()["jointspar"]
        del state["jointspar"]
        with pytest.raises(CheckpointError, match=r"\bjointspar\b.*None$"):
            run.jointspar.load_state_dict(state)

    on_threads(1, body)


def test_a_checkpoint_loaded_on_one_rank_only_raises_before_the_exchange():
    states = on_threads(2, trained_state)

    def body():
        run = Run(states[1] if dist.get_rank() else None)
        before = weights(run.model)
        with pytest.raises(RankMismatchError, match=r"step.*0.*rank 0.*3.*rank 1"):
            run.train(0, 1)
        assert torch.equal(weights(run.model), before)

    on_threads(2, body)


def test_p_that_differs_across_ranks_raises_at_the_next_verification():
    def body():
        run = Run(warmup_steps=0)
        run.train(0, 2)
        if dist.get_rank() == 1:
            run.jointspar._sampler.bandit.p[0] += 1e-6
        run.train(2, 3)
        run.jointspar._sampler._verified = False
        with pytest.raises(RankMismatchError, match=r"layers.*\bp\b.*rank 0.*rank 1"):
            run.train(3, 4)

    on_threads(2, body)


# --- Reports --------------------------------------------------------------------------------------


def test_stats_report_layers_bytes_and_time():
    def body():
        run = Run(warmup_steps=0)
        first = run.jointspar.stats
        assert (first.step, first.kept, first.backward_ms) == (0, (), 0.0)
        kept = run.train(0, 5)
        stats = run.jointspar.stats
        assert stats.step == 5
        assert stats.kept == kept[-1]
        assert stats.p == run.jointspar.p
        assert sum(stats.p.values()) == pytest.approx(2.0)
        assert stats.share == pytest.approx(0.5)
        assert stats.backward_ms > 0
        assert 0 < stats.total_bytes_sent < stats.total_dense_bytes_sent
        row = json.loads(json.dumps(stats.row()))
        assert row["kept"] == list(kept[-1])
        assert row["p"] == run.jointspar.p
        assert re.search(rf"\b5\b.*\b{len(kept[-1])} of 4\b", str(stats))
        assert "budget=0.5" in repr(run.jointspar)

    on_threads(2, body)


def test_the_table_names_every_layer():
    def body():
        run = Run(warmup_steps=0, costs="bytes")
        lines = run.jointspar.table().splitlines()
        assert lines[0].split() == ["layer", "tensors", "elements", "share", "of", "bytes", "p"]
        assert [line.split()[0] for line in lines[1:]] == ["0", "2", "4", "6"]
        assert lines[4].split()[1:3] == ["2", "68"]
        assert float(lines[4].split()[3]) == pytest.approx(68 / 884, abs=1e-4)

    on_threads(2, body)
