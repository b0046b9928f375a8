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
from tests.support.private_names import PRIVATE, PRIVATE_OF_FRAMEWORKS
from torchcomp.engine.compat import listed_bucket_caps, skips_unused_parameters

PACKAGE = Path(torchcomp.__file__).parent
TABLES = (PRIVATE, PRIVATE_OF_FRAMEWORKS)
LISTED = {name for table in TABLES for names in table.values() for name in names}


# --- This torch has every listed name -------------------------------------------------------------


@pytest.fixture(scope="module")
def group():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
FSDP_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"


@pytest.fixture(scope="module")
def instances(group):
    """An object for each owner in PRIVATE whose names are not those of a module or class."""
    parameter = nn.Parameter(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import itself warns about torch.jit.script
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 1.0})
    module = nn.Linear(1, 1)
    sharded = fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))
    state = sharded._get_fsdp_state()
    return {
        "torch.amp.GradScaler": torch.amp.GradScaler("cpu"),
        "torch.distributed.Backend.Options": group._get_backend(torch.device("cpu")).options,
        FSDP_STATE: state,
        FSDP_GROUP: state._fsdp_param_group,
        "torch._dynamo.OptimizedModule": torch.compile(module, backend="eager"),
        "torch.nn.Parameter": parameter,
        "torch.nn.parallel.DistributedDataParallel": DistributedDataParallel(module),
        "torch.optim.Optimizer": torch.optim.SGD([parameter]),
    }


def resolve(path):
    """Import the module, or the attribute of a module, at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(resolve(module), name)


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in PRIVATE.items() for name in names]
)
def test_this_torch_has_the_private_name(owner, name, instances):
    if owner == FSDP_GROUP and not hasattr(FSDPModule, "set_all_reduce_hook"):
        pytest.skip("FSDP2 has an all-reduce hook since torch 2.7")
    has = instances[owner] if owner in instances else resolve(owner)
    assert hasattr(has, name), f"torch {torch.__version__} has no {owner}.{name}"


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


PATHS = list(PACKAGE.rglob("*.py"))
TREES = [ast.parse(path.read_text()) for path in PATHS]
USED = {name for tree in TREES for name in used(tree)}
# `_version` is a file of torchcomp, but also a private attribute of tensors.
FILES = {path.stem for path in PATHS} - {"_version"}
DEFINED = {name for tree in TREES for name in defined(tree)} | FILES


def private_names(text=""):
    """The private names that torchcomp and `text` use and do not define: they are torch's."""
    tree = ast.parse(text)
    foreign = (USED | set(used(tree))) - DEFINED - set(defined(tree))
    return {name for name in foreign if PRIVATE_NAME.fullmatch(name)}


def test_private_names_in_use_are_the_listed_ones():
    assert private_names() == LISTED


def test_a_new_private_name_is_found_and_one_of_torchcomp_is_not():
    new = ["model._fresh = 1", "getattr(model, '_fresh')", "from torch._fresh.part import f"]
    assert all(private_names(text) == LISTED | {"_fresh"} for text in new)
    own = ["self._own = 1", "def _own(): ...", "_own: int = 1"]
    assert all(private_names(f"{text}\nother._own") == LISTED for text in own)


# --- Differences between versions -----------------------------------------------------------------


class Newer(nn.Module):
    """Options of DDP that torch 2.6 does not have."""

    skip_all_reduce_unused_params = True
    bucket_bytes_cap_list = (10, 20)


def test_options_that_a_torch_does_not_have_are_off():
    assert (skips_unused_parameters(nn.Module()), listed_bucket_caps(nn.Module())) == (False, ())
    assert (skips_unused_parameters(Newer()), listed_bucket_caps(Newer())) == (True, (10, 20))
