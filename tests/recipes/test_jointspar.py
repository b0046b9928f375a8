"""JointSpar: the texts of methods, simulated ranks and real ones, and the numbers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from recipes.jointspar import bandit, convergence, large_batch, training
from recipes.jointspar.methods import LayerSampling, parse_method
from recipes.jointspar.simulation import SimulatedRanks
from recipes.jointspar.training import ResidualMLP, Schedule, attach, build_optimizer
from recipes.rows import build
from tests.recipes.runs import published
from tests.support.ranks import on_threads

NAME = "jointspar"
PER_RANK = 'jointspar(0.5, selection="per-rank", rule=Literal(alpha=1e-06, bound=None))'


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("sgd", "dense"),
        ("sgd", PER_RANK),
        ("lars-own", 'jointspar(0.5, selection="per-rank", rule=Baseline(0.03))'),
        ("sgd", "jointspar(0.5, rule=Literal(1e-6))"),
        ("lars", 'jointspar(0.5, costs="bytes", rule=Baseline(0.03))'),
    ],
)
def test_simulated_ranks_train_as_ddp_does(optimizer, text):
    method, ranks, steps = parse_method(text), 3, 12
    torch.manual_seed(0)
    start = ResidualMLP(8, 3, hidden=(4, 16), width=6)
    images, labels = torch.randn(steps, ranks, 5, 8), torch.randint(0, 3, (steps, ranks, 5))

    def real():
        model = DistributedDataParallel(copy.deepcopy(start))
        handle = attach(method, model, seed=7)
        samples = isinstance(method, LayerSampling)
        stepper = build_optimizer(model, optimizer, 0.1, handle if samples else None)
        for step in range(steps):
            stepper.zero_grad()
            rank = dist.get_rank()
            cross_entropy(model(images[step, rank]), labels[step, rank]).backward()
            stepper.step()
        return model.module.state_dict(), handle.p if samples else {}

    module = copy.deepcopy(start)
    simulated = SimulatedRanks(module, method, ranks, seed=7)
    sampled = simulated if simulated.samplers else None
    stepper = build_optimizer(module, optimizer, 0.1, sampled)
    for step in range(steps):
        batches = list(zip(images[step], labels[step], strict=True))
        losses = [lambda x=x, y=y: cross_entropy(module(x), y) for x, y in batches]
        assert simulated.backward(losses)
        stepper.step()

    outcomes = on_threads(ranks, real)
    for name, weights in module.state_dict().items():
        torch.testing.assert_close(weights, outcomes[0][0][name])
    for sampler, (_, p) in zip(simulated.samplers, outcomes, strict=False):
        assert sampler.p.tolist() == pytest.approx(list(p.values()))
    huge = [lambda: module(torch.ones(2, 8)).sum() * 1e40] * ranks
    assert not simulated.backward(huge)


EVERY = [
    ("dense", "sgd", 1.0),
    ("topk(0.3)", "lars", 0.3),
    ('jointspar(0.6, costs="bytes", topk=0.05)', "lars", 0.05),
    ('jointspar(0.5, costs="bytes")', "lars", 0.5),
    # The ranks exchange what either of the two keeps.
    (PER_RANK, "sgd", 0.75),
]


def test_methods_train_on_ranks_and_send_their_share():
    start, images = ResidualMLP(64, 10).state_dict(), large_batch.digits()

    def body(method, optimizer, lr):
        module = ResidualMLP(64, 10)
        module.load_state_dict(start)
        schedule, parsed = Schedule.of_paper(15, lr), parse_method(method)
        return training.train(module, images, 400, parsed, optimizer, schedule, 0)

    for method, optimizer, share in EVERY:
        first, second = on_threads(2, body, method, optimizer, 0.03 if optimizer == "sgd" else 0.3)
        assert float(first.test) == float(second.test) > 20, method
        assert float(first.bytes_share) == pytest.approx(share, abs=0.12)
    assert {each.test for each in on_threads(2, body, "jointspar(0.5)", "lars", 1e30)} == {"nan"}


@pytest.mark.parametrize("method", [convergence.DENSE, convergence.PAPER])
def test_a_convergence_run_is_reproduced(method):
    row = published(
        NAME, "convergence", optimizer="sgd", workers=2, method=method, lr=0.025, seed=0
    )
    cells, _ = convergence.simulate(build(convergence.Run, row), epochs=30)
    found = dict(zip(convergence.OUTCOME, map(float, cells), strict=True))
    # Machines add in different orders. One test image of 355 is 0.28 points.
    assert found["test"] == pytest.approx(row["test"], abs=0.6)
    assert found["train_loss"] == pytest.approx(row["train_loss"], rel=0.1)
    assert found["sent"] == pytest.approx(row["sent"], abs=0.01)


def test_a_bandit_run_is_reproduced_to_the_last_digit():
    run = bandit.Run("baseline, alpha 0.01", seed=3)
    cells, (curve,) = bandit.measure(run, bandit.STEPS)
    for table, found in (("bandit", cells), ("bandit_curves", curve)):
        row = published(NAME, table, **vars(run))
        assert [*map(float, found)] == list(row.values())[2 : 2 + len(found)]
