"""Every method keeps every law in DDP, on ranks that are threads.

tests/engine/test_averager.py has the same laws without DDP, tests/aggregators those of one method.
"""

import re
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.ddp.runs import TOPK, Run, without_traffic
from tests.support.cases import only, thorough
from tests.support.models import (
    CONSERVING,
    METHODS,
    SMALL_BUCKETS,
    THROUGH_DDP,
    WITH_RESIDUAL,
    assert_conserved,
    assert_residual,
    kept,
    loss_of,
    mlp,
    residual_norm,
    rows,
    seeded,
    wrap,
)
from tests.support.outcomes import assert_replicas_equal, messages, raised_by, reloaded, same
from tests.support.ranks import on_processes, on_threads
from torchcomp import NonFiniteError
from torchcomp.aggregators import AGGREGATORS
from torchcomp.compressors import COMPRESSORS

FEW = (TOPK, "powersgd(rank=1)")
# Options of register under which the same laws hold.
WAYS: dict[str, dict[str, Any]] = {"flat": {}, "late": {"check": "late"}, "nodes": {"nodes": 2}}
WAYS["nodes, late"] = {"nodes": 2, "check": "late"}
every_way = pytest.mark.parametrize("way", list(WAYS)[1:])
every_method = pytest.mark.parametrize("spec", only(METHODS, now=THROUGH_DDP))


def test_methods_name_everything_that_is_registered() -> None:
    methods = [torchcomp.parse(spec) for spec in METHODS]
    listed = {type(method) for method in methods}
    listed |= {type(getattr(method, field.name)) for method in methods for field in fields(method)}
    missing = {cls.name for cls in (*AGGREGATORS, *COMPRESSORS) if cls not in listed}
    assert not missing, f"add a spec with {missing} to METHODS in tests/support/models.py"


# --- Replicas -------------------------------------------------------------------------------------


def trained(spec: str, steps: int) -> Tensor:
    run = Run(spec, dtype=torch.float32, lr=0.005).train(*range(steps))
    run.handle.close()
    return run.weights


@pytest.mark.parametrize("steps", [20, *thorough([100])])
@every_method
def test_replicas_are_bit_identical(spec: str, steps: int) -> None:
    outcomes = on_threads(4, trained, spec, steps)
    assert_replicas_equal(outcomes)
    assert outcomes[0].isfinite().all()


def test_replicas_are_bit_identical_over_gloo() -> None:
    for spec in (TOPK, 'ef(randk(0.1, scope="tensor"))'):
        assert_replicas_equal(on_processes(3, trained, spec, 100))


# --- Conservation: sum of applied means + mean residual = sum of the dense means ------------------


@pytest.mark.parametrize("spec", CONSERVING)
@pytest.mark.parametrize("world_size", [4, *thorough([1, 3])])
def test_conserves_through_the_bucket_rebuild(spec: str, world_size: int) -> None:
    accounts = on_threads(world_size, lambda: Run(spec).train(*range(6), account=True).closed())
    assert_conserved(accounts)
    if "cast" not in spec:
        assert_residual(accounts)


# --- Resume ---------------------------------------------------------------------------------------


def snapshot(run: Run) -> Any:
    saved = run.model.module.state_dict(), run.optimizer.state_dict(), run.state
    return reloaded(saved + ((run.scaler.state_dict(),) if run.scaler else ()))


def resumed(spec: str, saved: Any, **options: Any) -> Run:
    # Another seed and other weights: the snapshot must overwrite both.
    run = Run(spec, seeded(mlp(), seed=1), momentum=0.9, seed=6, **options)
    run.model.module.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    run.handle.load_state_dict(saved[2])
    if run.scaler:
        run.scaler.load_state_dict(saved[3])
    return run


def assert_resumes(
    spec: str, stop: int, cap: float | None = SMALL_BUCKETS, way: str = "flat"
) -> None:
    whole = Run(spec, momentum=0.9, seed=5, **WAYS[way]).train(*range(stop))
    again = resumed(spec, snapshot(whole), ddp={"bucket_cap_mb": cap}, **WAYS[way])
    for run in (whole, again):
        run.train(*range(stop, 8))
    assert torch.equal(again.weights, whole.weights)
    assert same(again.state["slots"], whole.state["slots"])
    assert messages(again.handle.stats) == messages(whole.handle.stats)
    whole.handle.close()
    again.handle.close()


# Before and after the rebuild of the buckets, or with another bucket size.
STOPS = (1, SMALL_BUCKETS), (5, SMALL_BUCKETS), (1, 4 * SMALL_BUCKETS)


@pytest.mark.parametrize("case", [*STOPS, *thorough([(1, None)])], ids=str)
@every_method
def test_resumed_run_is_bit_identical(spec: str, case: tuple[int, float]) -> None:
    on_threads(3, assert_resumes, spec, *case)


@every_way
@pytest.mark.parametrize("spec", only(THROUGH_DDP, now=FEW))
def test_resumed_run_is_bit_identical_in_every_way(spec: str, way: str) -> None:
    on_threads(4, assert_resumes, spec, 3, SMALL_BUCKETS, way)


def _over_gloo() -> None:
    for spec in (TOPK, 'ef(randk(0.1), exchange="allgather")', 'ef(cast("bf16"))', "mean"):
        assert_resumes(spec, 1)
        assert_resumes(spec, 4, None)


def test_resumed_run_over_gloo_is_bit_identical() -> None:
    on_processes(2, _over_gloo)


def scaled(spec: str, scale: float) -> Run:
    return Run(
        spec, momentum=0.9, scaler=torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    )


@pytest.mark.parametrize("spec", only(THROUGH_DDP, now=FEW))
def test_a_run_whose_last_step_the_scaler_skipped_resumes_bit_for_bit(spec: str) -> None:
    def body() -> None:
        run = scaled(spec, 64.0).train(0, 1, 2)
        hook = run.poison(float("inf"))
        run.step(3)
        hook.remove()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2)
        again = resumed(spec, snapshot(run), scaler=scaler)
        outcomes = [
            [each.weights, each.state["slots"], each.state["scale"], each.scaler.get_scale()]
            for each in (run.train(4, 5, 6), again.train(4, 5, 6))
        ]
        assert same(*outcomes)

    on_threads(2, body)


# --- NaN and infinities ---------------------------------------------------------------------------


def survives(spec: str, value: float, way: str = "flat") -> Any:
    """Train with one failed step, where a gradient has `value` on rank 1."""
    run = Run(spec, **WAYS[way]).train(0, 1, 2, account=True)
    before, sent = run.state, run.handle.stats.total_bytes_sent
    hook = run.poison(value)
    if "late" in way:
        run.loss(3).backward()
        hook.remove()
        run.model.zero_grad()
    error = raised_by(lambda: run.loss(3).backward())
    hook.remove()
    assert isinstance(error, NonFiniteError), repr(error)
    assert re.search(r"\bstep 4\b.* '4\.weight' on rank 1\.", str(error)), error
    assert same(without_traffic(run.state), without_traffic(before))
    assert run.handle.stats.total_bytes_sent > sent
    run.train(4, 5, 6, account=True)
    assert run.state["step"] == 6
    return run.handle.close() if "nodes" in WAYS[way] else run.closed()


@pytest.mark.parametrize("value", [float("nan"), *thorough([float("inf"), -float("inf")])])
@pytest.mark.parametrize("spec", only(METHODS[1:], now=THROUGH_DDP))
def test_nonfinite_gradient_raises_on_every_rank_and_training_can_continue(
    spec: str, value: float
) -> None:
    accounts = on_threads(3, survives, spec, value)
    if spec in CONSERVING:
        assert_conserved(accounts)


@every_way
@pytest.mark.parametrize("spec", [*FEW, 'ef(quantize("int8"))'])
def test_nonfinite_gradient_raises_on_every_rank_in_every_way(spec: str, way: str) -> None:
    on_threads(4, survives, spec, float("nan"), way)


def test_nonfinite_gradient_raises_on_every_rank_over_gloo() -> None:
    for way in ("flat", "late"):
        assert_conserved(on_processes(2, survives, TOPK, float("nan"), way))


def skips(spec: str) -> Any:
    run = scaled(spec, 64.0).train(0, 1, account=True)
    before, trained = run.state, run.weights
    assert (before["scale"], run.scaler.get_scale()) == (64.0, 128.0)
    hook = run.poison(float("inf"))
    run.step(2)
    hook.remove()
    assert run.scaler.get_scale() == 64.0, "the scaler did not see the infinity"
    assert torch.equal(run.weights, trained), "a rank did not skip"
    after = run.state
    for name, residual in kept(before).items():
        assert torch.equal(kept(after)[name], residual * (after["scale"] / before["scale"])), name
    run.train(3, 4, 5, 6, account=True)
    assert run.state["scale"] > 64.0
    return run.closed()


@pytest.mark.parametrize("spec", only(WITH_RESIDUAL, now=THROUGH_DDP))
def test_with_a_scaler_all_ranks_skip_and_the_residual_follows_the_scale(spec: str) -> None:
    accounts = on_threads(3, skips, spec)
    if spec in CONSERVING:
        assert_conserved(accounts)


def test_the_error_of_an_overflowing_sum_names_no_rank() -> None:
    def body() -> str:
        run = Run("ef(topk(1.0))", dtype=torch.float32)
        run.model.module[0].weight.register_hook(lambda g: torch.full_like(g, 3e38))
        error = raised_by(lambda: run.backward(0))
        assert isinstance(error, NonFiniteError), repr(error)
        return str(error)

    for message in on_threads(2, body):
        assert "step 1" in message
        assert not re.search(r"\brank [01]\b", message), message


@pytest.mark.parametrize("spec", ['ef(cast("fp16"))', 'ef(topk(1.0, values="fp16"))'])
def test_what_exceeds_the_range_of_float16_is_sent_in_the_next_step(spec: str) -> None:
    """Both ranks have a gradient of 1e5 in one step. float16 can send 65504 of it."""

    def body() -> list[float]:
        model = wrap(nn.Linear(4, 1, bias=False))
        torchcomp.register(model, spec)
        applied = []
        for scale in (1e5, 0.0):
            model.zero_grad()
            model(torch.full((1, 4), scale)).sum().backward()
            applied.append(model.module.weight.grad[0, 0].item())
        return applied

    for first, second in on_threads(2, body):
        assert first == 65504
        assert second == pytest.approx(1e5 - 65504, rel=1e-3)


def test_plain_mean_keeps_a_nan_as_ddp_does() -> None:
    def body() -> bool:
        run = Run("mean")
        run.poison(float("nan"))
        run.backward(0)
        return bool(run.model.module[4].weight.grad.isnan().any())

    assert all(on_threads(2, body))


def test_a_disabled_scaler_does_not_hide_a_nan() -> None:
    """No scaler would skip the step, so the optimizer would apply the NaN."""

    def body() -> None:
        run = Run(scaler=torch.amp.GradScaler("cpu", enabled=False))
        run.poison(float("nan"))
        run.backward(0)

    outcomes = on_threads(2, body, catch=True)
    assert [type(outcome) for outcome in outcomes] == [NonFiniteError] * 2


def test_a_nan_while_a_swap_flushes_the_residual_does_not_change_it() -> None:
    def body() -> Any:
        run = Run().train(0, account=True)
        run.handle.swap("mean")
        norm = residual_norm(run.handle)
        hook = run.poison(float("nan"))
        assert isinstance(raised_by(lambda: run.backward(1)), NonFiniteError)
        hook.remove()
        assert residual_norm(run.handle) == norm > 0
        run.train(2, account=True)
        assert residual_norm(run.handle) == 0
        return run.closed()

    assert_conserved(on_threads(3, body))


# --- Bytes ----------------------------------------------------------------------------------------


def counted(spec: str, world_size: int) -> None:
    """Compare the counters of a run with the plan, computed before from the DDP model."""
    model, steps = wrap(mlp(torch.float32)), 3
    plan = torchcomp.explain(spec, model=model, world_size=world_size, rank=dist.get_rank())
    handle = torchcomp.register(model, spec)
    assert handle.stats == torchcomp.Stats(*[0] * 12)
    for step in range(steps):
        loss_of(model(rows(step, torch.float32))).backward()
        stats = handle.stats
        assert stats.steps == stats.syncs == step + 1
        for name in ("bytes_sent", "bytes_received", "dense_bytes_sent"):
            assert getattr(stats, name) == getattr(plan, name)
            assert getattr(stats, f"total_{name}") == (step + 1) * getattr(plan, name)
    elements = sum(p.numel() for p in model.parameters())
    assert stats.dense_bytes_sent == 2 * (world_size - 1) * 4 * elements // world_size


# Elsewhere, the sizes of messages depend on the values, or (warmup) on the step.
FIXED = [spec for spec in METHODS if not re.search("sharded|exact|warmup", spec)]


@pytest.mark.parametrize("spec", FIXED)
def test_counted_bytes_equal_the_plan(spec: str) -> None:
    for world_size in (2, 3):
        on_threads(world_size, counted, spec, world_size)
