"""Architecture of torchcomp: imports run one way, few files send data, everything is short."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import torchcomp
from tests.support.patience import PATIENCE
from torchcomp.compressors import Identity
from torchcomp.specs import spec

PACKAGE = Path(torchcomp.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE).as_posix().removesuffix(".py"): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Rooms, and parts of them, from the bottom up: each imports from lower ones. Files of engine, specs
# and checkpoints are at several heights; among all files, imports have no cycle.
ROOMS = (
    {"routes/wire"},
    {"kernels"},
    {"compressors", "local_sgd/schedules", "local_sgd/outer_steps"},
    {"exchange", "routes/codec"},
    {"routes"},
    {"aggregators"},
    {"two_direction", "ddp"},
    {"fsdp"},
    {"ddp/entry", "local_sgd", "jointspar"},
    {"advisor", "guard"},
    {"integrations", "__init__", "__main__"},
)
FREE = {"engine", "specs", "checkpoints", "reference"}
HEIGHT = {room: height for height, rooms in enumerate(ROOMS) for room in rooms}
ANNEX = {"advisor", "guard", "integrations"}
# These import the annex inside a function, when it is asked for.
DOORS = {"ddp/register", "ddp/entry", "fsdp/register", "local_sgd/local_steps"}
DOORS |= {"__main__"}


def room_of(module):
    parts = [part for part in HEIGHT if "/" in part and f"{module}/".startswith(f"{part}/")]
    return parts[0] if parts else module.split("/")[0]


def file_of(parts):
    """Return the file of a module, or of the module that a name is in."""
    path = "/".join(parts)
    found = [each for each in (path, f"{path}/__init__") if each in SOURCES]
    return found[0] if found else file_of(parts[:-1]) if parts else "__init__"


def imported(module, tree):
    """Yield the modules that a file imports, and whether at its top; not those for types only."""
    typing_only = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and getattr(test.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if f"{name}.".startswith("torchcomp.") and id(node) not in typing_only:
                yield file_of(name.split(".")[1:]), node in tree.body


def upward(sources):
    """Return the imports from a higher room, or from the annex into the core."""
    found = []
    for module, tree in sources.items():
        mine = room_of(module)
        for other, at_top in imported(module, tree):
            theirs = room_of(other)
            asked_for = module in DOORS and not at_top
            annex = theirs in ANNEX and mine not in ANNEX and not asked_for
            above = HEIGHT.get(theirs, -1) > HEIGHT.get(mine, len(ROOMS)) and not asked_for
            if annex or above:
                found.append(f"{module} imports {other}")
    return found


def test_every_room_has_a_place():
    assert {room_of(module) for module in SOURCES} <= set(HEIGHT) | FREE


def test_imports_between_rooms_run_one_way_and_the_core_imports_no_annex():
    assert upward({k: v for k, v in SOURCES.items() if k not in ("__init__", "__main__")}) == []


def test_an_upward_import_is_found():
    for text in ("import torchcomp.ddp.hook", "def f():\n    from torchcomp.guard import watch"):
        assert upward({"routes/new": ast.parse(text)})


def test_imports_between_files_have_no_cycle():
    graph = {
        module: {other for other, at_top in imported(module, tree) if at_top}
        for module, tree in SOURCES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_annex_is_imported_when_it_is_asked_for():
    script = """
import sys, torchcomp
torchcomp.Averager
assert not any(name.startswith(("torchcomp.advisor", "torchcomp.guard")) for name in sys.modules)
assert torchcomp.Guard(every=3).every == 3
from torchcomp import *
assert watch is sys.modules["torchcomp.guard"].watch
assert Choice is sys.modules["torchcomp.advisor.auto"].Choice
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)


VERBS = ("all_", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier")
VERBS += ("send", "recv", "isend", "irecv", "batch_isend")
COLLECTIVES = {name for name in vars(dist) if name.startswith(VERBS)}
COLLECTIVES |= {name for name in vars(dist.ProcessGroup) if name.startswith("all")}


def sends(tree):
    """Whether a file uses a collective of torch.distributed, or of a process group."""
    for node in ast.walk(tree):
        owner, names = "", set()
        if isinstance(node, ast.ImportFrom):
            owner, names = node.module or "", {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            owner, names = ast.unparse(node.value), {node.attr}
        ours = owner == "dist" or owner.startswith("torch.distributed") or "group" in owner.lower()
        if ours and COLLECTIVES & names:
            return True
    return False


def test_two_files_send_data():
    senders = {module for module, tree in SOURCES.items() if sends(tree)}
    assert senders == {"exchange/private", "exchange/process_group"}


MOST_LINES = {"engine/averager": 550}


def test_files_are_short():
    lines = {name: len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in SOURCES}
    assert {name: n for name, n in lines.items() if n > MOST_LINES.get(name, 450)} == {}


def test_functions_are_short_and_use_no_assert():
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            # Python can disable it.
            assert not isinstance(node, ast.Assert), module
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= 60, f"{module} {node.name}"


# Mean has Identity as its default compressor.
OTHERS = [cls for cls in spec.COMPRESSORS if cls is not Identity]


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.name)
def test_a_compressor_is_named_only_in_its_file_and_in_the_registry(cls):
    naming = {
        module
        for module, tree in SOURCES.items()
        for node in ast.walk(tree)
        if getattr(node, "id", getattr(node, "name", None)) == cls.__name__
    }
    own = cls.__module__.removeprefix("torchcomp.").replace(".", "/")
    assert naming == {own, "compressors/__init__"}
