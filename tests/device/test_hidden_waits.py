"""A lint: code that may run on tensors of a device makes the host wait only where it is named here.

On CUDA, an assignment of a number to an index copies it from pageable host memory and waits for the
stream; an assignment to a slice is a fill. A tensor that is made from numbers on a device is a copy
as well. The lint reads the source, so it also sees code that no other test runs. It cannot know
types; the counter of launches and waits sees the rest.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchcomp

PACKAGE = Path(torchcomp.__file__).parent

OUTSIDE = (
    # These run before or after training, or on numbers of the host.
    *("exchange/nodes.py", "specs/spec.py", "specs/component.py", "specs/checks.py"),
    *("engine/compat.py", "local_sgd/schedules.py", "integrations/"),
    # Checkpoints and simulations.
    *("checkpoints/checkpoint.py", "checkpoints/redistribution.py", "checkpoints/gathering.py"),
    *("two_direction/", "reference.py"),
    # Measure and predict, before training; NumPy.
    *("advisor/", "jointspar/bandit.py"),
)
"""Files and folders that may wait. Numba's kernels may as well: they run on the CPU only."""

NAMED = {
    "once, or seldom": """
        checkpoints/resume.py Resumable._compare_ranks
        engine/state.py hand_over
        exchange/base.py Exchange.same
        exchange/process_group.py ProcessGroupExchange.gather_objects
        local_sgd/batchnorm.py _forward_passes _reached
        local_sgd/local_steps.py _creates_state
        local_sgd/local_sgd.py LocalSGD.backward
    """,
    "the step has failed": """
        engine/nonfinite.py FiniteWatch.error
        exchange/base.py _senders
    """,
    "the caller asks for numbers": """
        engine/host.py copy_from.wait
        engine/settlement.py Steps.residual_norms
    """,
    "the copy of an earlier step has ended": """
        ddp/loop.py LossScale.read
        guard/replicas.py Replicas.differing
    """,
    "the one wait of a step: the decision whether it counts": """
        exchange/base.py Exchange.conclude_later.conclusion
    """,
    "one wait per bucket, or two: how many entries, or which layers, others keep": """
        jointspar/sampler.py Sampler.learn Sampler.union
        routes/sharded.py Messages.begin
    """,
    "starts a copy to pinned memory": """
        engine/host.py copy_from
    """,
    "values that the host can read: options, sizes, learning rates, NumPy": """
        aggregators/powersgd.py _Matrices.__init__
        engine/keys.py check_seed
        engine/state.py by_name
        fsdp/units.py Unit.divisor
        guard/observer.py GuardObserver._judge
        guard/report.py replica_alarm
        guard/watch.py BucketWatch.read
        jointspar/jointspar.py JointSpar.p JointSpar.probability
        jointspar/sampler.py Sampled.aggregate Sampler.__init__ Sampler.state_dict
        kernels/elias_fano.py _Shape.__init__
        kernels/select.py largest
        kernels/sparse.py Sparse._coded
        local_sgd/local_steps.py LocalSteps._lrs
        routes/searches.py HostSearch Search _bins find_largest
        routes/sharded_load.py sharded_load _frame _shards
        routes/wire.py Frames.__init__ Frames.headers Frames.seal
    """,
}
"""Why files and functions may wait."""

EXCEPTIONS = {
    f"{file} {function}"
    for lines in NAMED.values()
    for file, *functions in map(str.split, lines.strip().splitlines())
    for function in functions
}

METHODS = {
    *("item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "bincount", "unique"),
    *("masked_select", "equal", "allclose", "synchronize"),
}
"""Calls that wait, as methods or as functions of torch."""

FROM_NUMBERS = {"tensor", "as_tensor", "from_numpy"}
HOST_TYPES = {"bool", "int", "float"}
TRUTHS = {"any", "all", "isfinite", "isnan"}


def waits(node: ast.AST) -> Iterator[str]:
    """What in a node, apart from its children, can make the host wait."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Subscript) and _copies(each.slice, node.value):
                    yield "an assignment to an index"
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Compare):
        yield "a boolean index"
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield from _truths(node.test)
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield from _truths(test)


def _copies(index: ast.expr, value: ast.expr) -> bool:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    if any(isinstance(part, ast.Slice) for part in parts):
        return False
    return any(map(_is_number, parts)) or _is_number(value)


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)


def _is_setting(value: ast.expr) -> bool:
    """Whether a value is a number, an attribute, or an entry with a name."""
    if isinstance(value, ast.Subscript):
        value = value.slice
        return isinstance(value, ast.Constant) and isinstance(value.value, str)
    return isinstance(value, ast.Attribute | ast.Constant)


def _calls(call: ast.Call) -> Iterator[str]:
    function, options = call.func, {option.arg for option in call.keywords}
    if isinstance(function, ast.Name):
        if function.id in HOST_TYPES and call.args and not _is_setting(call.args[0]):
            yield f"{function.id}()"
        return
    if not isinstance(function, ast.Attribute):
        return
    name = function.attr
    made = {n.attr for n in ast.walk(function.value) if isinstance(n, ast.Attribute)}
    if name in METHODS or (name in FROM_NUMBERS and "device" in options):
        yield f".{name}()"
    elif name == "to" and (made & FROM_NUMBERS or "'cpu'" in map(ast.unparse, call.args)):
        yield ".to()"
    elif name == "repeat_interleave" and "output_size" not in options:
        yield ".repeat_interleave()"


def _truths(test: ast.expr) -> Iterator[str]:
    for node in ast.walk(test):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr in TRUTHS:
            yield f"the truth of .{function.attr}()"


def found_in(source: str) -> list[tuple[str, int, str]]:
    """Function, line and kind of each wait, except where the host can read the values."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        found.extend((function, getattr(node, "lineno", 0), kind) for kind in waits(node))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".strip(".")
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If | ast.IfExp) and "can_read(" in ast.unparse(node.test):
            children = node.orelse if isinstance(node, ast.If) else [node.orelse]
        for child in children:
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def test_only_what_is_named_here_waits() -> None:
    unnamed, used = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(OUTSIDE) or name.endswith(("_numba.py", "_triton.py")):
            continue
        for function, line, kind in found_in(path.read_text()):
            entry = f"{name} {function}"
            if entry not in EXCEPTIONS:  # of its class
                entry = entry.rpartition(".")[0]
            used.add(entry)
            if entry not in EXCEPTIONS:
                unnamed.append(f"{name}:{line} {function}: {kind}")
    assert not unnamed, "\n".join(["these can make the host wait for a device:", *unnamed])
    unused = EXCEPTIONS - used
    assert not unused, "remove the exceptions that nothing uses any more"


def test_the_files_outside_exist() -> None:
    assert all((PACKAGE / name).exists() for name in OUTSIDE)


@pytest.mark.parametrize(
    "line",
    [
        "x[0] = 5",
        "x[index] = 1.0",
        "x[0] += 1",
        "x[x > 3]",
        "x.item()",
        "float(x.sum())",
        "int(n[1])",
        "bool(x)",
        "x.cpu()",
        "x.to('cpu')",
        "x.bincount(minlength=3)",
        "torch.tensor(5, device=x.device)",
        "torch.from_numpy(n).to(d)",
        "x.repeat_interleave(n)",
        "if x.isfinite().all(): pass",
        "y = 1 if (x > 0).any() else 2",
        "[n for n in m if not n.isfinite().all()]",
        "if host.can_read(x):\n    pass\nelse:\n    x.item()",
    ],
)
def test_the_lint_finds(line: str) -> None:
    assert found_in(line)
