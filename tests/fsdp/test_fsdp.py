"""FSDP2 with replicas: the compressed exchange between them, as in two levels of DDP."""

from types import SimpleNamespace
from typing import Any

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
from tests.fsdp.runs import NEEDS_HOOK, Run, gradients, mesh_of, shard, two_level_ddp, weights
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
)
from tests.support.ranks import on_processes
from torchcomp import NonFiniteError, RankMismatchError, SpecError, UnsupportedModelError

pytestmark = NEEDS_HOOK

SPECS = tuple(spec for spec in THROUGH_DDP if "model" not in spec)
NOW = ("mean", "ef(topk(0.1))", "powersgd(rank=1)")
TOPK = "ef(topk(0.1))"
MORE = (*NOW, "bidirectional(topk(0.1), topk(0.1))", 'ef(quantize("int8"))')
STEPS = range(4)


# --- The same as two levels of DDP ----------------------------------------------------------------


def both(shape: tuple[int, int], specs: tuple[str, ...], dtype: torch.dtype) -> list[Any]:
    found = []
    for spec in specs:
        run = Run(shape, spec, dtype)
        groups = run.handle.averager.groups
        found.append((run.train(STEPS), two_level_ddp(shape[1], spec, dtype, groups, STEPS)))
    return found


CASES = [((2, 2), MORE, torch.float64), ((2, 2), NOW, torch.float32)]
CASES += [(shape, NOW, torch.float64) for shape in ((2, 3), (3, 1))]
FULL = [(shape, SPECS, torch.float64) for shape in ((2, 2), (2, 3), (3, 1))]


@pytest.mark.parametrize("case", only([*CASES, *FULL], now=CASES))
def test_equals_two_levels_of_ddp(case: tuple[Any, ...]) -> None:
    shape, _, dtype = case
    found = on_processes(shape[0] * shape[1], both, *case)
    for of_spec in zip(*found, strict=True):
        assert_replicas_equal([sharded for sharded, _ in of_spec])
        for sharded, ddp in of_spec:
            # FSDP2 divides by 3 in two parts, and gloo adds three ranks in an order that depends
            # on the position within a bucket.
            assert dtype == torch.float32 or shape != (2, 2) or torch.equal(sharded, ddp)
            assert_close(sharded, ddp, 1e-5 if dtype == torch.float32 else 1e-12)


def native() -> None:
    """The weights with `mean` are those of FSDP2's own replicas."""
    model = shard(mlp(torch.float64), mesh_of(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in STEPS:
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()
    assert_close(Run((2, 2), "mean").train(STEPS), weights(model))


# --- Settings; each function checks what it sees, on all ranks ------------------------------------


def with_parameters_in_the_root() -> None:
    expected = Run((2, 2), "mean").train(STEPS)
    for evaluated in (False, True):
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
        assert_close(weights(model), expected)


def accumulated() -> None:
    """Two backward passes with one exchange."""
    for how in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        run, plain = Run((2, 2), "mean"), shard(mlp(torch.float64), mesh_of(2, 2))
        switch = getattr(run.model, how)
        switch(False)
        run.backward(0)
        switch(True)
        run.backward(1)
        for step in (0, 1):
            loss_of(plain(rows(step))).backward()
        assert_close(gradients(run.model), gradients(plain))
        assert run.handle.stats.steps == 1


def mixed_precision() -> None:
    """The exchange is in the reduce dtype."""
    for param, reduce in [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, None),
    ]:
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        run = Run((2, 2), TOPK, torch.float32, sharding={"mp_policy": policy})
        assert run.train(STEPS).isfinite().all()
        assert_on_all(run)
        # That of the parameters, or since torch 2.15 that of the optimizer's parameters.
        wanted = reduce or (param if torch.__version__ < (2, 15) else torch.float32)
        assert {p.dtype for p in run.handle.averager.parameters.values()} == {wanted}


def assert_on_all(run: Run) -> None:
    """Require equal weights on all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, weights(run.model))
    assert_replicas_equal(every)


def unit_of_the_residual() -> None:
    """FSDP2 divides sums of 64-bit gradients in two parts, one of them after the hook."""
    runs = [Run((1, 4), TOPK, dtype) for dtype in (torch.float64, torch.float32)]
    for run in runs:
        run.backward(0)
    double, single = (run.handle.residual_norms() for run in runs)
    assert any(double.values())
    assert double == pytest.approx(single, rel=1e-3)


class Recomputed(nn.Sequential):
    """Layers whose activations are computed again in the backward pass, all but the last."""

    reentrant = False  # with a backward pass of its own for each layer

    def forward(self, x: Tensor) -> Tensor:
        *first, last = self
        x = x.requires_grad_()  # a reentrant checkpoint needs it
        for layer in first:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return last(x)


def recomputed() -> None:
    plain = Run((2, 2), TOPK).train(STEPS)
    for reentrant in (False, True):
        run = Run((2, 2), TOPK, build=lambda dtype: Recomputed(*mlp(dtype)))
        run.model.reentrant = reentrant
        assert torch.equal(run.train(STEPS), plain)
        assert run.handle.stats.steps == len(STEPS)


def swapped() -> None:
    run = Run((2, 2), TOPK)
    run.train([0, 1])
    with pytest.raises(SpecError, match="model"):
        run.handle.swap('bidirectional(topk(0.1, scope="model"), topk(0.1))')
    run.handle.swap("powersgd(rank=1)")
    run.train([2, 3])
    assert str(run.handle.method).startswith("powersgd")
    assert_on_all(run)


def two_modules_in_a_unit() -> None:
    def build(dtype: torch.dtype) -> nn.Module:
        module = mlp(dtype)
        fully_shard([module[0], module[2]], mesh=mesh_of(2, 2)["shard"])
        return module

    whole, again = (Run((2, 2), TOPK, build=build) for _ in range(2))
    whole.train([0, 1])
    again.model.load_state_dict(whole.model.state_dict())
    again.handle.load_gathered(whole.handle.gather_state_dict(dst=None))
    assert torch.equal(whole.train([2, 3]), again.train([2, 3]))


class WithScale(nn.Module):
    """A model with a parameter of one element, on the first shard only, that is sent last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = mlp(), nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + 1e-6 * self.scale


def flushed() -> None:
    """A residual that is left on one shard only ends at the same step on all."""
    mesh, found = mesh_of(2, 2), []
    model: Any = fully_shard(WithScale(), mesh=mesh["shard"])
    others = [each for each in model.parameters() if each is not model.scale]
    optimizer = torch.optim.SGD([{"params": others}, {"params": [model.scale]}], lr=0.05)
    where = {"replicate": mesh["replicate"], "lr_inside": optimizer}
    handle = torchcomp.register(model, TOPK, **where)
    for step in range(4):
        # While its learning rate is 0, the scale does not send its residual.
        optimizer.param_groups[1]["lr"] = 0.0 if step in (1, 2) else 0.05
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()
        found.append(bool(handle.state_dict()["flushing"]))
        if step == 0:
            handle.swap("mean")
    assert found[1:] == [True, True, False]


def closed_then_registered() -> None:
    run = Run((2, 2), TOPK)
    run.train([0])
    run.handle.close()
    assert type(raised_by(lambda: run.step(1))) is RuntimeError
    run.handle = torchcomp.register(run.model, TOPK, replicate=run.mesh["replicate"])
    run.train([2, 3])
    assert_on_all(run)


def compiled() -> None:
    run, plain = Run((2, 2), TOPK), Run((2, 2), TOPK)
    run.model.compile(backend="eager")
    assert_close(run.train(STEPS), plain.train(STEPS))


def scaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    run = Run((2, 2), TOPK, torch.float32, options={"scaler": scaler})

    def step(number: int, times: float = 1.0) -> None:
        run.optimizer.zero_grad()
        loss = loss_of(run.model(rows(number, torch.float32) * times))
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()

    for number in STEPS:
        step(number)
    expected = Run((2, 2), TOPK, torch.float32).train(STEPS)
    assert_close(weights(run.model), expected, 1e-5)
    # A step that overflows on one rank is skipped on all.
    before, trained = run.handle.state_dict()["slots"], weights(run.model)
    step(9, float("inf") if dist.get_rank() == 1 else 1.0)
    assert same(before, run.handle.state_dict()["slots"])
    assert torch.equal(trained, weights(run.model))
    assert run.handle.stats.steps == len(STEPS) + 1


SETTINGS = (
    *(native, with_parameters_in_the_root, accumulated, mixed_precision, unit_of_the_residual),
    *(recomputed, swapped, two_modules_in_a_unit, flushed, closed_then_registered),
    *(compiled, scaled),
)


@pytest.mark.parametrize("check", SETTINGS, ids=lambda check: check.__name__)
def test_settings(check: Any) -> None:
    on_processes(4, check)


# --- NaN and resume -------------------------------------------------------------------------------


def poisoned(check: str, closes: bool) -> str:
    run = Run((2, 2), TOPK, options={"check": check})
    run.step(0)
    before = run.handle.state_dict()["slots"]

    def fail() -> None:
        run.backward(1, float("nan") if dist.get_rank() == 3 else 1.0)
        run.handle.close() if closes else run.backward(2)

    error = raised_by(fail)
    assert type(error) is NonFiniteError
    assert same(before, run.handle.state_dict()["slots"])
    assert run.handle.closed == closes
    if not closes:
        run.step(3)
        assert_on_all(run)
    return str(error)


@pytest.mark.parametrize(("check", "closes"), [("now", False), ("late", False), ("late", True)])
def test_a_nan_raises_on_all_ranks_and_names_the_replica(check: str, closes: bool) -> None:
    for message in on_processes(4, poisoned, check, closes):
        # Each shard of the second replica got the NaN of rank 3.
        assert "rank 2" in message
        assert "rank 3" in message
        assert "rank 1" not in message


def resumed(spec: str) -> None:
    whole, again = Run((2, 2), spec), Run((2, 2), spec)
    whole.train(range(3))
    again.model.load_state_dict(whole.model.state_dict())
    again.handle.load_state_dict(reloaded(whole.handle.state_dict()))
    assert torch.equal(whole.train(range(3, 6)), again.train(range(3, 6)))
    assert same(*[messages_of(each.handle.state_dict()) for each in (whole, again)])


@pytest.mark.parametrize("spec", only(SPECS, now=NOW))
def test_resumes_bit_for_bit(spec: str) -> None:
    on_processes(4, resumed, spec)


# --- Bad input ------------------------------------------------------------------------------------


def whole(**options: Any) -> Any:
    return lambda mesh: shard(mlp(), mesh["shard"], **options)


def half(mesh: Any) -> nn.Module:
    model = mlp()
    return fully_shard(model, mesh=mesh["shard"], ignored_params=set(model[2].parameters()))


def hooked(mesh: Any) -> nn.Module:
    model = whole()(mesh)
    model[0].set_all_reduce_hook(lambda flat: None)
    return model


def registered(mesh: Any) -> nn.Module:
    model = whole()(mesh)
    torchcomp.register(model, "mean", replicate=mesh["replicate"])
    return model


def other_start(mesh: Any) -> nn.Module:
    model = whole()(mesh)
    if dist.get_rank() == 2:
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2.0)
    return model


OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
SCOPE = 'bidirectional(topk(0.1, scope="model"), topk(0.1))'
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    # How the model is sharded, other arguments of register, and the error.
    "native mesh": (lambda m: shard(mlp(), m), {}, UnsupportedModelError, 'mesh["shard"]'),
    "half": (half, {}, UnsupportedModelError, "'2.weight'"),
    "a hook": (hooked, {}, UnsupportedModelError, "set_all_reduce_hook"),
    "offload": (whole(**OFFLOAD), {}, UnsupportedModelError, "CPUOffloadPolicy"),
    "twice": (registered, {}, UnsupportedModelError, "handle.swap"),
    "other start": (other_start, {}, RankMismatchError, "parameters"),
    "same dimension": (whole(), {"replicate": "shard"}, SpecError, "replicate"),
    "two dimensions": (whole(), {"replicate": "both"}, SpecError, "replicate"),
    "no mesh": (whole(), {"replicate": "none"}, SpecError, "replicate"),
    "no replicate": (whole(), {"replicate": "left out"}, UnsupportedModelError, "replicate="),
    "nodes": (whole(), {"nodes": 2}, SpecError, "nodes"),
    "inside": (whole(), {"inside": "bf16"}, SpecError, "inside"),
    "scope": (whole(), {"spec": SCOPE}, SpecError, "scope"),
    "auto": (whole(), {"spec": "auto"}, SpecError, "doctor"),
    "disagree": (whole(), {"spec": {2: "mean"}}, RankMismatchError, "mean"),
    "old torch": (whole(), {}, UnsupportedModelError, "2.7"),
}


def all_refused() -> None:
    mesh = mesh_of(2, 2)
    meshes = {"shard": mesh["shard"], "both": mesh, "none": "replicate", "left out": None}
    for case, (build, given, kind, word) in REFUSED.items():
        model, options = build(mesh), {"spec": TOPK, "replicate": mesh["replicate"], **given}
        if isinstance(options["spec"], dict):
            options["spec"] = options["spec"].get(dist.get_rank(), TOPK)
        if isinstance(options["replicate"], str):
            options["replicate"] = meshes[options["replicate"]]
        hook = FSDPModule.set_all_reduce_hook
        if case == "old torch":
            del FSDPModule.set_all_reduce_hook
        error = raised_by(lambda model=model, options=options: torchcomp.register(model, **options))
        FSDPModule.set_all_reduce_hook = hook
        assert type(error) is kind, (case, error)
        assert word in str(error), (case, error)
        if build.__qualname__ == whole().__qualname__ and case != "offload":
            # Nothing has changed: the same model can be registered.
            good = torchcomp.register(model, "mean", replicate=mesh["replicate"])
            loss_of(model(rows(0))).backward()
            assert good.stats.steps == 1


def test_bad_input_is_refused_on_all_ranks_and_changes_nothing() -> None:
    on_processes(4, all_refused)


def sharded_later() -> None:
    model, mesh = wrap(mlp(torch.float64)), mesh_of(2, 2)
    handle = torchcomp.register(model, TOPK)
    shard(model.module, mesh["shard"])
    for _ in range(2):
        assert type(raised_by(lambda: model(rows(0)))) is UnsupportedModelError
    assert handle.stats.steps == 0


def test_sharding_a_registered_ddp_model_is_refused() -> None:
    on_processes(4, sharded_later)


# --- Passes that raise, or are thrown away --------------------------------------------------------


class Encoder(nn.Module):
    """A model whose output is no tensor, and which has a method that is not its forward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = mlp(dtype)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last=self.layers(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.forward(x).last


COMPUTES: dict[str, Any] = {
    "method": lambda model, x: model.encode(x),
    "object": lambda model, x: model(x).last,
}


def interrupted(kind: str, layer: int | None) -> None:
    """Interrupt a backward pass after three steps, then go on as FSDP2 documents it.

    `layer` has the last gradients that are computed; with None, there are none at all.
    """
    compute = COMPUTES[kind]

    def build() -> Run:
        run = Run((2, 2), TOPK, build=Encoder)
        register_fsdp_forward_method(run.model, "encode")
        return run

    def train(run: Run, steps: range) -> Tensor:
        for step in steps:
            run.optimizer.zero_grad()
            loss_of(compute(run.model, rows(step))).backward()
            run.optimizer.step()
        return weights(run.model)

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    run = build()
    train(run, range(3))
    before = messages_of(run.handle.state_dict())
    hook = None if layer is None else run.model.layers[layer].register_full_backward_hook(stop)
    found = compute(run.model, rows(3))
    hook = hook or found.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss_of(found).backward()
    hook.remove()
    assert same(messages_of(run.handle.state_dict()), before)
    assert type(caught(lambda: compute(run.model, rows(3)))) is RuntimeError
    with torch.no_grad():
        compute(run.model, rows(3))  # an evaluation is possible
    if hasattr(run.model, "reset_iter_state"):  # since torch 2.13
        # The gradients of the layers that are gathered; otherwise, they would count again.
        run.model.zero_grad()
        run.model.reset_iter_state()
        assert same(train(build(), range(5)), train(run, range(3, 5)))


INTERRUPTED = [(kind, layer) for kind in COMPUTES for layer in (0, 6, None)]


@pytest.mark.parametrize("case", only(INTERRUPTED, now=[("object", 6), ("method", None)]), ids=str)
def test_a_pass_that_raised_keeps_the_state_and_the_next_forward_pass_raises(
    case: tuple[str, int | None],
) -> None:
    on_processes(4, interrupted, *case)


def thrown_away(passes: int, to_none: bool, in_a_row: bool) -> None:
    """Passes whose gradients are cleared before the optimizer steps are as none."""
    found = []
    for skip in (False, True):
        run = Run((2, 2), TOPK)
        for step in STEPS:
            run.step(10 * step)
            run.optimizer.zero_grad(set_to_none=to_none)
            for number in () if skip else range(passes):
                run.backward(10 * step + 1 + number)
                if in_a_row:
                    run.optimizer.zero_grad(set_to_none=to_none)
        run.step(100)
        found.append([weights(run.model), run.handle.state_dict()["slots"]])
    assert same(*found)


# The passes of a turn are cleared one by one, or together after the last one.
@pytest.mark.parametrize(
    ("passes", "to_none", "in_a_row"), [(1, True, True), (2, False, True), (2, True, False)]
)
def test_a_pass_that_is_thrown_away_is_as_none(passes: int, to_none: bool, in_a_row: bool) -> None:
    on_processes(4, thrown_away, passes, to_none, in_a_row)
