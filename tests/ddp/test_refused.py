"""What register refuses, on all ranks: models, arguments, and arguments that differ."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import torchcomp
from tests.ddp.runs import TOPK, Run
from tests.support.manager import Lighthouse, Manager, alone
from tests.support.models import Branches, loss_of, mlp, residual_norm, rows, seeded, wrap
from tests.support.outcomes import assert_refused, raised_by
from tests.support.ranks import on_processes, on_threads
from torchcomp import RankMismatchError, SpecError, UnsupportedModelError

FRAMEWORKS = r" docs/integrations/README\.md$"
CLOSED_WORLD = torch.version.cuda is not None and not torch.cuda.is_available()
DDP_OPTIONS = signature(DistributedDataParallel).parameters


# --- Models ---------------------------------------------------------------------------------------


def sharded() -> nn.Module:
    """A module of the class that fully_shard creates, without a device mesh."""
    module = mlp()
    module.__class__ = type("FSDPSequential", (FSDPModule, nn.Sequential), {})
    return module


def hooked_by_pytorch() -> DistributedDataParallel:
    model = wrap(mlp())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def trained(**options: Any) -> DistributedDataParallel:
    model = wrap(seeded(Branches().double()), **options)
    loss_of(model(rows(0), ("left", "right"))).backward()
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
    options = {"delay_all_reduce_named_params": [("6.bias", bias)]}
    return wrap(module, bucket_cap_mb=None, param_to_hook_all_reduce=bias, **options)


def sparse() -> DistributedDataParallel:
    return wrap(nn.ModuleDict({"words": nn.EmbeddingBag(5, 3, sparse=True)}))


def complex_parameter() -> DistributedDataParallel:
    module = mlp()
    module.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    return wrap(module)


def of_torchft() -> DistributedDataParallel:
    cls = type("DistributedDataParallel", (DistributedDataParallel,), {"__module__": "torchft.ddp"})
    return cls(mlp(), process_group=alone())


def plain(**options: Any) -> DistributedDataParallel:
    return wrap(mlp(), **options)


class Case(NamedTuple):
    """A call of register that raises: its model and arguments, and what its error has."""

    build: Callable[[], Any]
    match: str
    spec: Any = TOPK
    options: Any = {}  # noqa: RUF012 - never changed; or a function of the model
    error: type[Exception] = UnsupportedModelError
    field: str | None = None
    ranks: int = 2


def no_ddp(build: Callable[[], Any], message: str) -> Case:
    return Case(build, rf"torch\.nn\.parallel\.DistributedDataParallel .*{message}")


def bad(match: str, spec: Any = TOPK, field: str | None = None, **options: Any) -> Case:
    return Case(plain, match, spec, options, SpecError, field)


def no_lrs(match: str, optimizer: Callable[[Any], Any]) -> Case:
    options = lambda model: {"lr_inside": optimizer(model)}  # noqa: E731
    return Case(plain, match, TOPK, options, SpecError, "lr_inside")


def without_lr(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del optimizer.param_groups[0]["lr"]
    return optimizer


def single(**settings: Any) -> Manager:
    manager = Manager(Lighthouse({"a": (0, 9)}), "a")
    for name, value in settings.items():
        setattr(manager, name, value)
    return manager


def on_alone() -> DistributedDataParallel:
    return plain(process_group=alone())


def managed(match: str, manager: Any, field: str | None = "manager", **options: Any) -> Case:
    spec = options.pop("spec", TOPK)
    return Case(on_alone, match, spec, {"manager": manager, **options}, SpecError, field, 1)


AFTER_BACKWARD = r"backward .*DistributedDataParallel\(\.\.\.\)"
SPARES = SimpleNamespace(name="FIXED_WITH_SPARES")
REFUSED = {
    "module": no_ddp(mlp, r"\bSequential\b.* DistributedDataParallel\(model\)"),
    "None": no_ddp(lambda: None, r"\bNoneType\b"),
    "compiled": no_ddp(lambda: torch.compile(plain()), r"\bOptimizedModule\b.* torch\.compile"),
    "sharded": no_ddp(sharded, r"\bFSDPSequential\b.*\breplicate=mesh\b"),
    "DataParallel": no_ddp(
        lambda: nn.DataParallel(mlp()), r" DataParallel\b.* torchrun.*\(model\.module\)"
    ),
    "framework": no_ddp(type("LightningModule", (nn.Module,), {}), FRAMEWORKS),
    "torchft's": no_ddp(of_torchft, "integrations")._replace(options={"manager": single()}),
    "registered": Case(
        lambda: Run().model,
        r"torchcomp\.register\('ef\(topk\(0\.1\)\)'\).* handle\.swap\(spec\).* sync\.close",
        "mean",
    ),
    "hooked": Case(hooked_by_pytorch, "'allreduce_hook'"),
    "trained": Case(trained, AFTER_BACKWARD),
    "trained, static": Case(partial(trained, static_graph=True), AFTER_BACKWARD),
    "trained, unused": Case(partial(trained, find_unused_parameters=True), AFTER_BACKWARD),
    "python_reducer": Case(python_reducer, "'python_reducer'.*'ddp_optimizer'", ranks=1),
    "in backward": Case(optimizer_in_backward, "_apply_optimizer_in_backward"),
    "delayed": Case(delayed_all_reduce, "delay_all_reduce_named_params"),
    "sparse": Case(sparse, "'words' .*sparse=True.* sparse=False"),
    "complex": Case(complex_parameter, r"'phase' .*torch\.complex64.* torch\.view_as_real"),
    "typo": bad(r"'topq'.* 'topk'.*\n  ef\(topq\(0\.1\)\)\n     \^", "ef(topq(0.1))"),
    "schedule": bad(r"schedule.* torchcomp\.LocalSGD\(", "qsr(alpha=0.0175, h_base=4)"),
    "empty": bad("empty", ""),
    "no spec": bad("None$", None),
    **{
        f"seed {seed!r}": bad(r"seed .*0 .*2\^63 - 1.* " + re.escape(repr(seed)), seed=seed)
        for seed in (-1, True, 2**63)
    },
    "scaler": bad(r"scaler .*torch\.amp\.GradScaler.* bool$", scaler=True),
    "check": bad("'never'", field="check", check="never"),
    "late and unused": bad(
        "find_unused_parameters=True.*check='now'", field="check", check="late"
    )._replace(build=partial(plain, find_unused_parameters=True)),
    "inside, alone": bad("nodes", field="inside", inside="bf16"),
    "inside int8": bad("'int8'", field="inside", inside="int8", nodes=2),
    "replicate": bad("fully_shard", field="replicate", replicate=2),
    **{
        f"nodes {nodes!r}": bad("nodes", field="nodes", nodes=nodes)
        for nodes in (0, 3, True, "host")
    },
    "lr float": no_lrs("float", lambda model: 0.1),
    "lr None": no_lrs("NoneType", lambda model: [torch.optim.SGD(model.parameters()), None]),
    "lr partial": no_lrs(r"'0\.bias'", lambda m: torch.optim.SGD([m.module[0].weight], lr=0.1)),
    "lr twice": no_lrs(
        r"several.*'0\.weight'", lambda m: [torch.optim.SGD(m.parameters(), lr) for lr in (1, 2)]
    ),
    "lr missing": no_lrs("SGD.*'lr'", without_lr),
    "no manager": managed("object", object()),
    "async": managed("use_async_quorum=False", single(_use_async_quorum=True)),
    "group of 2": managed("one rank", single(_group_world_size=2)),
    "spares": managed("DYNAMIC", single(_replica_world_size_mode=SPARES)),
    "late and a manager": managed("manager", single(), "check", check="late"),
    "nodes and a manager": managed("manager", single(), "nodes", nodes=1),
    "auto and a manager": managed("manager", single(), None, spec="auto"),
    "ranks and a manager": Case(plain, "not 2", options={"manager": single()}),
}
if not CLOSED_WORLD:  # in a CUDA build, DDP creates a CUDA stream for mixed_precision
    mixed = partial(wrap, mixed_precision=_MixedPrecision(torch.bfloat16))
    REFUSED["mixed_precision"] = Case(
        lambda: mixed(mlp(torch.float32)), r"mixed_precision.*torch\.autocast", ranks=1
    )
if "skip_all_reduce_unused_params" in DDP_OPTIONS:  # since torch 2.7
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    REFUSED["skipping"] = Case(partial(plain, **options), "skip_all_reduce_unused_params")


# torch.compile imports a module of torch that calls a deprecated function of torch.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_on_all_ranks(case: str) -> None:
    build, match, spec, options, error, field, ranks = REFUSED[case]

    def body() -> None:
        model = build()
        torchcomp.register(model, spec, **(options(model) if callable(options) else options))

    assert_refused(ranks, body, error, match=match, field=field)


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
        model = Run().model
        with model.join():
            loss_of(model(rows(0))).backward()

    assert_refused(2, body, UnsupportedModelError, match=r"model\.join\(\)")


def local_steps(model: DistributedDataParallel) -> torchcomp.LocalSGD:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchcomp.LocalSGD(model, optimizer, "every(2)", total_steps=4)


INSTALLERS = {
    "register": lambda model: torchcomp.register(model, TOPK),
    "JointSpar": lambda model: torchcomp.JointSpar(model, budget=0.5),
    "LocalSGD": local_steps,
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


def test_a_frozen_parameter_on_another_device_takes_no_part() -> None:
    def body() -> str:
        module = mlp()
        module[0].weight.requires_grad_(False)
        model = wrap(module)
        frozen = torch.empty(16, 16, device="meta")
        model.module[0].weight = nn.Parameter(frozen, requires_grad=False)
        return str(torchcomp.register(model, TOPK).method)

    assert on_threads(2, body) == [TOPK, TOPK]


@pytest.mark.parametrize("call", INSTALLERS)
def test_a_group_that_torch_does_not_know_needs_a_manager(call: str) -> None:
    with pytest.raises(UnsupportedModelError, match="manager=manager"):
        INSTALLERS[call](on_alone())


def test_a_manager_takes_one_model() -> None:
    manager = single()
    torchcomp.register(on_alone(), TOPK, manager=manager).close()
    with pytest.raises(SpecError, match="one model"):
        torchcomp.register(on_alone(), TOPK, manager=manager)


# --- Ranks with different arguments ---------------------------------------------------------------


def head() -> DistributedDataParallel:
    """A model of another name on each rank: DDP itself verifies the shapes only."""
    return wrap(nn.ModuleDict({f"head{dist.get_rank()}": nn.Linear(4, 4)}))


def differing() -> dict[str, Exception]:
    odd = dist.get_rank() == 1

    def call(spec: str = TOPK, **options: Any) -> Callable[[Any], Any]:
        return lambda model: torchcomp.register(model, spec, **options)

    def with_lr(model: Any) -> None:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        torchcomp.register(model, TOPK, lr_inside=sgd if odd else None)

    calls: dict[str, Callable[[Any], Any]] = {
        "spec: mean on rank .*ef(topk(0.1)) on rank 1": call(TOPK if odd else "mean"),
        "seed: 3 on rank .*7 on rank 1": call(seed=7 if odd else 3),
        "'topq'.*'topk'": call("topq(0.1)" if odd else TOPK),
        "-5 on rank 1": call(seed=-5 if odd else 0),
        "every(2) on rank 1": INSTALLERS["LocalSGD" if odd else "register"],
        "check: .*late on rank 1": call(check="late" if odd else "now"),
        "lr_inside: .* on rank 1": with_lr,
        "parameters: .*'head0.weight'.*'head1.weight'": lambda _: call()(head()),
    }
    return {words: raised_by(partial(each, plain())) for words, each in calls.items()}


def test_errors_of_different_arguments_list_all_values() -> None:
    for by_rank in (on_threads(2, differing), on_processes(2, differing)):
        for errors in by_rank:
            for words, error in errors.items():
                assert type(error) is RankMismatchError, words
                pattern = ".*".join(map(re.escape, words.split(".*")))
                assert re.search(pattern, str(error), re.DOTALL), (words, str(error))
