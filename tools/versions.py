"""Run the core's tests on the oldest and the newest torch and Python that can be installed here.

    python tools/versions.py                      # the oldest two, then the newest two
    python tools/versions.py 2.9.1:3.12 2.6:3.13  # these versions of torch and Python

The oldest torch is the lower bound in pyproject.toml, the newest is what the package index has.
Each pair has its own environment in .venv-versions/, which the next run updates and uses again.
If the index offers only CUDA builds, an environment takes 6 GB and several minutes of download.
"""

import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from threading import Lock
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-versions"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TOOLS = ("numpy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "setuptools")
FILES = ("compat", "bucket", "pieces", "nodes", "wire", "spec", "compressors", "schedules")
FILES += ("checkpoint", "redistribution")
FOLDERS = ("kernels", "engine", "exchange", "routes", "ddp", "fsdp")
# Those that depend on torch the most: on its modules, optimizers and scaler, and on DDP's hooks.
LOCAL = (
    "algorithm",
    "bad_input",
    "close",
    "local_state",
    "optimizers",
    "scaler",
    "stats",
)
TESTS = [
    *(f"tests/test_{name}.py" for name in FILES),
    *(f"tests/{name}" for name in FOLDERS),
    *(f"tests/local_sgd/test_{name}.py" for name in LOCAL),
]
# Two builds at the same time would write the same files in the clone.
BUILD = Lock()
FACTS = "import torch, platform; print(torch.__version__, platform.python_version())"


def main(chosen: list[str]) -> int:
    pythons = {version: path for version in PYTHONS if (path := interpreter(version))}
    missing = [version for version in PYTHONS if version not in pythons]
    say(f"found Python {', '.join(pythons)}; did not find {', '.join(missing) or 'none'}")
    if not pythons:
        sys.exit("test-versions: install one of them, named as python3.12 is on PATH")
    oldest = re.search(r'"torch>=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    pairs = [pair.partition(":")[::2] for pair in chosen]
    pairs = pairs or [(oldest, min(pythons, key=minor)), ("newest", max(pythons, key=minor))]
    for torch, python in pairs:
        if python not in pythons:
            sys.exit(f"test-versions: {torch}:{python}: there is no Python '{python}' here")
    start = time.monotonic()
    # At the same time: each takes minutes to download and to unpack.
    with ThreadPoolExecutor() as pool:
        installed = [*pool.map(lambda pair: install(*pair, pythons[pair[1]]), pairs)]
    say(f"environments installed in {minutes(start)} minutes")
    rows = [tested(*pair, facts) for pair, facts in zip(pairs, installed, strict=True)]
    print("\n| torch | Python | Numba | passed | skipped | failed | minutes | date |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(any(failed != "0" for *_, failed, _, _ in rows))


def minor(python: str) -> int:
    return int(python.partition(".")[2])


def interpreter(python: str) -> str | None:
    """Find an interpreter that can make virtual environments, on PATH or among pyenv's."""
    name = f"python{python}"
    paths = [shutil.which(name)]
    if shutil.which("pyenv"):  # its commands on PATH run only the versions that it has activated
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        paths += sorted(Path(root, "versions").glob(f"{python}.*/bin/{name}"))
    for path in filter(None, paths):
        test = [path, "-c", "import ensurepip, venv"]
        if subprocess.run(test, capture_output=True).returncode == 0:
            return str(path)
    return None


def environment(torch: str, python: str) -> Path:
    return FOLDER / f"torch-{torch}-py{python}"


def install(torch: str, python: str, path: str) -> list[str] | None:
    """Make an environment with torch, torchcomp and what the tests need.

    torch comes without constraints.txt, because it demands versions of its own.

    Returns:
        The first cells of the table's row: torch, Python, whether there is a Numba. None on error.
    """
    venv = environment(torch, python)
    pip = [venv / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pinned = [*pip, "-c", "constraints.txt"]
    wanted = "torch" if torch == "newest" else f"torch=={torch}.*"
    try:
        if not (venv / "bin/pip").exists():
            subprocess.run([path, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([*pinned, *TOOLS], cwd=ROOT, check=True)
        subprocess.run([*pip, "--upgrade", wanted], cwd=ROOT, check=True)
        with BUILD:
            subprocess.run([*pip, "-e", "."], cwd=ROOT, check=True)
        facts = subprocess.check_output([venv / "bin/python", "-c", FACTS], cwd=ROOT, text=True)
    except subprocess.CalledProcessError as error:
        say(f"installation failed: {error}")
        return None
    # The newest Python can be too new for Numba. The tests then run the kernels without it.
    numba = subprocess.run([*pinned, "--only-binary", ":all:", "numba"], cwd=ROOT)
    return [*facts.split(), "no" if numba.returncode else "yes"]


def tested(torch: str, python: str, facts: list[str] | None) -> list[str]:
    """Run the tests in one environment, and return a row of the table."""
    if facts is None:
        return [torch, python, "", "", "", "not installed", "", f"{date.today()}"]
    start = time.monotonic()
    say(f"torch {torch} on Python {python}")
    venv = environment(torch, python)
    report = venv / "report.xml"
    report.unlink(missing_ok=True)
    pytest = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", f"--junitxml={report}"]
    subprocess.run([venv / "bin/python", *pytest, *TESTS], cwd=ROOT)
    return [*facts, *counts(report), minutes(start), f"{date.today()}"]


def counts(report: Path) -> list[str]:
    """Return how many tests passed, were skipped and failed."""
    if not report.exists():
        return ["", "", "no report"]
    suite = ElementTree.parse(report).getroot()[0]
    tests, skipped, failures, errors = (
        int(suite.get(key)) for key in ("tests", "skipped", "failures", "errors")
    )
    failed = failures + errors
    return [str(tests - skipped - failed), str(skipped), str(failed)]


def minutes(start: float) -> str:
    return f"{(time.monotonic() - start) / 60:.1f}"


def say(line: str) -> None:
    print(f"test-versions: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
