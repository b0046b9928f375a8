"""Local steps equal Algorithm 2 of the paper at every step, and have its properties."""

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.local_sgd import reference
from tests.local_sgd.script import (
    Script,
    adamw,
    assert_follows,
    cosine,
    momentum,
    sgd,
    synchronised_steps,
    trained,
)
from tests.support.outcomes import assert_close, equal_on_all
from tests.support.ranks import on_threads

TOTAL, WARMUP = 40, 6
OPTIMIZERS = {
    "momentum": (momentum, reference.Momentum, 0.1),
    "adamw": (adamw, reference.adamw_update, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["every", "qsr"])
def test_equals_the_float64_reference_at_every_step(name, schedule):
    optimizer, update, peak = OPTIMIZERS[name]
    lr = partial(cosine, peak=peak, warmup=WARMUP, total=TOTAL)
    spec, rule = {
        "every": ("every(3)", reference.every(3)),
        "qsr": (
            f"qsr(alpha={2 * peak}, h_base=2)",
            reference.qsr(alpha=2 * peak, h_base=2, warmup=WARMUP),
        ),
    }[schedule]

    horizon = {"total_steps": TOTAL, "warmup_steps": WARMUP}
    options = {"spec": spec, "lr": lr, "optimizer": optimizer, **horizon}
    runs = on_threads(4, partial(trained, TOTAL, **options))
    expected = list(reference.local_opt(4, TOTAL, update=update, rule=rule, lr=lr))

    assert_follows(runs, expected)
    ends = [step for step, (_, averaged) in enumerate(expected, 1) if averaged]
    assert synchronised_steps(runs) == ends
    assert ends == torchcomp.sync_steps(spec, lr=lr, **horizon)
    lengths = {end - start for start, end in zip([0, *ends], ends, strict=False)}
    assert len(lengths) > (4 if schedule == "qsr" else 1), "the setting does not exercise the rule"


def test_a_round_of_one_step_equals_data_parallel_sgd():
    options = {"total_steps": 10, "optimizer": sgd}
    local = on_threads(4, partial(trained, 10, spec="every(1)", **options))
    parallel = on_threads(4, partial(trained, 10, spec=None, **options))
    for mine, wanted in zip(local, parallel, strict=True):
        for after_local, after_parallel in zip(mine, wanted, strict=True):
            assert_close(after_local, after_parallel)


def seen_by_a_later_hook():
    """The weights that a user's hook sees at the end of a round's last optimizer step."""
    script, seen = Script("every(3)"), []
    script.sync = None  # the user need not keep it
    script.train(0, 2)
    script.optimizer.register_step_post_hook(lambda *_: seen.append(script.weights()))
    script.train(2, 3)
    return seen[0]


def test_the_average_happens_inside_optimizer_step():
    assert equal_on_all(on_threads(4, seen_by_a_later_hook))


def test_next_sync_is_the_end_of_the_round_in_progress():
    def body():
        script = Script("every(3)", total_steps=4)
        seen = [script.sync.next_sync]
        for step in range(4):
            script.step(step)
            seen.append(script.sync.next_sync)
        return seen

    assert on_threads(1, body) == [[None, 3, 3, None, None]]


@pytest.mark.parametrize(
    ("lrs", "ends"),
    # H = (0.2 / lr)^2: 4 at 0.1, 16 at 0.05, 40,000 at 0.001.
    [([0.1, 0.001, 0.001, 0.001, 0.1], [4, 8, 12]), ([0.05, 0.1, 0.1, 0.1, 0.05], [16, 20])],
)
def test_round_length_is_frozen_while_the_learning_rate_changes(lrs, ends):
    lr = lambda step: lrs[step % 4 if step > 4 else step]  # noqa: E731
    options = {"spec": "qsr(alpha=0.2, h_base=2)", "total_steps": 20, "lr": lr}
    assert synchronised_steps(on_threads(2, partial(trained, ends[-1], **options))) == ends


@pytest.mark.parametrize(
    ("spec", "warmup", "warnings"),
    [("qsr(alpha=1.0, h_base=2)", 0, 1), ("qsr(alpha=1.0, h_base=2)", 12, 0), ("every(12)", 0, 0)],
)
def test_a_learning_rate_that_makes_one_round_of_the_run_logs_one_warning(
    spec, warmup, warnings, caplog
):
    options = {"spec": spec, "total_steps": 12, "warmup_steps": warmup}
    with caplog.at_level(logging.WARNING, "torchcomp.local_sgd"):
        on_threads(2, partial(trained, 12, **options))
    messages = [record.getMessage() for record in caplog.records if "warmup_steps" in record.msg]
    assert len(messages) == warnings


def test_ranks_of_sub_groups_average_among_themselves():
    def body():
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = halves[dist.get_rank() // 2]
        return trained(6, spec="every(3)", total_steps=6, process_group=mine)

    runs = on_threads(4, body)
    assert synchronised_steps(runs[:2]) == [3, 6]
    assert synchronised_steps(runs[2:]) == [3, 6]
    assert not torch.equal(runs[0][5], runs[2][5])
