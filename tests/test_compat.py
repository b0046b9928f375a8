"""Private names of torch: each one that torchcomp uses is listed, and this torch has it."""

import ast
import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchcomp

FSDP = "torch.distributed.fsdp._fully_shard"
FSDP_STATE, FSDP_GROUP = f"{FSDP}._fsdp_state.FSDPState", f"{FSDP}._fsdp_param_group.FSDPParamGroup"
FOREACH = "add add_ copy_ max mul_ norm sub_ zero_"
PRIVATE = {
    "torch": ["_C", "_dynamo", *(f"_foreach_{name}" for name in FOREACH.split())],
    "torch._C": ["_distributed_c10d", "_current_graph_task_id"],
    "torch.autograd.Variable": ["_execution_engine"],
    "torch.autograd.profiler": ["_is_profiler_enabled"],
    "torch.nn.modules.batchnorm": ["_BatchNorm"],
    "torch.utils": ["_pytree"],
    "torch.nn.Module": ["_compiled_call_impl"],
    "torch._dynamo.OptimizedModule": ["_orig_mod"],
    "torch.nn.Parameter": ["_in_backward_optimizers"],
    "torch.nn.parallel.DistributedDataParallel": [
        *("_comm_hooks", "_delay_all_reduce_params", "_get_ddp_logging_data"),
        *("_has_rebuilt_buckets", "_join_config", "_use_python_reducer"),
    ],
    "torch.distributed.ProcessGroup": ["_get_backend"],
    "torch.distributed.ProcessGroupGloo": ["_allgather_base", "_reduce_scatter_base"],
    "torch.distributed.fsdp.FSDPModule": ["_get_fsdp_state"],
    FSDP_STATE: ["_fsdp_param_group", "_state_ctx"],
    FSDP_GROUP: ["_all_reduce_hook"],
    "torch.distributed.distributed_c10d": ["_get_default_store"],
    "torch.distributed.Backend.Options": ["_timeout"],
    "torch.optim.Optimizer": ["_optimizer_step_pre_hooks"],
    "torch.Tensor": ["_version"],
    "torch.amp.GradScaler": ["_get_scale_async"],
}
"""Private names of torch that torchcomp uses, by owner: any release can change them."""

# Of Lightning and torchft: `make test-integrations` runs what uses them.
OF_FRAMEWORKS = {
    *("_ddp_comm_hook", "_forward_module", "_commit_failures", "_group_world_size", "_pg"),
    *("_quorum_id", "_replica_world_size_mode", "_use_async_quorum"),
}


@pytest.fixture(scope="module")
def instances():
    """An object for each owner in PRIVATE whose names are not those of a module or class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parameter = nn.Parameter(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import itself warns about torch.jit.script
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 1.0})
    module = nn.Linear(1, 1)
    state = fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))._get_fsdp_state()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    yield {
        "torch.amp.GradScaler": torch.amp.GradScaler("cpu"),
        "torch.distributed.Backend.Options": backend.options,
        FSDP_STATE: state,
        FSDP_GROUP: state._fsdp_param_group,
        "torch._dynamo.OptimizedModule": torch.compile(module, backend="eager"),
        "torch.nn.Parameter": parameter,
        "torch.nn.parallel.DistributedDataParallel": DistributedDataParallel(module),
        "torch.optim.Optimizer": torch.optim.SGD([parameter]),
    }
    dist.destroy_process_group()


def resolve(path):
    """Import the module, or the attribute of a module, at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(resolve(module), name)


def test_this_torch_has_the_private_names(instances):
    for owner, names in PRIVATE.items():
        has = instances[owner] if owner in instances else resolve(owner)
        if owner == FSDP_GROUP and not hasattr(FSDPModule, "set_all_reduce_hook"):
            continue  # since torch 2.7
        missing = [name for name in names if not hasattr(has, name)]
        assert not missing, f"torch {torch.__version__}: {owner} lacks {missing}"


# --- Every private name in use is listed ----------------------------------------------------------


PRIVATE_NAME = re.compile(r"_(?!torchcomp)[A-Za-z]\w*")


def used(tree):
    """Yield the private names that a file reads: attributes, imported names, and strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (getattr(node, "module", None) or "").split(".")
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.removesuffix(".")  # for getattr, hasattr and prefixes


def defined(tree):
    """Yield the names that a file defines: functions, classes, variables and own attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def test_private_names_in_use_are_the_listed_ones():
    paths = list(Path(torchcomp.__file__).parent.rglob("*.py"))
    trees = [ast.parse(path.read_text()) for path in paths]
    # `_version` is a file of torchcomp, but also a private attribute of tensors.
    own = {name for tree in trees for name in defined(tree)}
    own |= {path.stem for path in paths} - {"_version"} | {"_fields"}  # of named tuples
    foreign = {name for tree in trees for name in used(tree)} - own
    listed = {name for names in PRIVATE.values() for name in names} | OF_FRAMEWORKS
    assert {name for name in foreign if PRIVATE_NAME.fullmatch(name)} == listed
