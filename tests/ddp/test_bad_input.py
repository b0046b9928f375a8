"""Errors of register and the handle for unsupported models, bad arguments and wrong calls."""

import io
import re
import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel

import torchcomp
from tests.support.launches import counted
from tests.support.models import Branches, loss_of, mlp, residual_norm, rows, seeded, wrap
from tests.support.outcomes import assert_refused, raised_by
from tests.support.ranks import on_processes, on_threads
from torchcomp import RankMismatchError, SpecError, UnsupportedModelError
from torchcomp.compressors import TopK

TOPK = "ef(topk(0.1))"
FRAMEWORKS = r" docs/integrations/README\.md$"
CLOSED_WORLD = torch.version.cuda is not None and not torch.cuda.is_available()
DDP_OPTIONS = signature(DistributedDataParallel).parameters


# --- What is refused on all ranks: models, then arguments -----------------------------------------


def sharded() -> nn.Module:
    """A module of the class that fully_shard creates, without a device mesh."""
    module = mlp()
    module.__class__ = type("FSDPSequential", (FSDPModule, nn.Sequential), {})
    return module


def stand_in(module: str, name: str, base: type = nn.Module) -> Callable[[], Any]:
    """A user's class derived from a framework's class of this module and name."""
    framework = type(name, (base,), {"__module__": module})
    return type("Mine", (framework,), {})


def registered() -> DistributedDataParallel:
    model = wrap(mlp())
    torchcomp.register(model, TOPK)
    return model


def hooked_by_pytorch() -> DistributedDataParallel:
    model = wrap(mlp())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def trained(steps: int = 1, **options: Any) -> DistributedDataParallel:
    model = wrap(seeded(Branches().double()), **options)
    for step in range(steps):
        loss_of(model(rows(step), ("left", "right"))).backward()
    return model


def python_reducer() -> DistributedDataParallel:
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return wrap(mlp())


def optimizer_in_backward() -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import itself warns about torch.jit.script
        from torch.distributed.optim import _apply_optimizer_in_backward

    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    return wrap(module)


def delayed_all_reduce() -> DistributedDataParallel:
    module = mlp()
    bias = module[6].bias
    options = {
        "delay_all_reduce_named_params": [("6.bias", bias)],
        "param_to_hook_all_reduce": bias,
    }
    return wrap(module, bucket_cap_mb=None, **options)


def sparse(cls: type[nn.Module]) -> DistributedDataParallel:
    return wrap(nn.ModuleDict({"words": cls(5, 3, sparse=True), "head": nn.Linear(3, 1)}))


def complex_parameter() -> DistributedDataParallel:
    module = mlp()
    module.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    return wrap(module)


def plain() -> DistributedDataParallel:
    return wrap(mlp())


class Case(NamedTuple):
    """A call of register that raises: its model and arguments, and what its error has."""

    build: Callable[[], Any]
    match: str
    spec: Any = TOPK
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    error: type[Exception] = UnsupportedModelError
    field: str | None = None
    ranks: int = 2


def no_ddp(build: Callable[[], Any], message: str) -> Case:
    return Case(build, rf"torch\.nn\.parallel\.DistributedDataParallel .*{message}")


def bad(match: str, spec: Any = TOPK, field: str | None = None, **options: Any) -> Case:
    return Case(plain, match, spec, options, SpecError, field)


AFTER_BACKWARD = r"backward .*DistributedDataParallel\(\.\.\.\)"
REFUSED = {
    "module": no_ddp(mlp, r"\bSequential\b.* DistributedDataParallel\(model\)"),
    "None": no_ddp(lambda: None, r"\bNoneType\b"),
    "str": no_ddp(lambda: "ddp", r"\bstr\b"),
    "compiled": no_ddp(lambda: torch.compile(plain()), r"\bOptimizedModule\b.* torch\.compile"),
    "sharded": no_ddp(sharded, r"\bFSDPSequential\b.*\breplicate=mesh\b"),
    "DataParallel": no_ddp(
        lambda: nn.DataParallel(mlp()), r" DataParallel\b.* torchrun.*\(model\.module\)"
    ),
    "framework": no_ddp(stand_in("lightning.pytorch.core", "LightningModule"), FRAMEWORKS),
    "trainer": no_ddp(stand_in("lightning.pytorch.trainer", "Trainer", object), FRAMEWORKS),
    "registered": Case(
        registered,
        r"torchcomp\.register\('ef\(topk\(0\.1\)\)'\).* handle\.swap\(spec\).* sync\.close",
        "mean",
    ),
    "hooked": Case(hooked_by_pytorch, "'allreduce_hook'"),
    "trained": Case(trained, AFTER_BACKWARD),
    "trained, static": Case(partial(trained, static_graph=True), AFTER_BACKWARD),
    "trained, unused": Case(partial(trained, find_unused_parameters=True), AFTER_BACKWARD),
    "trained long": Case(partial(trained, 3), AFTER_BACKWARD),
    "python_reducer": Case(python_reducer, "'python_reducer' .*'ddp_optimizer'", ranks=1),
    "in backward": Case(optimizer_in_backward, "_apply_optimizer_in_backward"),
    "delayed": Case(delayed_all_reduce, "delay_all_reduce_named_params"),
    "Embedding": Case(partial(sparse, nn.Embedding), "'words' .*sparse=True.* sparse=False"),
    "EmbeddingBag": Case(partial(sparse, nn.EmbeddingBag), "'words' .*sparse=True.* sparse=False"),
    "complex": Case(complex_parameter, r"'phase' .*torch\.complex64.* torch\.view_as_real"),
    "typo": bad(r"'topq'.* 'topk'.*\n  ef\(topq\(0\.1\)\)\n     \^", "ef(topq(0.1))"),
    "ratio": bad(r"topk: ratio .*0 .*1.* 2\.0", "ef(topk(2.0))"),
    "option": bad("'memory_dtyp'.* 'memory_dtype'", "ef(topk(0.1), memory_dtyp='fp32')"),
    "sum": bad(r'ef: exchange="allreduce" .*\btopk\b.* "sharded"', "ef(topk(0.1), exchange='sum')"),
    "biased": bad(
        r"ef .*contractive.* randk\(0\.1, unbiased=True\)", "ef(randk(0.1, unbiased=True))"
    ),
    "schedule": bad(r"schedule.* torchcomp\.LocalSGD\(", "qsr(alpha=0.0175, h_base=4)"),
    "empty": bad("empty", ""),
    "no spec": bad("None$", None),
    **{
        f"seed {seed!r}": bad(r"seed .*0 .*2\^63 - 1.* " + re.escape(repr(seed)), seed=seed)
        for seed in (-1, 1.5, True, "7", None, 2**63)
    },
    "scaler": bad(r"scaler .*torch\.amp\.GradScaler.* bool$", scaler=True),
    "check": bad("'never'", field="check", check="never"),
    "inside, alone": bad("nodes", field="inside", inside="bf16"),
    "inside int8": bad("'int8'", field="inside", inside="int8", nodes=2),
    "inside 16": bad("16", field="inside", inside=16, nodes=2),
    "replicate": bad("fully_shard", field="replicate", replicate=2),
    **{
        f"nodes {nodes!r}": bad("nodes", field="nodes", nodes=nodes)
        for nodes in (0, -2, 3, 1.5, True, "host", [2], "2")
    },
}
if not CLOSED_WORLD:  # in a CUDA build, DDP creates a CUDA stream for mixed_precision
    mixed = partial(wrap, mixed_precision=_MixedPrecision(torch.bfloat16))
    REFUSED["mixed_precision"] = Case(
        lambda: mixed(mlp(torch.float32)), r"mixed_precision .*torch\.autocast", ranks=1
    )
if "skip_all_reduce_unused_params" in DDP_OPTIONS:  # since torch 2.7
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    skipping = partial(wrap, **options)
    REFUSED["skipping"] = Case(lambda: skipping(mlp()), "skip_all_reduce_unused_params")


# torch.compile imports a module of torch that calls a deprecated function of torch.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_on_all_ranks(case: str) -> None:
    build, match, spec, options, error, field, ranks = REFUSED[case]

    def body() -> None:
        torchcomp.register(build(), spec, **options)

    assert_refused(ranks, body, error, match=match, field=field)


def test_late_does_not_fit_parameters_that_are_not_used() -> None:
    def body() -> None:
        torchcomp.register(wrap(mlp(), find_unused_parameters=True), TOPK, check="late")

    assert_refused(2, body, SpecError, "find_unused_parameters=True", "check='now'", field="check")


def test_hook_of_pytorch_after_registration() -> None:
    def body() -> None:
        registered().register_comm_hook(None, default_hooks.allreduce_hook)

    # PyTorch's own error, from register_comm_hook.
    assert_refused(2, body, RuntimeError, match="register_comm_hook")


def test_registration_after_evaluation_and_no_sync_is_fine() -> None:
    def body() -> float:
        model = wrap(mlp())
        with torch.no_grad():
            model(rows(0))
        with model.no_sync():
            loss_of(model(rows(0))).backward()
        handle = torchcomp.register(model, TOPK)
        loss_of(model(rows(1))).backward()
        return residual_norm(handle)

    assert min(on_threads(2, body)) > 0


def test_uneven_inputs_of_join() -> None:
    def body() -> None:
        model = registered()
        with model.join():
            loss_of(model(rows(0))).backward()

    assert_refused(2, body, UnsupportedModelError, match=r"model\.join\(\)")


INSTALLERS = {
    "register": lambda model: torchcomp.register(model, TOPK),
    "JointSpar": lambda model: torchcomp.JointSpar(model, budget=0.5),
    "LocalSGD": lambda model: torchcomp.LocalSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "every(2)", total_steps=4
    ),
}


@pytest.mark.parametrize("call", INSTALLERS)
def test_parameters_on_several_devices(call: str) -> None:
    def body() -> None:
        model = wrap(mlp())
        # Stands for a second GPU: DDP itself accepts several devices of one type.
        model.module[6].weight = nn.Parameter(torch.empty(4, 16, device="meta"))
        INSTALLERS[call](model)

    message = r"2 devices.*'0\.weight' on cpu.*'6\.weight' on meta"
    assert_refused(2, body, UnsupportedModelError, match=message)


@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("call", INSTALLERS)
def test_a_frozen_parameter_on_another_device_takes_no_part(call: str, device: str) -> None:
    with counted():  # simulates CUDA
        frozen = nn.Parameter(torch.empty(16, 16, device=device), requires_grad=False)

    def body() -> str:
        module = mlp()
        module[0].weight.requires_grad_(False)
        model = wrap(module)
        model.module[0].weight = frozen
        INSTALLERS[call](model)
        return next(model.parameters()).device.type

    assert on_threads(2, body) == [device, device]


def test_errors_are_raised_before_a_process_group_is_created() -> None:
    """If one rank has raised, the others would wait for it forever when they create a group."""
    # Not by its path as a string: there, Python 3.10 takes `register` for the function.
    with mock.patch("torchcomp.ddp.register.transport") as transport:
        assert_refused(
            2, lambda: torchcomp.register(plain(), "topq(0.1)"), SpecError, match="'topq'"
        )
    transport.assert_not_called()


def test_model_can_be_registered_after_an_error() -> None:
    def body() -> str:
        model = wrap(mlp())
        raised_by(lambda: torchcomp.register(model, "ef(topq(0.1))"))
        return str(torchcomp.register(model, TOPK).method)

    assert on_threads(2, body) == [TOPK, TOPK]


# --- Ranks with different arguments ---------------------------------------------------------------


def mismatches() -> list[Exception]:
    odd = dist.get_rank() == 1
    return [
        raised_by(lambda: torchcomp.register(wrap(mlp()), TOPK if odd else "mean")),
        raised_by(lambda: torchcomp.register(wrap(mlp()), TOPK, seed=7 if odd else 3)),
        raised_by(lambda: torchcomp.register(wrap(mlp()), "topq(0.1)" if odd else TOPK)),
        raised_by(lambda: torchcomp.register(wrap(mlp()), TOPK, seed=-5 if odd else 0)),
        raised_by(local_steps if odd else lambda: torchcomp.register(plain(), TOPK)),
    ]


def local_steps() -> torchcomp.LocalSGD:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchcomp.LocalSGD(model, optimizer, "every(2)", total_steps=4)


def test_errors_of_different_arguments_list_all_values() -> None:
    for by_rank in (on_threads(3, mismatches), on_processes(2, mismatches)):
        for errors in by_rank:
            assert {type(error) for error in errors} == {RankMismatchError}
            method, seed, spec, bad_seed, call = errors
            assert "every(2) on rank 1" in str(call)
            assert "spec: mean on rank" in str(method)
            assert "ef(topk(0.1)) on rank 1" in str(method)
            assert "seed: 3 on rank" in str(seed)
            assert "7 on rank 1" in str(seed)
            assert "'topq'" in str(spec)
            assert "'topk'" in str(spec)
            assert "-5 on rank 1" in str(bad_seed)


def test_error_of_different_models_lists_the_parameters() -> None:
    """DDP itself verifies the shapes, but not the names."""

    def build() -> DistributedDataParallel:
        name = f"head{dist.get_rank()}"
        return wrap(nn.ModuleDict({name: nn.Linear(4, 4)}))

    assert_refused(
        2,
        lambda: torchcomp.register(build(), TOPK),
        RankMismatchError,
        match="parameters: .*'head0.weight'.*'head1.weight'",
    )


def test_swap_to_different_methods_raises_on_every_rank_and_changes_nothing() -> None:
    def body() -> None:
        model = wrap(mlp())
        handle = torchcomp.register(model, TOPK)
        error = raised_by(lambda: handle.swap("mean" if dist.get_rank() else "topk(0.2)"))
        assert isinstance(error, RankMismatchError)
        assert "mean on rank 1" in str(error)
        assert str(handle.method) == TOPK
        loss_of(model(rows(0))).backward()

    on_threads(2, body)


def test_swap_to_a_bad_spec_on_one_rank_raises_on_every_rank() -> None:
    outcomes = on_processes(2, _swaps_badly_on_one_rank, catch=True)
    assert [type(outcome).__name__ for outcome in outcomes] == ["RankMismatchError"] * 2
    assert "'topq'" in str(outcomes[0])


def _swaps_badly_on_one_rank() -> None:
    handle = torchcomp.register(wrap(mlp()), TOPK)
    handle.swap("topq(0.1)" if dist.get_rank() else "topk(0.1)")


# --- The handle -----------------------------------------------------------------------------------


def test_swap_to_an_unknown_method_changes_nothing() -> None:
    def body() -> None:
        handle = torchcomp.register(wrap(mlp()), TOPK)
        with pytest.raises(SpecError, match=r"'meen'.* 'mean'"):
            handle.swap("meen")
        with pytest.raises(SpecError, match=r"schedule.* torchcomp\.LocalSGD\("):
            handle.swap("every(4)")
        assert str(handle.method) == TOPK

    on_threads(2, body)


def test_calls_during_a_backward_pass_raise() -> None:
    def body() -> dict[str, Exception]:
        model = wrap(mlp())
        handle = torchcomp.register(model, TOPK)
        for step in range(2):
            loss_of(model(rows(step))).backward()
        state, errors = handle.state_dict(), {}

        def call(gradient: Tensor) -> None:
            errors["swap"] = raised_by(lambda: handle.swap("mean"))
            errors["state_dict"] = raised_by(handle.state_dict)
            errors["load_state_dict"] = raised_by(lambda: handle.load_state_dict(state))

        model.module[0].weight.register_hook(call)
        loss_of(model(rows(2))).backward()
        handle.state_dict()
        return errors

    for errors in on_threads(2, body):
        assert set(errors) == {"swap", "state_dict", "load_state_dict"}
        for call, error in errors.items():
            assert type(error) is RuntimeError
            assert re.match(rf"{call} .*backward", str(error)), error


def closed() -> list[tuple[type[Exception], str, Exception]]:
    model = wrap(mlp())
    with torchcomp.register(model, TOPK) as handle:
        loss_of(model(rows(0))).backward()
    handle.close()
    registered = re.escape(f"torchcomp.register('{TOPK}')")
    return [
        (RuntimeError, "swap ", raised_by(lambda: handle.swap("mean"))),
        (RuntimeError, "load_state_dict ", raised_by(lambda: handle.load_state_dict({}))),
        (UnsupportedModelError, registered, raised_by(lambda: torchcomp.register(model, TOPK))),
        (RuntimeError, "this handle ", raised_by(lambda: loss_of(model(rows(1))).backward())),
    ]


def test_calls_after_close_raise_with_advice() -> None:
    for errors in on_threads(2, closed):
        for kind, start, error in errors:
            assert type(error) is kind, repr(error)
            message = rf"{start}.*closed.* DistributedDataParallel.* handle\.swap\('mean'\)"
            assert re.match(message, str(error)), error


def hooked(scaler: torch.amp.GradScaler | None = None) -> tuple[DistributedDataParallel, Any]:
    model = wrap(mlp())
    return model, torchcomp.register(model, TOPK, scaler=scaler)


@pytest.mark.parametrize(
    "build",
    [lambda: hooked()[1], lambda: hooked()[0], lambda: hooked(torch.amp.GradScaler("cpu"))[0]],
    ids=["handle", "model", "model with a scaler"],
)
def test_pickling_what_register_has_changed_raises_with_advice(build: Callable[[], Any]) -> None:
    def body() -> None:
        torch.save({"saved": build()}, io.BytesIO())

    assert_refused(
        2, body, TypeError, match=r"handle\.state_dict\(\).* model\.module\.state_dict\(\)"
    )


def test_a_model_with_a_scaler_can_be_copied() -> None:
    def body() -> None:
        scaler = torch.amp.GradScaler("cpu")
        model, _ = hooked(scaler)
        scaler.scale(loss_of(model(rows(0)))).backward()
        average = AveragedModel(model)
        assert torch.equal(average.module(rows(1)), model(rows(1)))

    on_threads(2, body)


def test_closed_handle_still_has_its_statistics_and_state() -> None:
    def body() -> None:
        model = wrap(mlp())
        handle = torchcomp.register(model, TOPK)
        loss_of(model(rows(0))).backward()
        handle.close()
        assert handle.stats.steps == handle.state_dict()["step"] == 1

    on_threads(2, body)


def test_an_error_in_an_exchange_is_raised_unchanged() -> None:
    """DDP would report it as "Unable to cast <message> to Tensor"."""

    def body() -> None:
        model = wrap(mlp())
        torchcomp.register(model, TOPK)
        with mock.patch.object(TopK, "encode_sum", side_effect=ValueError("no luck")):
            loss_of(model(rows(0))).backward()

    assert_refused(1, body, ValueError, match="^no luck$")
