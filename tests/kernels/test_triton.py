"""Triton kernels without a GPU: interpreted, compiled for two GPUs, and where they cannot run."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torchcomp
from tests.kernels.forms import sparse_kernels, vectors
from tests.support.cases import only
from tests.support.logs import messages_of
from tests.support.patience import PATIENCE
from torchcomp.aggregators.rehearsal import rehearse
from torchcomp.kernels import backend
from torchcomp.kernels.segments import Segment

REASON = "Triton 3.7 is missing: sh tools/setup.sh --triton installs it; it needs no GPU"
HERE = Path(__file__).parent
INTERPRETED = sorted((HERE / "interpreted").glob("test_*.py"))
WITH_MORE_CASES = [path for path in INTERPRETED if "tests.support.cases" in path.read_text()]
FORMS = sorted(Path(torchcomp.__file__).parent.glob("kernels/*_triton.py"))


# --- Results --------------------------------------------------------------------------------------


def interpret(tests, *options):
    """Run tests of `interpreted`: in a process of their own, as Triton interprets all or none.

    They compare each kernel with the reference.
    """
    pytest.importorskip("triton", minversion="3.7", reason=REASON)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, str(tests)],
        check=False,
        timeout=3 * PATIENCE,  # a file has hundreds of cases
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_in_the_interpreter():
    interpret(HERE / "interpreted")


# One file at a time, because a slow machine takes minutes for all of them.
@pytest.mark.thorough
@pytest.mark.parametrize("file", WITH_MORE_CASES, ids=lambda path: path.stem)
def test_more_cases_in_the_interpreter(file):
    interpret(file, "-m", "thorough")


# --- Machine code ---------------------------------------------------------------------------------

N, K = 25_000_000, 250_000


def empty(*shape, dtype=torch.float32):
    """A tensor without memory: reading a value of it would raise an error, not wait."""
    return torch.empty(shape, dtype=dtype, device="meta")


def framed(offsets, memory):
    """Frames as far as kernels need them."""
    return SimpleNamespace(offsets=offsets, outgoing=memory, placed=[])


def launch_sparse(form, dtype, n):
    shards = [(n // 8 * rank, n // 8, K // 8) for rank in range(8)]
    g, e, rest, noise = empty(n, dtype=dtype), empty(n), empty(n), empty(n)
    frame, rows = empty(8 * n, dtype=torch.uint8), empty(64, 8 * n, dtype=torch.uint8)
    # The usual launches, and those for noise and fields that are not aligned.
    cases = [(None, [(0, n, K)], [16], None), ("int4", shards, range(17, 25), noise)]
    for fmt, segments, offsets, drawn in cases:
        frames = framed(offsets, frame)
        kernels = form.SparseTriton(
            vectors(*segments, dtype=dtype, device="meta", frames=frames), fmt
        )
        parts, index = kernels.encode_sum(g, e, rest, drawn)
        kernels.encode(g, index, None)
        kernels.select(g)
        kernels.subtract(index, parts, e)
        kernels.mean_of(rows, g, 64)


def launch_counted(form, dtype, n):
    parts, own = [[Segment(n // 8 * rank, n // 8, K)] for rank in range(8)], [Segment(0, n // 8, K)]
    g, e, rest, counts = empty(n, dtype=dtype), empty(n), empty(n), empty(8, dtype=torch.int32)
    device, received = g.device, empty(8 * n, dtype=torch.uint8)
    index, wide = empty(K, dtype=torch.int64), empty(8, dtype=torch.int64)
    owners = SimpleNamespace(rank=0, world_size=8, all_reduce=id, all_gather_rows=torch.clone)
    owners.check = lambda *arguments: None
    for fmt in (None, "int4"):
        place = dtype, owners, device, False
        kernels = form.Counted(fmt, parts, [own] * 8, range(16), 8, K / n, *place)
        # As `begin`, which would wait for the numbers.
        kernels._lay_out(counts, counts, wide)
        kernels.sizes, kernels._fills, kernels._bits, kernels._entries = [n], 500, 500, K
        kernels.write(g, index, None, False)
        kernels.write(rest, index, None, True)
        kernels.subtract(e, None, -1.0)
        kernels.mean(received, rest, None, 8)
    search = form.Search(own, range(8), [n], [True], owners, device)
    search(rest, e, empty(n), wide[:1], wide[:1])


def launch_elementwise(form, dtype, n):
    g, e, rest, noise = empty(n, dtype=dtype), empty(n), empty(n), empty(n)
    frame, rows = empty(8 * n, dtype=torch.uint8), empty(8, 8 * n, dtype=torch.uint8)
    for fmt, offset in (("int8", 16), ("int4", 17)):
        own = vectors((0, n, n), dtype=dtype, device="meta", frames=framed([offset], frame))
        kernels = form.ElementwiseTriton(own, fmt)
        parts = kernels.encode_sum(g, e, rest, noise if fmt == "int8" else None)
        kernels.subtract(parts, rest, 1.0)
        kernels.mean_of(rows, g, 8)
    for sent in (torch.bfloat16, torch.float16):
        cast, message = form.CastSum(dtype, sent, 8), empty(n, dtype=sent)
        cast.add(g, e, rest, message)


def launch_swap(form, dtype, n):
    form._launch_of.cache_clear()
    condition = empty(dtype=torch.bool)
    form.launch("swap", condition, empty(n, dtype=dtype), empty(n, dtype=dtype))
    form.launch("fill", condition, empty(n, dtype=dtype), 0.0)


SELECT = {"collect", "count_digits", "tally", "write"}
SPARSE = {*SELECT, "clear", "code", "fill", "count_bits", "decode", "add_up", "subtract"}
COUNTED = SPARSE - {"clear"} | {"lay_out", "share"}
LAUNCHES = {
    "sparse": (launch_sparse, SPARSE),
    "counted": (launch_counted, COUNTED),
    "elementwise": (launch_elementwise, {"_encode", "_add_up", "_cast_sum"}),
    "swap": (launch_swap, {"_swap", "_fill"}),
}


PARTS = {"table", "frames", "selection", "coding"}
"""What others launch."""


def test_every_form_is_compiled_below():
    stems = {path.name.removesuffix("_triton.py") for path in FORMS}
    assert stems == {*LAUNCHES, *PARTS}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compile for a GPU that is not there what functions launch, without launching it."""
    pytest.importorskip("triton", minversion="3.7", reason=REASON)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import jit

    kernels = []

    def compile_for(capability, function, *arguments):
        driver = SimpleNamespace(
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
        monkeypatch.setattr(jit, "driver", SimpleNamespace(active=driver))
        function(*arguments)
        return list({kernel.hash: kernel for kernel in kernels}.values())

    run = jit.JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        assert all(isinstance(size, int) for size in grid)
        kernels.append(run(self, *arguments, grid=grid, warmup=True, **options))

    monkeypatch.setattr(jit.JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return compile_for


def resources(kernels, folder):
    """Yield each kernel with its registers per thread, and the bytes on its stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for kernel in kernels:
        path = folder / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        told = subprocess.run([tool, "-res-usage", path], check=True, capture_output=True)
        usage = dict(word.split(":") for word in told.stdout.decode().split() if ":" in word[1:-1])
        yield kernel, int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


CASES = [
    (stem, capability, dtype, n)
    for stem in LAUNCHES
    for capability in (80, 90)
    for dtype in (torch.float32, torch.bfloat16)
    for n in (N, N - 1)
]


BARRIERS = {(stem, name) for stem in ("sparse", "counted") for name in ("add_up", "decode")}
BARRIERS.add(("counted", "lay_out"))

# The oldest GPU, with vectors that are not aligned.
USUAL = (80, torch.float32, N - 1)


@pytest.mark.parametrize("case", only(CASES, now=[(stem, *USUAL) for stem in LAUNCHES]))
def test_kernels_compile_without_spills(case, compiled, tmp_path):
    stem, capability, dtype, n = case
    launch, names = LAUNCHES[stem]
    form = import_module(f"torchcomp.kernels.{stem}_triton")
    kernels = compiled(capability, launch, form, dtype, n)
    assert {kernel.metadata.name for kernel in kernels} == names
    for kernel, registers, stack in resources(kernels, tmp_path):
        assert stack == 0, f"{kernel.metadata.name} spills registers"
        # What a multiprocessor has.
        assert registers * 32 * kernel.metadata.num_warps <= 65_536
        # A fused product and sum is not rounded in between.
        assert "fma.rn" not in kernel.asm["ptx"]
        assert not kernel.metadata.enable_fp_fusion
        # The interpreter runs one thread. On a GPU, a message is added before the next one begins.
        if (stem, kernel.metadata.name) in BARRIERS:
            assert "bar.sync" in kernel.asm["ptx"]


# --- Masks ----------------------------------------------------------------------------------------

# Blocks that are never partial: the bins of a histogram.
WHOLE = {
    ("selection_triton.py", "tl.load(counts + ((DONE - 1) * rows + segment) * BINS + digits)"),
    ("selection_triton.py", "tl.store(counts + (done * rows + segment) * BINS + bins, zeros)"),
}


def unmasked(name, tree):
    """Accesses of memory without a mask whose address comes from a block of positions."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    blocks = {function: set() for function in functions}
    size = -1
    while size != sum(map(len, blocks.values())):
        size = sum(map(len, blocks.values()))
        for node in functions.values():
            spread(node, blocks, functions)
    for function, node in functions.items():
        for call in ast.walk(node):
            if called(call) in ("tl.load", "tl.store", "tl.atomic_add", "tl.atomic_or"):
                text, block = ast.unparse(call), is_block(call.args[0], blocks[function])
                masked = any(keyword.arg == "mask" for keyword in call.keywords)
                if block and not masked and (name, text) not in WHOLE:
                    yield text


def called(node):
    return ast.unparse(node.func) if isinstance(node, ast.Call) else None


def is_block(node, names):
    """Whether an expression contains a block of positions, or what was computed from one."""
    if called(node) in ("tl.sum", "tl.max"):
        return False
    if called(node) == "tl.arange":
        return True
    if isinstance(node, ast.Name):
        return node.id in names
    return any(is_block(child, names) for child in ast.iter_child_nodes(node))


def spread(function, blocks, functions):
    """Add the names of blocks in a function, and the arguments of functions that it calls."""
    own = blocks[function.name]
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign) and is_block(node.value, own):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                own.update(name.id for name in ast.walk(target) if isinstance(name, ast.Name))
        if called(node) in functions:
            parameters = functions[called(node)].args.args
            for parameter, argument in zip(parameters, node.args, strict=False):
                if is_block(argument, own):
                    blocks[called(node)].add(parameter.arg)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_every_access_to_a_block_has_a_mask(path):
    assert list(unmasked(path.name, ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "access", ["tl.load(x + at)", "tl.store(at + x, 1)", "helper(x, at)", "tl.atomic_add(x + y, 1)"]
)
def test_an_access_without_a_mask_is_found(access):
    text = f"""
def helper(pointer, positions):
    tl.load(pointer + positions)
def kernel(x, n):
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    y = 2 * at
    tl.load(x + at, mask=at < n)
    tl.load(x + tl.sum(at, 0))
    {access}
"""
    assert len(list(unmasked("new.py", ast.parse(text)))) == 1


# --- Machines on which no kernel can run ----------------------------------------------------------


@pytest.fixture
def on_triton(monkeypatch):
    """Look for Triton forms for tensors of the CPU, so that a method launches them here."""
    pytest.importorskip("triton", minversion="3.7", reason=REASON)
    monkeypatch.setattr(backend, "_LIBRARY", {"cpu": "triton"})
    backend.fast_form.cache_clear()
    rehearse.cache_clear()
    yield
    backend._failed.clear()
    backend.fast_form.cache_clear()
    rehearse.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("on_triton")
def test_a_launch_that_fails_is_found_before_training(dtype, caplog):
    # Nothing is simulated: Triton cannot launch a kernel on tensors of the CPU.
    method, cpu = torchcomp.parse("ef(topk(0.01))"), torch.device("cpu")
    assert backend.fast_form("sparse", "cpu").__name__ == "torchcomp.kernels.sparse_triton"
    rehearse(method, dtype, cpu)
    assert ["Triton" in message for message in messages_of("kernels.backend", caplog)] == [True]
    assert backend.fast_form("sparse", "cpu") is None
    assert sparse_kernels((0, 1000, 3)).select(torch.arange(1000.0)).tolist() == [997, 998, 999]
