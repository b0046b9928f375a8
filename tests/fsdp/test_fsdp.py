"""FSDP2 with replicas: the compressed exchange between them, as in two levels of DDP."""

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

import torchcomp
from tests.fsdp.runs import (
    NEEDS_HOOK,
    Run,
    WithScale,
    gradients,
    mesh_of,
    shard,
    two_level_ddp,
    weights,
)
from tests.support.cases import only
from tests.support.models import THROUGH_DDP, loss_of, mlp, rows, wrap
from tests.support.outcomes import (
    assert_close,
    assert_replicas_equal,
    caught,
    messages_of,
    raised_by,
    reloaded,
    same,
    unsent,
)
from tests.support.ranks import on_processes
from torchcomp import SpecError
from torchcomp.ddp.arguments import Options

pytestmark = NEEDS_HOOK

SPECS = tuple(spec for spec in THROUGH_DDP if "model" not in spec)
NOW = ("mean", "ef(topk(0.1))", "powersgd(rank=1)")
MORE = (*NOW, "bidirectional(topk(0.1), topk(0.1))", 'ef(quantize("int8"))')
TOPK = "ef(topk(0.1))"
BIDIRECTIONAL = "bidirectional(topk(0.1), topk(0.1))"
STEPS = range(4)


def both(shape: tuple[int, int], specs: tuple[str, ...], dtype: torch.dtype) -> list[Any]:
    found = []
    for spec in specs:
        run = Run(shape, spec, dtype)
        groups = run.handle.averager.groups
        found.append((run.train(STEPS), two_level_ddp(shape[1], spec, dtype, groups, STEPS)))
    return found


CASES = [((2, 2), MORE), ((2, 3), NOW), ((3, 1), NOW)]
CASES += [(shape, SPECS) for shape in ((2, 2), (2, 3), (3, 1))]


@pytest.mark.parametrize("case", only(CASES, now=CASES[:3]))
def test_equals_two_levels_of_ddp(case: tuple[tuple[int, int], tuple[str, ...]]) -> None:
    shape, specs = case
    found = on_processes(shape[0] * shape[1], both, shape, specs, torch.float64)
    for of_spec in zip(*found, strict=True):
        assert_replicas_equal([sharded for sharded, _ in of_spec])
        for sharded, ddp in of_spec:
            # FSDP2 divides by 3 in two parts, and gloo adds three ranks in an order that depends
            # on the position within a bucket.
            assert shape != (2, 2) or torch.equal(sharded, ddp)
            assert_close(sharded, ddp)


@pytest.mark.parametrize("specs", only([NOW, SPECS], now=[NOW]))
def test_equals_two_levels_of_ddp_in_float32(specs: tuple[str, ...]) -> None:
    for of_spec in zip(*on_processes(4, both, (2, 2), specs, torch.float32), strict=True):
        assert_replicas_equal([sharded for sharded, _ in of_spec])
        for sharded, ddp in of_spec:
            assert_close(sharded, ddp, 1e-5)


def native(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights with `mean`, and those of FSDP2's own replicas."""
    model = shard(mlp(dtype), mesh_of(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in STEPS:
        optimizer.zero_grad()
        loss_of(model(rows(step, dtype))).backward()
        optimizer.step()
    return Run((2, 2), "mean", dtype).train(STEPS), weights(model)


def test_mean_is_what_fsdp2_does_with_a_mesh_of_two_dimensions() -> None:
    for ours, theirs in on_processes(4, native, torch.float64):
        assert_close(ours, theirs)


# --- Settings ---


def with_parameters_in_the_root(evaluated: bool) -> tuple[Tensor, Tensor]:
    mesh, model = mesh_of(2, 2), mlp(torch.float64)
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if evaluated:
        # FSDP2 leaves the root's own parameters gathered after it.
        with torch.no_grad():
            model(rows(0))
    torchcomp.register(model, "mean", replicate=mesh["replicate"], lr_inside=optimizer)
    for step in STEPS:
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()
    return weights(model), Run((2, 2), "mean").train(STEPS)


@pytest.mark.parametrize("evaluated", [False, True])
def test_parameters_in_the_root(evaluated: bool) -> None:
    for ours, expected in on_processes(4, with_parameters_in_the_root, evaluated):
        assert_close(ours, expected)


def accumulated(how: str) -> tuple[Tensor, Tensor, int]:
    """Two backward passes with one exchange: the gradients, the expected ones, and the steps."""
    run, plain = Run((2, 2), "mean"), shard(mlp(torch.float64), mesh_of(2, 2))
    switch = getattr(run.model, how)
    switch(False)
    run.backward(0)
    switch(True)
    run.backward(1)
    for step in (0, 1):
        loss_of(plain(rows(step))).backward()
    return gradients(run.model), gradients(plain), run.handle.stats.steps


@pytest.mark.parametrize("how", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_accumulation_exchanges_once(how: str) -> None:
    for ours, expected, steps in on_processes(4, accumulated, how):
        assert_close(ours, expected)
        assert steps == 1


def mixed(param: torch.dtype, reduce: torch.dtype) -> tuple[Tensor, str]:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    run = Run((2, 2), TOPK, torch.float32, sharding={"mp_policy": policy})
    run.train(STEPS)
    assert weights(run.model).isfinite().all()
    return weights(run.model), str(next(iter(run.handle.averager.parameters.values())).dtype)


@pytest.mark.parametrize(
    ("param", "reduce"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        # That of the parameters, or since torch 2.15 that of the optimizer's parameters.
        (torch.bfloat16, None),
    ],
)
def test_mixed_precision_exchanges_in_the_reduce_dtype(
    param: torch.dtype, reduce: torch.dtype | None
) -> None:
    found = on_processes(4, mixed, param, reduce)
    assert_replicas_equal([weight for weight, _ in found])
    if reduce is None:
        reduce = param if torch.__version__ < (2, 15) else torch.float32
    assert {dtype for _, dtype in found} == {str(reduce)}


class Recomputed(nn.Sequential):
    """Layers whose activations are computed again in the backward pass, all but the last."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        *first, last = self
        x = x.requires_grad_()  # a reentrant checkpoint needs it
        for layer in first:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return last(x)


class Reentrant(Recomputed):
    """The same, with a backward pass of its own for each layer."""

    reentrant = True


def recomputed() -> list[tuple[Tensor, int]]:
    models = (mlp, lambda dtype: Recomputed(*mlp(dtype)), lambda dtype: Reentrant(*mlp(dtype)))
    runs = [Run((2, 2), TOPK, build=build) for build in models]
    return [(run.train(STEPS), run.handle.stats.steps) for run in runs]


def test_activation_checkpointing() -> None:
    for plain, *others in on_processes(4, recomputed):
        for weight, steps in others:
            assert torch.equal(weight, plain[0])
            assert steps == len(STEPS)


def swapped() -> Tensor:
    run = Run((2, 2), TOPK)
    run.train([0, 1])
    with pytest.raises(SpecError, match="model"):
        run.handle.swap('bidirectional(topk(0.1, scope="model"), topk(0.1))')
    run.handle.swap("powersgd(rank=1)")
    run.train([2, 3])
    assert str(run.handle.method).startswith("powersgd")
    return weights(run.model)


def test_swap() -> None:
    assert_replicas_equal(on_processes(4, swapped))


def listed() -> tuple[Tensor, Tensor]:
    """A run whose last unit has two modules, and one that takes over in the middle."""

    def build(dtype: torch.dtype) -> nn.Module:
        module = mlp(dtype)
        fully_shard([module[0], module[2]], mesh=mesh_of(2, 2)["shard"])
        return module

    whole, again = (Run((2, 2), TOPK, build=build) for _ in range(2))
    whole.train([0, 1])
    again.model.load_state_dict(whole.model.state_dict())
    again.handle.load_gathered(whole.handle.gather_state_dict(dst=None))
    return whole.train([2, 3]), again.train([2, 3])


def test_a_unit_of_two_modules_resumes() -> None:
    for whole, resumed_run in on_processes(4, listed):
        assert torch.equal(whole, resumed_run)


def _flushed(run: Any, optimizer: Any, backward: Any) -> list[bool]:
    """Whether each step after a swap still sends the residual, while the scale does not train."""
    backward(0)
    run.handle.swap("mean")
    found = []
    for step in range(1, 4):
        optimizer.param_groups[1]["lr"] = 0.0 if step < 3 else 0.05
        backward(step)
        found.append(bool(run.handle.state_dict()["flushing"]))
    return found


def flushes() -> tuple[list[bool], list[bool], Tensor]:
    """The same on two levels of DDP and with FSDP2: a residual is left on one shard only."""
    mesh, found = mesh_of(2, 2), []
    for sharded in (False, True):
        model: Any = WithScale()
        model = fully_shard(model, mesh=mesh["shard"]) if sharded else wrap(model)
        whole = model if sharded else model.module
        scale = [whole.scale]
        others = [each for each in model.parameters() if each is not whole.scale]
        optimizer = torch.optim.SGD([{"params": others}, {"params": scale}], lr=0.05)
        where: dict[str, Any] = {"replicate": mesh["replicate"]} if sharded else {"nodes": 2}
        handle = torchcomp.register(model, TOPK, lr_inside=optimizer, **where)
        if not sharded:
            handle.averager.regroup([tuple(handle.averager.parameters)])

        def backward(step: int, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            loss_of(model(rows(step))).backward()
            optimizer.step()

        found.append(_flushed(SimpleNamespace(handle=handle), optimizer, backward))
    return found[0], found[1], weights(model)


def test_a_flush_ends_at_the_same_step_on_all_shards() -> None:
    found = on_processes(4, flushes)
    for ddp, sharded, _ in found:
        assert ddp == found[0][0] == [True, True, False]
        assert sharded == found[0][1]
    assert_replicas_equal([weight for *_, weight in found])


def closed_then_registered() -> tuple[str, Tensor]:
    """Train after a backward pass on a closed handle, and a new register."""
    run = Run((2, 2), TOPK)
    run.train([0])
    run.handle.close()
    error = raised_by(lambda: run.step(1))
    run.handle = torchcomp.register(run.model, TOPK, replicate=run.mesh["replicate"])
    return type(error).__name__, run.train([2, 3])


def test_a_closed_handle_raises_and_the_model_can_be_registered_again() -> None:
    found = on_processes(4, closed_then_registered)
    assert {name for name, _ in found} == {"RuntimeError"}
    assert_replicas_equal([weight for _, weight in found])


# --- Errors and checkpoints ---


def poisoned(check: str) -> tuple[str, str, bool, Tensor]:
    run = Run((2, 2), TOPK, options={"check": check})
    run.step(0)
    before = run.handle.state_dict()

    def fail() -> None:
        bad = rows(1) * (float("nan") if dist.get_rank() == 3 else 1.0)
        loss_of(run.model(bad)).backward()
        run.backward(2)

    error = raised_by(fail)
    unchanged = same(before["slots"], run.handle.state_dict()["slots"])
    run.optimizer.zero_grad()
    run.step(3)
    return type(error).__name__, str(error), unchanged, weights(run.model)


@pytest.mark.parametrize("check", ["now", "late"])
def test_a_nan_raises_on_all_ranks_and_names_the_replica(check: str) -> None:
    found = on_processes(4, poisoned, check)
    for name, message, unchanged, _ in found:
        assert name == "NonFiniteError"
        # Each shard of the second replica got the NaN of rank 3.
        assert "rank 2" in message
        assert "rank 3" in message
        assert "rank 1" not in message
        assert unchanged
    assert_replicas_equal([weight for *_, weight in found])


def poisoned_at_the_end() -> tuple[str, bool, bool]:
    run = Run((2, 2), TOPK, options={"check": "late"})
    run.step(0)
    before = run.handle.state_dict()
    loss_of(run.model(rows(1) * (float("nan") if dist.get_rank() == 3 else 1.0))).backward()
    error = raised_by(run.handle.close)
    after = run.handle.state_dict()
    return type(error).__name__, run.handle.closed, same(before["slots"], after["slots"])


def test_close_raises_the_nan_of_the_last_step() -> None:
    for name, closed, unchanged in on_processes(4, poisoned_at_the_end):
        assert (name, closed, unchanged) == ("NonFiniteError", True, True)


def auto(late: bool) -> list[bool]:
    with mock.patch.object(Options, "late", return_value=late) as asked:
        run = Run((2, 1), TOPK)
    run.backward(0)
    (device,) = asked.call_args.args
    return [device.type == "cpu", run.handle.averager.undecided]


@pytest.mark.parametrize("late", [False, True])
def test_a_step_is_late_where_one_of_ddp_would_be(late: bool) -> None:
    assert on_processes(2, auto, late) == [[True, late]] * 2


def resumed(spec: str) -> tuple[Tensor, Tensor, bool]:
    whole, first = Run((2, 2), spec), Run((2, 2), spec)
    expected = whole.train(range(6))
    first.train(range(3))
    again = Run((2, 2), spec)
    again.model.load_state_dict(first.model.state_dict())
    again.handle.load_state_dict(reloaded(first.handle.state_dict()))
    ours = again.train(range(3, 6))
    states = [messages_of(each.handle.state_dict()) for each in (whole, again)]
    return ours, expected, same(*states)


@pytest.mark.parametrize("spec", only(SPECS, now=NOW))
def test_resumes_bit_for_bit(spec: str) -> None:
    for ours, expected, equal in on_processes(4, resumed, spec):
        assert torch.equal(ours, expected)
        assert equal


def saved(shape: tuple[int, int], spec: str) -> Any:
    run = Run(shape, spec)
    run.train(range(3))
    return run.handle.gather_state_dict(dst=None)


def loaded(shape: tuple[int, int], spec: str, state: Any) -> Any:
    run = Run(shape, spec)
    run.handle.load_gathered(state)
    state_then = run.handle.gather_state_dict(dst=None)
    run.train(range(2))
    return state_then, weights(run.model)


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    """The state of 2 replicas with 2 shards each, by method."""
    return on_processes(4, _all_saved, (TOPK, BIDIRECTIONAL))[0]


def _all_saved(specs: tuple[str, ...]) -> dict[str, Any]:
    return {spec: saved((2, 2), spec) for spec in specs}


@pytest.mark.parametrize("spec", [TOPK, BIDIRECTIONAL])
@pytest.mark.parametrize("after", only([(2, 3), (3, 2), (4, 1), (1, 4)], now=[(2, 3), (4, 1)]))
def test_other_replicas_and_shards_lose_nothing(
    spec: str, after: tuple[int, int], states: dict[str, Any]
) -> None:
    found = on_processes(after[0] * after[1], loaded, after, spec, states[spec])
    assert unsent(states[spec]["states"]).any()
    assert_close(unsent(found[0][0]["states"]), unsent(states[spec]["states"]))
    assert_replicas_equal([weight for _, weight in found])


def _logged() -> tuple[list[str], int]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("torchcomp").addHandler(handler)
    logging.getLogger("torchcomp").setLevel(logging.INFO)
    run = Run((2, 2), "topk(0.1)")
    run.backward(0)
    return [each.levelname + each.getMessage() for each in records], run.handle.stats.bytes_sent


def test_rank_0_logs_the_planned_bytes_and_what_the_method_loses() -> None:
    (said, nbytes), *others = on_processes(4, _logged)
    assert [each for each in said if each.startswith("INFO") and f"{nbytes:,}" in each]
    assert [each for each in said if each.startswith("WARNING") and "ef(topk(0.1))" in each]
    assert not any(said for said, _ in others)


# --- Bad input ---


def refused(case: str) -> tuple[str, str]:
    mesh, model = mesh_of(2, 2), mlp(torch.float64)
    replicate: Any = mesh["replicate"]
    if case == "native mesh":
        shard(model, mesh)
    elif case == "offload":
        shard(model, mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    elif case == "half a model":
        fully_shard(model[0], mesh=mesh["shard"])
    elif case == "half":
        fully_shard(model, mesh=mesh["shard"], ignored_params=set(model[2].parameters()))
    else:
        shard(model, mesh["shard"])
    if case == "same dimension":
        replicate = mesh["shard"]
    elif case == "two dimensions":
        replicate = mesh
    elif case == "no mesh":
        replicate = "replicate"
    elif case == "old torch":
        hook = FSDPModule.set_all_reduce_hook
        del FSDPModule.set_all_reduce_hook
    if case == "a hook":
        model[0].set_all_reduce_hook(lambda flat: None)
    first = case == "twice" and torchcomp.register(model, "mean", replicate=replicate)
    options: dict[str, Any] = {"nodes": {"nodes": 2}, "inside": {"inside": "bf16"}}.get(case, {})
    specs = {"scope": "bidirectional(topk(0.1, scope='model'), topk(0.1))", "auto": "auto"}
    spec = specs.get(case, TOPK)
    if case == "disagree" and dist.get_rank() == 2:
        spec = "mean"
    if case == "no replicate":
        error = raised_by(lambda: torchcomp.register(model, spec))
    else:
        error = raised_by(lambda: torchcomp.register(model, spec, replicate=replicate, **options))
    if case == "old torch":
        FSDPModule.set_all_reduce_hook = hook
    if first:
        first.close()
    if case not in ("native mesh", "half", "half a model", "a hook", "offload"):
        good = torchcomp.register(model, "mean", replicate=mesh["replicate"])
        loss_of(model(rows(0))).backward()
        assert good.stats.steps == 1
    return type(error).__name__, str(error)


REFUSED = {
    "native mesh": ("UnsupportedModelError", 'mesh["shard"]'),
    "half": ("UnsupportedModelError", "'2.weight'"),
    "same dimension": ("SpecError", "replicate"),
    "two dimensions": ("SpecError", "replicate"),
    "no mesh": ("SpecError", "replicate"),
    "nodes": ("SpecError", "nodes"),
    "inside": ("SpecError", "inside"),
    "old torch": ("UnsupportedModelError", "2.7"),
    "scope": ("SpecError", "scope"),
    "auto": ("SpecError", "doctor"),
    "disagree": ("RankMismatchError", "mean"),
    "half a model": ("UnsupportedModelError", "fully_shard"),
    "a hook": ("UnsupportedModelError", "set_all_reduce_hook"),
    "offload": ("UnsupportedModelError", "CPUOffloadPolicy"),
    "twice": ("UnsupportedModelError", "handle.swap"),
    "no replicate": ("UnsupportedModelError", "replicate="),
}


def _all_refused() -> dict[str, tuple[str, str]]:
    return {case: refused(case) for case in REFUSED}


@pytest.fixture(scope="module")
def errors() -> list[dict[str, tuple[str, str]]]:
    return on_processes(4, _all_refused)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_on_all_ranks_and_changes_nothing(case: str, errors: Any) -> None:
    name, word = REFUSED[case]
    for of_rank in errors:
        kind, message = of_rank[case]
        assert kind == name
        assert word in message


def _sharded_later() -> list[str]:
    model, mesh = wrap(mlp(torch.float64)), mesh_of(2, 2)
    handle = torchcomp.register(model, TOPK)
    shard(model.module, mesh["shard"])
    kinds = [type(raised_by(lambda: model(rows(0)))).__name__ for _ in range(2)]
    return [*kinds, str(handle.stats.steps)]


def test_sharding_a_registered_ddp_model_is_refused() -> None:
    for found in on_processes(4, _sharded_later):
        assert found == ["UnsupportedModelError", "UnsupportedModelError", "0"]


def test_replicas_must_start_with_the_same_parameters() -> None:
    kinds = [kind for kind, _ in on_processes(4, _other_start)]
    assert set(kinds) == {"RankMismatchError"}


def _other_start() -> tuple[str, str]:
    mesh, model = mesh_of(2, 2), shard(mlp(torch.float64), mesh_of(2, 2)["shard"])
    if dist.get_rank() == 2:
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2.0)
    error = raised_by(lambda: torchcomp.register(model, TOPK, replicate=mesh["replicate"]))
    return type(error).__name__, str(error)


# --- torch.compile and a GradScaler ---


def compiled() -> tuple[Tensor, Tensor]:
    run, plain = Run((2, 2), TOPK), Run((2, 2), TOPK)
    run.model.compile(backend="eager")
    return run.train(STEPS), plain.train(STEPS)


def test_a_compiled_model() -> None:
    for ours, expected in on_processes(4, compiled):
        assert_close(ours, expected)


def scaled() -> tuple[Tensor, Tensor, Tensor, int]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    run = Run((2, 2), TOPK, torch.float32, options={"scaler": scaler})
    plain = Run((2, 2), TOPK, torch.float32)
    for step in STEPS:
        run.optimizer.zero_grad()
        scaler.scale(loss_of(run.model(rows(step, torch.float32)))).backward()
        scaler.step(run.optimizer)
        scaler.update()
    ours, expected = weights(run.model), plain.train(STEPS)
    # A step that overflows on one rank is skipped on all.
    before = run.handle.state_dict()["slots"]
    run.optimizer.zero_grad()
    bad = rows(9, torch.float32) * (float("inf") if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss_of(run.model(bad))).backward()
    scaler.step(run.optimizer)
    scaler.update()
    assert same(before, run.handle.state_dict()["slots"])
    return ours, expected, weights(run.model), run.handle.stats.steps


def test_a_scaler_skips_a_step_on_all_ranks() -> None:
    for ours, expected, after, steps in on_processes(4, scaled):
        assert_close(ours, expected, 1e-5)
        assert torch.equal(ours, after)
        assert steps == len(STEPS) + 1


class Stop(BaseException):
    """As KeyboardInterrupt, no Exception."""


class Encoder(nn.Module):
    """A model whose output is no tensor, and which has a method that is not its forward pass."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = mlp(dtype)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last=self.layers(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.forward(x).last


def build(kind: str) -> Run:
    if kind == "plain":
        return Run((2, 2), TOPK)
    run = Run((2, 2), TOPK, build=Encoder)
    register_fsdp_forward_method(run.model, "encode")
    return run


def output(run: Run, kind: str, step: int) -> Tensor:
    if kind == "plain":
        return run.model(rows(step))
    return run.model.encode(rows(step)) if kind == "method" else run.model(rows(step)).last


def train(run: Run, kind: str, steps: range) -> Tensor:
    for step in steps:
        run.optimizer.zero_grad()
        loss_of(output(run, kind, step)).backward()
        run.optimizer.step()
    return weights(run.model)


def interrupted(kind: str, layer: int | None) -> Any:
    """Interrupt a backward pass after three steps, then go on as FSDP2 documents it.

    Args:
        kind: how the model computes its output.
        layer: whose gradients are the last ones. With None, there are none at all.

    Returns:
        Whether the state is that before the step, the error of the next forward pass, and the
        weights after two more steps, without and with the interruption.
    """
    run = build(kind)
    train(run, kind, range(3))
    before = run.handle.state_dict()
    layers = run.model if kind == "plain" else run.model.layers
    hook = None if layer is None else layers[layer].register_full_backward_hook(stop)
    found = output(run, kind, 3)
    if layer is None:
        found.register_hook(stop)
    with pytest.raises(Stop):
        loss_of(found).backward()
    if hook is not None:
        hook.remove()
    kept = same(messages_of(run.handle.state_dict()), messages_of(before))
    error = caught(lambda: output(run, kind, 3))
    with torch.no_grad():
        output(run, kind, 3)  # an evaluation is possible
    if hasattr(run.model, "reset_iter_state"):  # since torch 2.13
        # The gradients of the layers that are gathered; otherwise, they would count again.
        run.model.zero_grad()
        run.model.reset_iter_state()
        return kept, error, train(build(kind), kind, range(5)), train(run, kind, range(3, 5))
    return kept, error, None, None


def stop(*arguments: object) -> None:
    raise Stop


INTERRUPTED = [(kind, layer) for kind in ("plain", "method", "object") for layer in (0, 6, None)]


@pytest.mark.parametrize("case", only(INTERRUPTED, now=[("plain", 6), ("method", None)]), ids=str)
def test_a_pass_that_raised_keeps_the_state_and_the_next_forward_pass_raises(
    case: tuple[str, int | None],
) -> None:
    for kept, error, whole, stopped in on_processes(4, interrupted, *case):
        assert kept
        assert type(error) is RuntimeError
        assert same(stopped, whole)


def thrown_away(passes: int, to_none: bool, in_a_row: bool, skip: bool) -> Any:
    """Train with backward passes whose gradients are cleared before the optimizer steps."""
    run = Run((2, 2), TOPK, torch.float64)
    for step in STEPS:
        run.step(10 * step)
        run.optimizer.zero_grad(set_to_none=to_none)
        for number in () if skip else range(passes):
            run.backward(10 * step + 1 + number)
            if in_a_row:
                run.optimizer.zero_grad(set_to_none=to_none)
    run.step(100)
    return weights(run.model), run.handle.state_dict()["slots"]


# The passes of a turn are cleared one by one, or together after the last one.
@pytest.mark.parametrize(
    ("passes", "to_none", "in_a_row"), [(1, True, True), (2, False, True), (2, True, False)]
)
def test_a_pass_that_is_thrown_away_is_as_none(passes: int, to_none: bool, in_a_row: bool) -> None:
    ours, none = (
        on_processes(4, thrown_away, passes, to_none, in_a_row, skip) for skip in (False, True)
    )
    for one, other in zip(ours, none, strict=True):
        assert same(one, other)
