"""Test torchcomp on the GPUs of this machine, and measure it there. Without a GPU, say what lacks.

    python tools/gpu.py                               # what `make gpu` runs
    python tools/gpu.py --python .venv/bin/python python3     # the first that sees a GPU
    python tools/gpu.py --rehearse                    # the same on the CPU, with tiny sizes

Nothing is installed, so it also runs on a machine without a network. The tests run file by file,
each in a process of its own: a file that hangs, or that breaks the CUDA context, spoils no other.
What is measured goes to benchmarks/results and from there into docs/performance.md.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE_SECONDS = 45  # a file of tests for which less is left is not started
LONGEST = {"tests/gpu/test_ranks.py": 90}  # files that take longer, beside others
TESTS = sorted(
    (path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/gpu/test_*.py")),
    # The longest first: each then has all of the time.
    key=lambda name: (-LONGEST.get(name, FILE_SECONDS), name),
)
SHARED = ["tests/kernels", "-k", "cuda"]
"""Tests of the kernels that run on each device there is."""

MINUTES = 9.5  # for all of it
TEST_SECONDS = 300  # for the tests
WARM_SECONDS = 90  # of these, to compile kernels
SPARE_SECONDS = 20  # to write the page, after the time for the benchmarks

# Options of pyproject.toml that an older pytest, or one without plugins, refuses.
LENIENT = ["-o", "addopts=", "-o", "minversion=7.0", "-W", "default", "-p", "no:cacheprovider"]
# Verbose, so that the output of a hung file ends with the test that hangs.
PYTEST = [
    "-m",
    "pytest",
    *LENIENT,
    # Where a test that takes so long is, without ending it as pytest-timeout would.
    "-o",
    "faulthandler_timeout=120",
    "-v",
    "-ra",
    "--tb=short",
    "--show-capture=no",
]
PYTEST += ["-m", "not slow and not thorough and not integrations"]

# Commands in progress. They have process groups of their own, which Ctrl-C does not reach.
RUNNING: "list[subprocess.Popen[str]]" = []

PROBE = """
import importlib.util, json, sys
facts = {"python": sys.version.split()[0], "devices": []}
names = ("torch", "numpy", "triton", "numba", "pytest", "hypothesis")
facts["missing"] = [name for name in names if importlib.util.find_spec(name) is None]
from importlib.metadata import packages_distributions, version
from tests.gpu.compiler import c_compiler
facts["compiler"] = c_compiler()
# Nightly builds of torch bring Triton under another name.
named = packages_distributions().get("triton")
facts["triton"] = version(named[0]) if named else "none"
if "torch" not in facts["missing"]:
    import torch
    facts["torch"], facts["cuda"] = torch.__version__, torch.version.cuda
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["devices"] = [torch.cuda.get_device_name(i) for i in range(count)]
print(json.dumps(facts))
"""
LACKS = {
    "triton": "Triton is missing: the kernels run in plain torch",
    "numba": "Numba is missing: the tests compare with the kernels in NumPy and torch",
    "pytest": "pytest is missing: no test can run",
    "hypothesis": "hypothesis is missing: no test can run",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to try")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    options = parser.parse_args()
    problems = []
    for python in dict.fromkeys(options.python):
        facts = probe(python)
        problem = why_not(facts, options.rehearse)
        if problem is None:
            return run(python, facts, options.rehearse)
        problems.append(f"{python}: {problem}")
    print(
        "make gpu needs an NVIDIA GPU with its driver, and a Python with a CUDA build of torch. "
        f"Here is none: {'; '.join(problems)}. make gpu PYTHON=... tries another Python."
    )
    return 0


# --- What there is --------------------------------------------------------------------------------


def probe(python: str) -> dict[str, Any] | None:
    """What an interpreter has; None if it cannot run."""
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, cwd=ROOT)
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
    return facts


def why_not(facts: dict[str, Any] | None, rehearse: bool) -> str | None:
    """Why an interpreter cannot be used; None if it can."""
    if facts is None:
        return "not found, or it does not run"
    absent = [name for name in ("torch", "numpy") if name in facts["missing"]]
    if absent:
        return f"Python {facts['python']} has no {' and no '.join(absent)}"
    if rehearse or facts["devices"]:
        return None
    if facts["cuda"] is None:
        return f"torch {facts['torch']} is a build without CUDA"
    return f"torch {facts['torch']} finds no CUDA device"


def lacks(facts: dict[str, Any]) -> list[str]:
    """What is missing and what follows from it, one sentence each."""
    found = [text for name, text in LACKS.items() if name in facts["missing"]]
    if facts["compiler"] is None:
        found.append("a C compiler is missing: Triton cannot launch, and kernels run in torch")
    if len(facts["devices"]) == 1:
        found.append("there is one GPU: the tests for several are skipped")
    return found


# --- What is run ----------------------------------------------------------------------------------


def run(python: str, facts: dict[str, Any], rehearse: bool) -> int:
    """Run tests and benchmarks; return the exit status."""
    start = time.monotonic()
    on = "the CPU, as a rehearsal" if rehearse else ", ".join(facts["devices"])
    versions = f"Python {facts['python']}, torch {facts['torch']}, Triton {facts['triton']}"
    say(f"on {on}, with {python}: {versions}")
    for text in lacks(facts):
        say(text)
    failed, left_out = [], []
    if not {"pytest", "hypothesis"} & set(facts["missing"]):
        warm(python, rehearse)
        left = TEST_SECONDS - (time.monotonic() - start)
        failed, left_out = tested(python, rehearse, left)
    left = 60 * MINUTES - SPARE_SECONDS - (time.monotonic() - start)
    failed += measured(python, rehearse, left)
    if left_out:
        say(f"left out, as the time for tests was over: {', '.join(left_out)}")
    say(f"{(time.monotonic() - start) / 60:.1f} minutes; failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


def warm(python: str, rehearse: bool) -> None:
    """Compile kernels into the cache on disk. What fails here fails in the tests as well."""
    status, output = watched([python, "-m", "tests.gpu.warm"], WARM_SECONDS, place(rehearse))
    print(output[-12_000:], end="", flush=True)
    say(f"kernels compiled: {'all' if status == 0 else status}")


def tested(python: str, rehearse: bool, seconds: float) -> tuple[list[str], list[str]]:
    """Run the tests; return the files that failed, and those that were not started in time.

    Print the output of a file as it ends.
    """
    files = [[name] for name in TESTS] + ([] if rehearse else [SHARED])
    deadline = time.monotonic() + seconds
    env = {**place(rehearse), "TORCHCOMP_DEADLINE": str(deadline)}
    left_out: list[str] = []

    def one(arguments: list[str]) -> list[str]:
        left = deadline - time.monotonic()
        if left < LONGEST.get(arguments[0], FILE_SECONDS):
            left_out.append(arguments[0])
            return []
        status, output = watched([python, *PYTEST, *arguments], left, env)
        say(f"{arguments[0]}: {output.strip().rpartition(chr(10))[2]}")
        # 5: no test was selected.
        return failures(arguments[0], (0 if status == 5 else status, output))

    # A few at a time. They share the GPU, which only makes races more likely to show.
    with ThreadPoolExecutor(1 if rehearse else 3) as pool:
        try:
            return [name for names in pool.map(one, files) for name in names], left_out
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                end(process)
            raise


def place(rehearse: bool) -> dict[str, str]:
    """The environment that tells `tests/gpu` where to run."""
    return {"TORCHCOMP_REHEARSE": "1"} if rehearse else {}


def measured(python: str, rehearse: bool, seconds: float) -> list[str]:
    """Run the benchmarks and write the page; return what failed."""
    # The rows name this command. It contains no path, because they are committed.
    command = [python, "-m", "benchmarks.gpu", f"--minutes={max(0.0, seconds - 20) / 60:.2f}"]
    if rehearse:
        with tempfile.TemporaryDirectory() as folder:
            rehearsal = [*command, "--rehearse", "--out", folder]
            return failures("benchmarks.gpu", watched(rehearsal, seconds, {}, shown=True))
    found = failures("benchmarks.gpu", watched(command, seconds, {}, shown=True))
    page = [python, "-m", "benchmarks.report", "--page"]
    return found + failures("benchmarks.report", watched(page, SPARE_SECONDS, {}))


def failures(name: str, outcome: "tuple[int | str, str]") -> list[str]:
    """Print the output of a command that failed, and return its name."""
    status, output = outcome
    if status == 0:
        return []
    print(output[-12_000:], flush=True)
    return [f"{name} ({status})"]


def watched(
    command: list[str], seconds: float, env: dict[str, str], shown: bool = False
) -> tuple[int | str, str]:
    """Run a command. Return its status, or that it was stopped, and its output unless `shown`.

    After `seconds`, the command and all its processes are killed.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        stdout=None if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    RUNNING.append(process)
    try:
        output, _ = process.communicate(timeout=max(1.0, seconds))
        return process.returncode, output or ""
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Ranks that a killed parent leaves behind would keep the GPU busy.
        end(process)
        RUNNING.remove(process)
    output, _ = process.communicate()
    return f"stopped after {seconds:.0f} seconds", output or ""


def end(process: "subprocess.Popen[str]") -> None:
    """Kill what is left of the process and of the group that it leads."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def say(text: str) -> None:
    print(f"gpu: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
