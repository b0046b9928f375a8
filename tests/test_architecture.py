"""Architecture of torchcomp: imports between layers, calls of collectives, lengths of functions."""

import __future__

import ast
import graphlib
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.support.codecs import codec_of, packed, unpacked
from tests.support.patience import PATIENCE
from torchcomp.aggregators import EF
from torchcomp.compressors import Compressor, Identity, Warmup
from torchcomp.compressors.base import Encoded
from torchcomp.ddp.hook import hook
from torchcomp.engine.keys import Key
from torchcomp.routes.wire import Field
from torchcomp.specs import spec

PACKAGE = Path(torchcomp.__file__).parent

# Rooms whose files are on several layers: each file is a unit of its own.
SPLIT = ("engine", "specs", "checkpoints")
# From the bottom up. A module (or sub-package) imports from lower layers or from its own layer.
LAYERS = [
    {*SPLIT, "engine/compat", "engine/host", "engine/profiling", "reference"},
    {"specs/errors", "specs/moved", "specs/version"},
    {"specs/checks"},
    {"specs/learning_rates"},
    {"specs/component", "engine/draws", "engine/keys", "routes/wire"},
    {"kernels"},
    {"compressors", "local_sgd/schedules", "local_sgd/outer_steps"},
    {"engine/bucket", "exchange/nodes", "exchange/traffic", "routes/codec"},
    {"exchange", "checkpoints/pieces"},
    {"engine/means", "engine/state", "engine/prepared"},
    {"engine/residuals", "routes"},
    {"aggregators"},
    {"specs/auto"},
    {"specs/spec", "engine/stats", "engine/nonfinite", "checkpoints/checkpoint"},
    {"engine/method_in_use", "engine/observer", "checkpoints/saved_slots", "engine/settlement"},
    {"checkpoints/resume"},
    {"checkpoints/redistribution"},
    {"engine/averager", "checkpoints/gathering"},
    {"checkpoints/per_rank"},
    {"two_direction"},
    {"ddp", "fsdp", "algorithms"},
    {"ddp/entry"},
    {"local_sgd", "jointspar"},
    {"advisor", "guard", "schedules"},
    {"__init__"},
    {"__main__", "integrations"},
]
# What hangs on the core. A few functions import it when it is asked for, and nothing else does.
ANNEX = {"advisor", "guard"}
DOORS = {"ddp/register.py", "fsdp/register.py", "ddp/entry.py"}
DOORS |= {"local_sgd/local_steps.py"}
# Parts of a room that lower layers use as well: each is a unit of its own.
PARTS = ("local_sgd/schedules", "local_sgd/outer_steps", "routes/wire", "routes/codec")
PARTS += ("exchange/nodes", "exchange/traffic", "ddp/entry")
HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}

# Functions that send data or wait for other ranks. Process groups can be created in any file.
VERBS = ("all_", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier")
VERBS += ("send", "recv", "isend", "irecv", "batch_isend")
COLLECTIVES = {name for name in vars(dist) if name.startswith(VERBS)}
GROUP_METHODS = {name for name in vars(dist.ProcessGroup) if name.startswith("all")}


@dataclass(frozen=True)
class Source:
    """One file of a package, by its path within the package."""

    path: str
    tree: ast.Module

    @property
    def unit(self):
        """The top-level module or sub-package that the file belongs to, or its part."""
        return unit_of(self.path.removesuffix(".py"))


def unit_of(path):
    part = next((each for each in PARTS if f"{path}/".startswith(f"{each}/")), None)
    room, *rest = path.split("/")
    return part or (
        f"{room}/{rest[0]}" if room in SPLIT and rest != ["__init__"] and rest else room
    )


def read(package):
    paths = sorted(package.rglob("*.py"))
    named = [(path.relative_to(package).as_posix(), path.read_text()) for path in paths]
    return [Source(name, ast.parse(text)) for name, text in named]


SOURCES = read(PACKAGE)


def planted(path, text):
    """The sources of torchcomp with one file added or replaced."""
    return [source for source in SOURCES if source.path != path] + [Source(path, ast.parse(text))]


def test_the_sources_are_found():
    assert {"__init__.py", "compressors/topk.py", "ddp/hook.py"} <= {s.path for s in SOURCES}


# --- Imports run one way --------------------------------------------------------------------------


def imported_units(source, units):
    """The units of torchcomp that a file imports, at the top level or inside functions."""
    at_once = {*source.tree.body}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{absolute(node, source)}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "torchcomp":
                unit = unit_of(rest.replace(".", "/"))
                if unit not in ANNEX or source.path not in DOORS or node in at_once:
                    yield unit if unit in units else "__init__"


def absolute(node, source):
    """The absolute module name of a ``from`` import, with its leading dots resolved."""
    if not node.level:
        return node.module
    parents = ["torchcomp", *source.path.split("/")[:-1]]
    base = parents[: len(parents) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def imports(sources):
    """Map each unit to the other units that it imports."""
    units = {source.unit for source in sources}
    graph = {unit: set() for unit in units}
    for source in sources:
        graph[source.unit] |= set(imported_units(source, units)) - {source.unit}
    return graph


def upward_imports(sources):
    return [
        f"{unit} imports {other}"
        for unit, others in imports(sources).items()
        for other in others
        if HEIGHT.get(other, -1) > HEIGHT.get(unit, len(LAYERS))
    ]


def test_every_module_is_in_a_layer():
    missing = {source.unit for source in SOURCES} - set(HEIGHT)
    assert not missing, f"add {missing} to LAYERS"


def test_nothing_imports_upward():
    assert upward_imports(SOURCES) == []


def test_imports_have_no_cycle():
    graphlib.TopologicalSorter(imports(SOURCES)).prepare()


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        (
            "routes/wire.py",
            "from torchcomp.routes.codec import Codec",
            "routes/wire imports routes/codec",
        ),
        ("routes/wire.py", "import torchcomp.routes.codec", "routes/wire imports routes/codec"),
        (
            "routes/wire.py",
            "from torchcomp.routes import codec",
            "routes/wire imports routes/codec",
        ),
        ("routes/wire.py", "from . import codec", "routes/wire imports routes/codec"),
        (
            "routes/wire.py",
            "def f():\n    from .codec import Codec",
            "routes/wire imports routes/codec",
        ),
        ("compressors/new.py", "from ..aggregators import EF", "compressors imports aggregators"),
        (
            "compressors/new.py",
            "from torchcomp.specs.spec import parse",
            "compressors imports specs/spec",
        ),
        ("routes/codec.py", "from torchcomp import parse", "routes/codec imports __init__"),
        ("aggregators/new.py", "import torch, torchcomp.ddp.hook", "aggregators imports ddp"),
        ("routes/new.py", "from torchcomp.aggregators import EF", "routes imports aggregators"),
        (
            "exchange/new.py",
            "from torchcomp.engine.state import State",
            "exchange imports engine/state",
        ),
        (
            "engine/state.py",
            "from torchcomp.engine.averager import Averager",
            "engine/state imports engine/averager",
        ),
        (
            "engine/averager.py",
            "def f():\n    from torchcomp.guard import watch",
            "engine/averager imports guard",
        ),
        ("ddp/register.py", "from torchcomp.guard import watch", "ddp imports guard"),
        ("ddp/handle.py", "from torchcomp.advisor.auto import Choice", "ddp imports advisor"),
        (
            "jointspar/new.py",
            "def f():\n    from torchcomp.advisor import plan",
            "jointspar imports advisor",
        ),
    ],
)
def test_an_upward_import_is_found(path, text, found):
    assert upward_imports(planted(path, text)) == [found]


def test_a_cycle_is_found():
    sources = planted("engine/bucket.py", "from torchcomp.engine.state import State")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports(sources)).prepare()


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


@pytest.mark.parametrize(
    "text", ["from torchcomp.engine.keys import Key", "from .topk import TopK"]
)
def test_a_downward_import_is_allowed(text):
    assert upward_imports(planted("compressors/new.py", text)) == []


# --- One file calls collectives -------------------------------------------------------------------


def dotted(node):
    """The dotted name of an expression such as torch.distributed.all_reduce, or ''."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def aliases(tree):
    """Map each imported name of a file to its full name."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return known


def collectives(source):
    """Yield the collectives of torch.distributed that a file uses, also through getattr."""
    known = aliases(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "getattr":
            owner, name = node.args[0], getattr(node.args[1], "value", "")
            node = ast.Attribute(owner, name)
        head, _, rest = dotted(node).partition(".")
        full = ".".join(filter(None, [known.get(head, head), rest]))
        module, _, name = full.rpartition(".")
        of_a_module = module.startswith("torch.distributed") and name in COLLECTIVES
        if of_a_module or (module and name in GROUP_METHODS):
            yield name


def callers_of_collectives(sources):
    # engine/compat.py only looks up a name that differs between versions of torch.
    return {s.path for s in sources if any(collectives(s)) and s.path != "engine/compat.py"}


def test_four_files_send_data():
    # doctor only measures links, before anything trains.
    assert callers_of_collectives(SOURCES) == {
        "advisor/doctor/links.py",
        "exchange/managed.py",
        "exchange/private.py",
        "exchange/process_group.py",
    }


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.broadcast(x, 0)",
        "from torch import distributed\ndistributed.barrier()",
        "from torch.distributed import all_gather_object\nall_gather_object(x, y)",
        "from torch.distributed import all_to_all_single as swap\nswap(x, y)",
        "def f(group):\n    group.allreduce([x]).wait()",
        "import torch.distributed as dist\ngetattr(dist, 'all_gather_into_tensor')(x, y)",
        "def f():\n    from torch.distributed.nn.functional import all_reduce\n    all_reduce(x)",
    ],
)
def test_a_collective_in_another_file_is_found(text):
    assert "spec.py" in callers_of_collectives(planted("spec.py", text))


def test_creating_a_group_is_not_a_collective():
    text = "import torch.distributed as dist\ndist.new_group([0]); exchange.gather(x)"
    assert "spec.py" not in callers_of_collectives(planted("spec.py", text))


def test_hook_is_a_function_whose_annotations_are_types():
    # DDP compares the annotations with types. "from __future__ import annotations" would turn them
    # into strings.
    code = hook.__code__
    assert not code.co_flags & __future__.annotations.compiler_flag
    assert code.co_varnames[:2] == ("state", "bucket")
    annotations = hook.__annotations__
    assert annotations["bucket"] is dist.GradBucket
    assert annotations["return"] == torch.futures.Future[torch.Tensor]


# --- Size and style -------------------------------------------------------------------------------


def functions(sources):
    """Map each function and method to the lines of its body, without the docstring."""
    return {
        f"{source.path}:{node.lineno} {node.name}": body_lines(node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def body_lines(function):
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_functions_are_short():
    assert {name: lines for name, lines in functions(SOURCES).items() if lines > 60} == {}


ROOMS = sorted({path.parent.name for path in PACKAGE.glob("*/__init__.py")})


def helpers(sources):
    """Yield the lengths of functions and private methods.

    Properties and public methods are left out, because their interface often makes them short.
    """
    for source in sources:
        for owner in ast.walk(source.tree):
            for node in ast.iter_child_nodes(owner):
                if not isinstance(node, ast.FunctionDef):
                    continue
                private = node.name.startswith("_") and not node.name.startswith("__")
                decorated = {dotted(decorator) for decorator in node.decorator_list}
                if (private or not isinstance(owner, ast.ClassDef)) and not decorated & IMPLIED:
                    yield body_lines(node)


IMPLIED = {"property", "cached_property", "abstractmethod"}


@pytest.mark.parametrize("room", ROOMS)
def test_functions_of_a_room_are_neither_too_short_nor_too_long(room):
    sources = [source for source in SOURCES if source.path.startswith(f"{room}/")]
    assert statistics.median(functions(sources).values()) <= 10
    lengths = list(helpers(sources))
    assert len(lengths) < 10 or statistics.median(lengths) >= 4


def test_lines_of_a_function_are_counted_without_its_docstring():
    text = 'def f():\n    """A.\n\n    B.\n    """\n    x = (\n        1\n    )\n\n    return x\n'
    text += 'class C:\n    async def g(self):\n        """Abstract."""\n    def h(self): ...\n'
    assert list(functions([Source("new.py", ast.parse(text))]).values()) == [5, 0, 1]


def asserts(sources):
    return [
        f"{source.path}:{node.lineno}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert)
    ]


def test_no_assert_is_used_because_python_can_disable_it():
    assert asserts(SOURCES) == []
    assert asserts(planted("new.py", "def f(x):\n    assert x")) == ["new.py:2"]


# --- A new method needs one file and one line -----------------------------------------------------


@dataclass(frozen=True)
class MeanOnly(Compressor):
    """A compressor that exists in this file only: every element becomes the vector's mean."""

    name: ClassVar[str] = "meanonly"

    shift: float = 0.0

    def layout(self, numel, dtype):
        return (Field("mean", dtype, min(1, numel)),)

    def encode(self, x, vectors, key):
        parts = [x[v.span] for v in vectors]
        return Encoded([(p.mean().view(1) + self.shift if p.numel() else p,) for p in parts])

    def accumulate(self, messages, out, vectors, key, weight=1.0):
        for message in messages:
            for v, (mean,) in zip(vectors, message, strict=True):
                out[v.span].add_(mean.to(out.dtype), alpha=weight)

    def alpha(self, numel):
        return 1 / numel if numel else 1.0

    def omega(self, numel):
        return None


def test_a_new_compressor_needs_its_class_and_its_registry_line(monkeypatch):
    monkeypatch.setitem(spec.COMPONENTS, MeanOnly.name, MeanOnly)
    method = torchcomp.parse("ef(meanonly(shift=1.0))")
    assert method == EF(MeanOnly(1.0))
    assert torchcomp.parse(str(method)) == method

    codec = codec_of(method.compressor, (2, 3))
    message = codec.encode(torch.arange(5.0), Key(0))
    out = torch.empty(5)
    codec.mean([unpacked(codec, packed(codec, message))], out, Key(0), 1)
    assert out.tolist() == [3.0] * 5

    plan = torchcomp.explain("ef(meanonly)", numel=1000, world_size=8)
    assert (plan.message_bytes, plan.collective) == (4, "allgather")


def files_naming(cls):
    return {
        source.path
        for source in SOURCES
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Name) and node.id == cls.__name__)
        or (isinstance(node, ast.alias) and node.name == cls.__name__)
        or (isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    }


# Mean has Identity as its default compressor, and dgc's `warmup_steps` is short for a Warmup.
OTHERS = [cls for cls in spec.COMPRESSORS if cls not in (Identity, Warmup)]


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.name)
def test_a_compressor_is_named_only_in_its_file_and_in_the_registry(cls):
    own = f"{cls.__module__.removeprefix('torchcomp.').replace('.', '/')}.py"
    assert files_naming(cls) == {own, "compressors/__init__.py"}
