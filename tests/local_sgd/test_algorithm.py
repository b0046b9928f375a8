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
    constant,
    cosine,
    float32_mlp,
    momentum,
    sgd,
    synchronised_steps,
    trained,
)
from tests.support.outcomes import assert_close, equal_on_all
from tests.support.ranks import on_processes, on_threads

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

    for actual, (weights, _) in zip(zip(*runs, strict=True), expected, strict=True):
        for mine, wanted in zip(actual, weights, strict=True):
            assert_close(mine, wanted)
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


@pytest.mark.parametrize("launch", [on_threads, on_processes])
def test_ranks_are_bit_identical_after_a_synchronisation_and_differ_within_a_round(launch):
    body = partial(trained, 8, spec="every(3)", total_steps=8, build=float32_mlp)
    runs = launch(3, body)
    assert synchronised_steps(runs) == [3, 6, 8]
    for step in (1, 2, 4, 5, 7):
        assert len({tuple(run[step - 1].tolist()) for run in runs}) == 3


def test_the_run_ends_with_a_synchronisation_at_exactly_total_steps():
    runs = on_threads(2, partial(trained, 7, spec="every(100)", total_steps=7))
    assert synchronised_steps(runs) == [7]


def seen_by_a_later_hook():
    """The weights that a user's hook sees at the end of a round's last optimizer step."""
    script, seen = Script("every(3)"), []
    script.train(0, 2)
    script.optimizer.register_step_post_hook(lambda *_: seen.append(script.weights()))
    script.train(2, 3)
    return seen[0]


def test_the_average_happens_inside_optimizer_step():
    assert equal_on_all(on_threads(4, seen_by_a_later_hook))


def works_without_a_reference_to_it():
    script = Script("every(2)", total_steps=2)
    script.sync = None
    return script.train(0, 2)


def test_the_user_need_not_keep_the_object():
    assert synchronised_steps(on_threads(2, works_without_a_reference_to_it)) == [2]


def next_syncs(steps, **options):
    script = Script(**options)
    seen = [script.sync.next_sync]
    for step in range(steps):
        script.step(step)
        seen.append(script.sync.next_sync)
    return seen


def test_next_sync_is_the_end_of_the_round_in_progress():
    (seen,) = on_threads(1, partial(next_syncs, 4, spec="every(3)", total_steps=4))
    assert seen == [None, 3, 3, None, None]


def test_round_length_is_frozen_while_the_learning_rate_falls_a_hundredfold():
    # H = 4 at the first step. The second step's learning rate would give 40,000, and no round
    # begins there. One begins at the fifth step.
    lr = [0.1, *[0.001] * 11].__getitem__
    options = {"spec": "qsr(alpha=0.2, h_base=2)", "total_steps": 12}
    runs = on_threads(2, partial(trained, 11, lr=lambda step: lr(min(step, 11)), **options))
    assert synchronised_steps(runs) == [4]


def test_round_length_is_frozen_while_the_learning_rate_rises_a_hundredfold():
    def lr(step):
        return 0.1 if 1 <= step < 4 else 0.05

    # H = 16 at 0.05 and 4 at 0.1, but no round begins at 0.1.
    options = {"spec": "qsr(alpha=0.2, h_base=2)", "total_steps": 20, "lr": lr}
    assert synchronised_steps(on_threads(2, partial(trained, 20, **options))) == [16, 20]


@pytest.mark.parametrize(
    ("warmup", "expected"), [(0, [12]), (3, [2, 4, 12]), (12, [2, 4, 6, 8, 10, 12])]
)
def test_rounds_that_begin_in_warm_up_take_h_base(warmup, expected):
    options = {"spec": "qsr(alpha=1.0, h_base=2)", "total_steps": 12, "warmup_steps": warmup}
    runs = on_threads(2, partial(trained, 12, lr=constant, **options))
    assert synchronised_steps(runs) == expected


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
