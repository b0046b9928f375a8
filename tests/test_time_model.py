"""Time model: its formulas by hand, and each of the paper's wall clocks predicted from another."""

import math
import re
from functools import partial

import pytest

from torchcomp import SpecError
from torchcomp.time_model import TimeModel, fit_time_model

HOUR = 3600.0


# --- The paper's wall clocks ----------------------------------------------------------------------
#
# ViT-B with parallel AdamW and with QSR: 26.7 h and 20.2 h on 2 machines of 8 GPUs each, 8.6 h and
# 5.5 h on 8 machines. The batch size per GPU is 256 in both, so the total batch size is 4,096 and
# 16,384. T, W and the peak learning rate differ accordingly. alpha and H_base are known only for
# batch size 4,096, and both runs use these. The bytes are those of the paper's simple ViT-B/16 in
# float32; they cancel between fit and prediction.

QSR = "qsr(alpha=0.0175, h_base=4)"
VIT_BYTES = 4 * 86_381_800
MACHINE = 8


def cosine(step, *, peak, total_steps, warmup_steps, final=1e-6):
    if step < warmup_steps:
        return final + (peak - final) * step / warmup_steps
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * done))


def of_the_paper(world_size, peak, total_steps, warmup_steps, parallel, local, syncs):
    horizon = {"total_steps": total_steps, "warmup_steps": warmup_steps}
    return {
        "world_size": world_size,
        "horizon": horizon,
        "lr": partial(cosine, peak=peak, **horizon),
        "published": (parallel * HOUR, local * HOUR),
        "syncs": syncs,
    }


FEW = of_the_paper(16, 0.008, 93_600, 10_000, parallel=26.7, local=20.2, syncs=9_711)
MANY = of_the_paper(64, 0.016, 23_400, 2_500, parallel=8.6, local=5.5, syncs=3_771)


def fitted(run):
    parallel, local = run["published"]
    return fit_time_model(
        parallel_seconds=parallel,
        local_seconds=local,
        total_steps=run["horizon"]["total_steps"],
        syncs=run["syncs"],
        nbytes=VIT_BYTES,
        world_size=run["world_size"],
        ranks_per_machine=MACHINE,
    )


def predicted(model, run):
    size = {"nbytes": VIT_BYTES, "world_size": run["world_size"]}
    parallel = model.parallel(total_steps=run["horizon"]["total_steps"], **size)
    local = model.local(QSR, lr=run["lr"], **run["horizon"], **size)
    assert local.syncs == run["syncs"]
    return parallel.seconds, local.seconds


@pytest.mark.parametrize("run", [FEW, MANY], ids=["16", "64"])
def test_a_fit_explains_its_own_run(run):
    assert predicted(fitted(run), run) == pytest.approx(run["published"], rel=1e-9)


@pytest.mark.parametrize(("known", "other"), [(FEW, MANY), (MANY, FEW)], ids=["to 64", "to 16"])
def test_constants_of_one_cluster_predict_the_other_within_ten_percent(known, other):
    assert predicted(fitted(known), other) == pytest.approx(other["published"], rel=0.1)


def test_the_fitted_constants_of_both_clusters_are_similar():
    few, many = fitted(FEW), fitted(MANY)
    # 0.75 s for 256 images. 9.9 and 8.5 Gbit/s of the link's 25 Gbit/s.
    assert few.step_seconds == pytest.approx(0.748, abs=5e-4)
    assert many.step_seconds == pytest.approx(0.755, abs=5e-4)
    assert 8 * few.bandwidth == pytest.approx(9.91e9, rel=2e-3)
    assert 8 * many.bandwidth == pytest.approx(8.51e9, rel=2e-3)


def test_wall_clocks_of_the_paper_from_its_step_and_exchange_time():
    model = fitted(FEW)
    parallel = model.parallel(total_steps=93_600, nbytes=VIT_BYTES, world_size=16)
    every = model.local("every(4)", total_steps=93_600, nbytes=VIT_BYTES, world_size=16)
    qsr = model.local(QSR, lr=FEW["lr"], **FEW["horizon"], nbytes=VIT_BYTES, world_size=16)
    assert [(clock.method, str(clock)) for clock in (parallel, every, qsr)] == [
        ("parallel", "26.7 h, of which 7.25 h for 93,600 exchanges"),
        ("every(4)", "21.3 h, of which 1.81 h for 23,400 exchanges"),
        ("qsr(alpha=0.0175, h_base=4)", "20.2 h, of which 0.752 h for 9,711 exchanges"),
    ]


# --- Formulas -------------------------------------------------------------------------------------

SIZE = {"nbytes": 1000, "world_size": 4}


@pytest.mark.parametrize(
    ("world_size", "ranks_per_machine", "seconds"),
    [
        (1, 1, 0.0),
        (2, 1, 2 * 1 / 2 * 1000 / 100 + 2 * 0.5),
        (4, 1, 2 * 3 / 4 * 1000 / 100 + 6 * 0.5),
        (16, 8, 2 * 1 / 2 * 1000 / 100 + 2 * 0.5),
        (64, 8, 2 * 7 / 8 * 1000 / 100 + 14 * 0.5),
        (8, 8, 0.0),
        (4, 8, 0.0),
    ],
)
def test_an_exchange_goes_around_the_machines(world_size, ranks_per_machine, seconds):
    model = TimeModel(1.0, 100.0, latency=0.5, ranks_per_machine=ranks_per_machine)
    assert model.exchange_seconds(1000, world_size) == seconds


def test_parallel_and_local_runs_by_hand():
    model = TimeModel(step_seconds=2.0, bandwidth=100.0)
    parallel = model.parallel(total_steps=10, **SIZE)
    assert (parallel.method, parallel.syncs) == ("parallel", 10)
    assert (parallel.compute_seconds, parallel.exchange_seconds) == (20.0, 150.0)
    local = model.local("every(4)", total_steps=10, **SIZE)
    assert (local.method, local.syncs, local.seconds) == ("every(4)", 3, 20.0 + 3 * 15.0)


def test_a_schedule_is_timed_with_its_learning_rates_and_its_warmup():
    rates = {"lr": lambda step: 0.25, "total_steps": 40, "warmup_steps": 5}
    local = TimeModel(2.0, 100.0).local("qsr(alpha=1.0, h_base=4)", **rates, **SIZE)
    # Synchronisations after 4, 8, 24 and 40 steps.
    assert (local.syncs, local.seconds) == (4, 80.0 + 4 * 15.0)


@pytest.mark.parametrize(("overlap", "shown"), [(0.0, 15.0), (0.25, 10.0), (0.75, 0.0), (1.0, 0.0)])
def test_the_backward_pass_hides_the_exchange_of_parallel_steps_alone(overlap, shown):
    model = TimeModel(step_seconds=20.0, bandwidth=100.0, overlap=overlap)
    assert model.parallel(total_steps=10, **SIZE).exchange_seconds == pytest.approx(10 * shown)
    assert model.local("every(1)", total_steps=10, **SIZE).exchange_seconds == 150.0


# --- Bad input ------------------------------------------------------------------------------------

GOOD = {"step_seconds": 1.0, "bandwidth": 1e9}


def refuses(name, value):
    """Expect a SpecError with an argument's name and its value."""
    return pytest.raises(SpecError, match=rf"\b{name}\b.*{re.escape(repr(value))}$")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_seconds", 0),
        ("step_seconds", math.nan),
        ("bandwidth", -1e9),
        ("bandwidth", math.inf),
        ("bandwidth", "1e9"),
        ("latency", -1.0),
        ("latency", math.inf),
        ("overlap", 1.5),
        ("overlap", True),
        ("ranks_per_machine", 0),
    ],
)
def test_bad_constants_are_refused(name, value):
    with refuses(name, value) as caught:
        TimeModel(**GOOD | {name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("world_size", 0), ("nbytes", -1), ("nbytes", 1.5), ("total_steps", 0)],
)
def test_bad_runs_are_refused(name, value):
    run = {"total_steps": 10, "nbytes": 1000, "world_size": 16} | {name: value}
    model = TimeModel(**GOOD, ranks_per_machine=8)
    for time in (model.parallel, partial(model.local, "every(4)")):
        with refuses(name, value) as caught:
            time(**run)
        assert caught.value.field == name


def test_a_part_full_machine_is_refused():
    run = {"total_steps": 10, "nbytes": 1000, "world_size": 12}
    model = TimeModel(**GOOD, ranks_per_machine=8)
    for time in (model.parallel, partial(model.local, "every(4)")):
        with pytest.raises(SpecError, match=r"world_size=12\b.*ranks_per_machine=8\b"):
            time(**run)


def test_a_schedule_that_reads_the_learning_rate_needs_it():
    with pytest.raises(SpecError, match=r"'qsr.*'.*\blr\b"):
        TimeModel(**GOOD).local(QSR, total_steps=10, **SIZE)


def test_a_method_is_not_a_schedule():
    with pytest.raises(SpecError, match=r"every\(4\).*'ef\(topk\(0\.01\)\)'"):
        TimeModel(**GOOD).local("ef(topk(0.01))", total_steps=10, **SIZE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_seconds": 0.0}, r"parallel_seconds.*0\.0$"),
        ({"local_seconds": math.nan}, "local_seconds.*nan$"),
        ({"total_steps": 1.5}, r"total_steps.*1\.5$"),
        ({"syncs": 0}, "syncs.*1.*99.*0$"),
        ({"syncs": 100}, "syncs.*1.*99.*100$"),
        ({"nbytes": 0}, "nbytes.*0$"),
        ({"world_size": 8}, r"world_size=8\b.*ranks_per_machine=8\b"),
        ({"world_size": 9}, r"world_size=9\b.*ranks_per_machine=8\b"),
        ({"local_seconds": 200.0}, r"parallel_seconds=200\b.*local_seconds=200\b"),
        ({"local_seconds": 40.0}, r"parallel_seconds=200\b.*local_seconds=40\b"),
    ],
)
def test_times_that_cannot_be_fitted_are_refused(changes, words):
    measured = {"parallel_seconds": 200.0, "local_seconds": 150.0, "total_steps": 100, "syncs": 25}
    size = {"nbytes": 1000, "world_size": 16, "ranks_per_machine": 8}
    assert fit_time_model(**measured, **size).step_seconds == pytest.approx(2 - 50 / 75)
    with pytest.raises(SpecError, match=words):
        fit_time_model(**measured | size | changes)
