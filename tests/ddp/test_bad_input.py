"""What register and the handle refuse, and what they say."""

import io
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import torchcomp
from tests.support.models import (
    Branches,
    loss_of,
    mlp,
    raised_by,
    residual_norm,
    rows,
    seeded,
    wrap,
)
from tests.support.ranks import on_processes, on_threads
from torchcomp import RankMismatchError, SpecError, UnsupportedModelError

TOPK = "ef(topk(0.1))"


def refuses(kind: type[Exception], message: str, body: Callable[[], Any], ranks: int = 2) -> None:
    """Require that `body` raises on every rank, with `message` (a regular expression)."""
    for rank, error in enumerate(on_threads(ranks, body, catch=True)):
        assert type(error) is kind, f"rank {rank}: {error!r}"
        assert re.search(message, str(error)), f"rank {rank}: {error}"


def registering(build: Callable[[], Any], spec: Any = TOPK, **options: Any) -> Callable[[], Any]:
    return lambda: torchcomp.register(build(), spec, **options)


# The model.


def sharded() -> nn.Module:
    """What fully_shard makes of a module, without its device mesh."""
    module = mlp()
    module.__class__ = type("FSDPSequential", (FSDPModule, nn.Sequential), {})
    return module


# torch.compile imports a module of torch that uses a deprecated function of torch.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "given"),
    [
        (mlp, "Sequential: wrap the model first"),
        (lambda: None, "NoneType$"),
        (lambda: "ddp", "str$"),
        (lambda: torch.compile(wrap(mlp())), "OptimizedModule: .* before torch.compile"),
        (sharded, "FSDPSequential: FSDP shards the model .* serves replicas"),
        (lambda: nn.DataParallel(mlp()), r"DataParallel: .* torchrun.*\(model.module\)"),
    ],
    ids=["module", "None", "str", "compiled", "FSDP", "DataParallel"],
)
def test_not_a_ddp_module(build: Callable[[], Any], given: str) -> None:
    expected = f"expected a .*DistributedDataParallel model, not {given}"
    refuses(UnsupportedModelError, expected, registering(build))


def test_second_registration() -> None:
    def body() -> None:
        model = wrap(mlp())
        torchcomp.register(model, TOPK)
        torchcomp.register(model, "mean")

    message = r"torchcomp.register\('ef\(topk\(0.1\)\)'\) is already installed.*handle.swap"
    refuses(UnsupportedModelError, message, body)


def test_registration_after_a_hook_of_pytorch() -> None:
    def body() -> None:
        model = wrap(mlp())
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        torchcomp.register(model, TOPK)

    refuses(UnsupportedModelError, "already has the communication hook 'allreduce_hook'", body)


def test_hook_of_pytorch_after_registration() -> None:
    def body() -> None:
        model = wrap(mlp())
        torchcomp.register(model, TOPK)
        model.register_comm_hook(None, default_hooks.allreduce_hook)

    refuses(RuntimeError, "can only be called once", body)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "none"])
def test_registration_after_the_first_backward(option: str) -> None:
    def body() -> None:
        model = wrap(seeded(Branches().double()), **({} if option == "none" else {option: True}))
        loss_of(model(rows(0), ("left", "right"))).backward()
        torchcomp.register(model, TOPK)

    refuses(UnsupportedModelError, "a backward pass has already run: register right after", body)


def test_registration_after_many_steps() -> None:
    def body() -> None:
        model = wrap(mlp())
        for step in range(3):
            loss_of(model(rows(step))).backward()
        torchcomp.register(model, TOPK)

    refuses(UnsupportedModelError, "a backward pass has already run", body)


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


def test_mixed_precision_of_ddp() -> None:
    def build() -> DistributedDataParallel:
        return wrap(mlp(torch.float32), mixed_precision=_MixedPrecision(torch.bfloat16))

    message = "DDP's own mixed_precision .*: use torch.autocast"
    refuses(UnsupportedModelError, message, registering(build), ranks=1)


def test_python_reducer() -> None:
    def build() -> DistributedDataParallel:
        import torch._dynamo

        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            return wrap(mlp())

    refuses(UnsupportedModelError, "'python_reducer' reduces .*: set it to", registering(build), 1)


def test_optimizer_in_backward() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of torch.jit.script
        from torch.distributed.optim import _apply_optimizer_in_backward

    def build() -> DistributedDataParallel:
        module = mlp()
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        return wrap(module)

    message = "an optimizer runs inside the backward pass .*: step the optimizer after backward"
    refuses(UnsupportedModelError, message, registering(build))


def test_delayed_all_reduce() -> None:
    def build() -> DistributedDataParallel:
        module = mlp()
        bias = module[6].bias
        options = {
            "delay_all_reduce_named_params": [("6.bias", bias)],
            "param_to_hook_all_reduce": bias,
        }
        return wrap(module, **options)

    refuses(
        UnsupportedModelError, "delay_all_reduce_named_params .*leave it out", registering(build)
    )


def test_reduction_that_skips_unused_parameters() -> None:
    def build() -> DistributedDataParallel:
        return wrap(mlp(), find_unused_parameters=True, skip_all_reduce_unused_params=True)

    message = "skip_all_reduce_unused_params hides gradients .*: leave it out"
    refuses(UnsupportedModelError, message, registering(build))


def test_uneven_inputs_of_join() -> None:
    def body() -> None:
        model = wrap(mlp())
        torchcomp.register(model, TOPK)
        with model.join():
            loss_of(model(rows(0))).backward()

    message = r"model.join\(\) lets ranks run out .*: give every rank the same number of batches"
    refuses(UnsupportedModelError, message, body)


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(cls: type[nn.Module]) -> None:
    def build() -> DistributedDataParallel:
        return wrap(nn.ModuleDict({"words": cls(5, 3, sparse=True), "head": nn.Linear(3, 1)}))

    message = "module 'words' produces sparse gradients .*: build it with sparse=False"
    refuses(UnsupportedModelError, message, registering(build))


def test_complex_parameter() -> None:
    def build() -> DistributedDataParallel:
        module = mlp()
        module.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
        return wrap(module)

    refuses(UnsupportedModelError, r"'phase' is complex \(torch.complex64\)", registering(build))


# The arguments.


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "ef(topq(0.1))",
            r"unknown name 'topq'; did you mean 'topk'\?\n  ef\(topq\(0.1\)\)\n     \^",
        ),
        ("ef(topk(2.0))", "ratio must be a fraction above 0 and at most 1, not 2.0"),
        ("ef(topk(nan))", "ratio must be a fraction above 0 and at most 1, not nan"),
        ("ef(topk(0.1), memory_dtyp='fp32')", "no option 'memory_dtyp'; did you mean"),
        ("ef(topk(0.1), exchange='sum')", "allreduce needs one support on all ranks"),
        ("ef(randk(0.1, unbiased=True))", "ef needs a contractive compressor"),
        ("qsr(alpha=0.0175, h_base=4)", r"is a schedule, .*torchcomp.LocalSGD\("),
        ("", "an empty spec"),
        (None, "a spec is a string such as .*, not None"),
    ],
)
def test_spec_that_is_wrong_on_all_ranks(spec: Any, message: str) -> None:
    refuses(SpecError, message, registering(lambda: wrap(mlp()), spec))


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7", None, 2**63])
def test_bad_seed(seed: Any) -> None:
    message = r"seed must be a whole number from 0 to 2\^63 - 1, not " + re.escape(repr(seed))
    refuses(SpecError, message, registering(lambda: wrap(mlp()), seed=seed))


@pytest.mark.parametrize("scaler", [True, "scaler"])
def test_bad_scaler(scaler: Any) -> None:
    message = f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}"
    refuses(SpecError, message, registering(lambda: wrap(mlp()), scaler=scaler))


def test_refusal_comes_before_a_process_group_is_made() -> None:
    """Which a rank that does not come would delay without end."""
    with mock.patch("torchcomp.ddp.register.transport") as transport:
        refuses(SpecError, "unknown name", registering(lambda: wrap(mlp()), "topq(0.1)"))
    transport.assert_not_called()


def test_model_can_be_registered_after_a_refusal() -> None:
    def body() -> str:
        model = wrap(mlp())
        raised_by(lambda: torchcomp.register(model, "ef(topq(0.1))"))
        return str(torchcomp.register(model, TOPK).method)

    assert on_threads(2, body) == [TOPK, TOPK]


# Ranks that disagree.


def disagreements() -> list[Exception]:
    odd = dist.get_rank() == 1
    return [
        raised_by(lambda: torchcomp.register(wrap(mlp()), TOPK if odd else "mean")),
        raised_by(lambda: torchcomp.register(wrap(mlp()), TOPK, seed=7 if odd else 3)),
        raised_by(lambda: torchcomp.register(wrap(mlp()), "topq(0.1)" if odd else TOPK)),
        raised_by(lambda: torchcomp.register(wrap(mlp()), TOPK, seed=-5 if odd else 0)),
        raised_by(local_steps if odd else registering(lambda: wrap(mlp()))),
    ]


def local_steps() -> torchcomp.LocalSGD:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchcomp.LocalSGD(model, optimizer, "every(2)", total_steps=4)


def test_ranks_that_disagree_are_told_all_values() -> None:
    for everyone in (on_threads(3, disagreements), on_processes(2, disagreements)):
        for errors in everyone:
            assert {type(error) for error in errors} == {RankMismatchError}
            method, seed, spec, bad_seed, call = errors
            assert "every(2) on rank 1" in str(call)
            assert "spec: mean on rank" in str(method)
            assert "ef(topk(0.1)) on rank 1" in str(method)
            assert "seed: 3 on rank" in str(seed)
            assert "7 on rank 1" in str(seed)
            assert "unknown name 'topq'; did you mean 'topk'?" in str(spec)
            assert "seed must be a whole number" in str(bad_seed)


def test_ranks_with_different_models_are_told() -> None:
    """DDP itself compares shapes, but not names."""

    def build() -> DistributedDataParallel:
        name = f"head{dist.get_rank()}"
        return wrap(nn.ModuleDict({name: nn.Linear(4, 4)}))

    refuses(RankMismatchError, "parameters: .*'head0.weight'.*'head1.weight'", registering(build))


def test_swap_to_different_methods_is_an_error_on_all_ranks_and_changes_nothing() -> None:
    def body() -> None:
        model = wrap(mlp())
        handle = torchcomp.register(model, TOPK)
        error = raised_by(lambda: handle.swap("mean" if dist.get_rank() else "topk(0.2)"))
        assert isinstance(error, RankMismatchError)
        assert "mean on rank 1" in str(error)
        assert str(handle.method) == TOPK
        loss_of(model(rows(0))).backward()

    on_threads(2, body)


def test_swap_to_a_bad_spec_on_one_rank_is_an_error_on_all() -> None:
    outcomes = on_processes(2, _swaps_badly_on_one_rank, catch=True)
    assert [type(outcome).__name__ for outcome in outcomes] == ["RankMismatchError"] * 2
    assert "unknown name 'topq'" in str(outcomes[0])


def _swaps_badly_on_one_rank() -> None:
    handle = torchcomp.register(wrap(mlp()), TOPK)
    handle.swap("topq(0.1)" if dist.get_rank() else "topk(0.1)")


# The handle.


def test_swap_to_an_unknown_method_changes_nothing() -> None:
    def body() -> None:
        handle = torchcomp.register(wrap(mlp()), TOPK)
        with pytest.raises(SpecError, match="did you mean 'mean'"):
            handle.swap("meen")
        with pytest.raises(SpecError, match="is a schedule"):
            handle.swap("every(4)")
        assert str(handle.method) == TOPK

    on_threads(2, body)


def test_calls_in_the_middle_of_backward_are_refused() -> None:
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
            assert isinstance(error, RuntimeError)
            assert str(error).startswith(f"{call} in the middle of a backward pass"), error


def closed() -> dict[str, Exception]:
    model = wrap(mlp())
    with torchcomp.register(model, TOPK) as handle:
        loss_of(model(rows(0))).backward()
    handle.close()
    return {
        "swap of a closed handle": raised_by(lambda: handle.swap("mean")),
        "load_state_dict of a closed": raised_by(lambda: handle.load_state_dict({})),
        "was closed on this model": raised_by(lambda: torchcomp.register(model, TOPK)),
        "this handle is closed": raised_by(lambda: loss_of(model(rows(1))).backward()),
    }


def test_what_follows_a_close_is_an_error_with_the_way_out() -> None:
    for errors in on_threads(2, closed):
        for message, error in errors.items():
            assert message in str(error)
            assert "build DistributedDataParallel anew" in str(error)


def test_pickling_a_handle_is_refused_with_what_to_save() -> None:
    def body() -> None:
        torch.save({"handle": torchcomp.register(wrap(mlp()), TOPK)}, io.BytesIO())

    refuses(TypeError, r"cannot be pickled: save handle.state_dict\(\)", body)


def test_closed_handle_still_tells_and_saves_its_state() -> None:
    def body() -> None:
        model = wrap(mlp())
        handle = torchcomp.register(model, TOPK)
        loss_of(model(rows(0))).backward()
        handle.close()
        assert handle.stats.steps == handle.state_dict()["step"] == 1

    on_threads(2, body)


def test_failing_exchange_is_raised_as_itself() -> None:
    """Not as DDP's "Unable to cast <message> to Tensor"."""

    def body() -> None:
        model = wrap(mlp())
        torchcomp.register(model, TOPK)
        with mock.patch(
            "torchcomp.compressors.topk.add_and_select", side_effect=ValueError("no luck")
        ):
            loss_of(model(rows(0))).backward()

    refuses(ValueError, "^no luck$", body, ranks=1)
