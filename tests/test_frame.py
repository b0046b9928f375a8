"""Packaging, pinned dependencies, make targets and the set-up script.

The tests run the real set-up script in a temporary folder. Its PATH contains fake programs: a
Python that records the arguments of pip, and in some tests an apt-get.
"""

import os
import re
import runpy
import shutil
import sys
import tarfile
import zipfile
from email import message_from_bytes

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import torchcomp
from tests.support.commands import ROOT, run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


# --- What is packaged -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a copy of the repository without what builds and runs leave, and its files."""
    tree = tmp_path_factory.mktemp("tree") / "tree"
    left_out = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "outputs", "data", "*.beton"
    )
    shutil.copytree(ROOT, tree, ignore=left_out)
    return tree, {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}


def test_the_wheel_contains_the_package_and_a_description_without_links_into_it(tree):
    tree, sources = tree
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    run([*build, "--wheel-dir", str(tree / "out")], cwd=tree)
    (path,) = (tree / "out").glob("*.whl")
    assert path.name == f"torchcomp_ddp-{torchcomp.__version__}-py3-none-any.whl"
    archive = zipfile.ZipFile(path)
    names = archive.namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == {name for name in sources if name.startswith("torchcomp/")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(archive.read(name))
    description = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "https://" in description
    assert re.findall(r"\]\((?!https:)[^)]*\)|^\[.+\]: (?!https:).*", description, re.M) == []
    for target in re.findall(r"\]\((?!https:)([^)#]+)", (ROOT / "README.md").read_text()):
        assert f"(`{target}`)" in description


def test_the_source_distribution_contains_the_repository(tree):
    tree, sources = tree
    build = "from setuptools import build_meta; print(build_meta.build_sdist('out'))"
    name = run([sys.executable, "-c", build], cwd=tree).stdout.split()[-1]
    with tarfile.open(tree / "out" / name) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert sources - packed == set()
    added = {path for path in packed - sources if ".egg-info/" not in path}
    assert added == {"PKG-INFO", "setup.cfg"}


def test_the_version_is_defined_once():
    files = [*(ROOT / "torchcomp").rglob("*.py"), ROOT / "pyproject.toml"]
    defined = [path for path in files if f'"{torchcomp.__version__}"' in path.read_text()]
    assert defined == [ROOT / "torchcomp/specs/version.py"]


def test_the_core_depends_only_on_torch_and_numpy_and_loads_nothing_else():
    assert {Requirement(d).name for d in PROJECT["dependencies"]} == {"torch", "numpy"}
    modules = ["torchvision", "timm", "ffcv", "numba", "sklearn", "matplotlib", "PIL", "yaml"]
    modules += ["lightning", "pytorch_lightning", "accelerate", "transformers", "ray"]
    code = f"import sys, torchcomp; print([m for m in {modules} if m in sys.modules])"
    assert run([sys.executable, "-c", code]).stdout.strip() == "[]"


# --- Pins, make and .ci/run -----------------------------------------------------------------------


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_dependency_has_one_pin(python):
    pins = {}
    for requirement in map(Requirement, CONSTRAINTS):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in pins, f"{name} is pinned twice for Python {python}"
            pins[name] = next(iter(requirement.specifier)).version
    named = [*PROJECT["dependencies"], *(d for extra in EXTRAS.values() for d in extra)]
    for dependency in map(Requirement, named):
        pin = pins.get(canonicalize_name(dependency.name))
        assert pin is not None, f"{dependency.name} is not pinned for Python {python}"
        assert dependency.specifier.contains(pin), f"{dependency} excludes its own pin {pin}"


def test_constraints_are_plain_pins():
    # Without URLs, paths and local versions (+cpu), the file works with any package index, and with
    # CPU and CUDA builds.
    pin = re.compile(r'[a-z0-9-]+==[0-9][0-9a-z.]*( ; python_version (<|>=) "3\.\d+")?')
    assert [line for line in CONSTRAINTS if not pin.fullmatch(line)] == []
    integrations = (ROOT / "tools/integrations-requirements.txt").read_text().splitlines()
    for lines in (CONSTRAINTS, integrations):
        assert [line for line in lines if line.startswith("torch==")] == ["torch==2.13.0"]


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("quickstart", "-m recipes.quickstart --seeds 2"),
        ("experiment-small-gpt", "-m recipes.small_gpt.experiment --seeds 2"),
        ("test", "-m pytest -n 3 --dist loadfile --seeds 2"),
        ("test-thorough", "-m pytest -n 3 --dist loadfile -m thorough --seeds 2"),
        ("test-fast", "--seeds 2"),
        ("lint", "-m mypy"),
    ],
)
def test_targets_set_up_first(target, command):
    steps = run(["make", "-n", target, "ARGS=--seeds 2"]).stdout.splitlines()
    assert steps[0].endswith("sh tools/setup.sh")
    assert steps[-1].strip().startswith(".venv/bin/python -m")
    assert steps[-1].endswith(command)
    paths = re.findall(r"(?<=[ =])tests/\S+", steps[-1])
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert (target == "test-fast") == ({"tests/ddp", "tests/test_spec.py"} <= set(paths))


def test_make_lists_its_targets():
    listed = run(["make"]).stdout
    for target in ("quickstart", "test", "test-fast", "test-versions", "lint", "docs", "clean"):
        assert re.search(rf"^  make {target} +\S", listed, re.MULTILINE), target


@pytest.mark.parametrize(("failing", "code"), [("none", 0), ("lint", 1), ("test-versions", 1)])
def test_ci_runs_all_and_fails_if_any_does(tmp_path, failing, code):
    executable(tmp_path / "make", f'echo "ran $1"; [ "$1" != {failing} ]')
    done = run([ROOT / ".ci/run"], check=False, PATH=f"{tmp_path}:{os.environ['PATH']}")
    steps = ["ran lint", "ran test", "ran test-thorough", "ran test-versions"]
    assert (done.returncode, done.stdout.splitlines()) == (code, steps)


# --- The set-up -----------------------------------------------------------------------------------

PYTHON = """
case "$*" in
"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip --version") ;;
"-m pip install"*)
    echo "$*" >>pip-calls; [ ! -e pip-fails ] ;;
*version_info*10*) [ ! -e old-python ] ;;
*"import ensurepip"*) [ ! -e no-venv ] ;;
*python_version*) echo 3.9.18 ;;
*get_path*) echo include ;;
*importlib.metadata*) echo timm; echo pillow ;;
esac
"""
PKG_CONFIG = 'for last; do :; done; case "$1" in --exists) [ -e "libraries/$last" ] ;; esac'
APT_GET = """
echo "$*" >>apt-calls
case "$*" in *install*) touch libraries/opencv4 libraries/libturbojpeg ;; esac
"""


def executable(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


class Machine:
    """A folder with a copy of the set-up script, and a PATH with only the programs added to it."""

    def __init__(self, root):
        self.root, self.bin = root, root / "bin"
        for folder in ("bin", "tools", "include", "libraries"):
            (root / folder).mkdir()
        (root / "include/Python.h").touch()
        for name in ("tools/setup.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, root / name)
        tools = ["sh", "dirname", "cksum", "sed", "cat", "cp", "rm", "mv", "mkdir", "env", "touch"]
        for tool in tools:
            (self.bin / tool).symlink_to(shutil.which(tool))
        scripts = {"python3": PYTHON, "pkg-config": PKG_CONFIG, "c++": "", "id": "echo 0"}
        for name, script in scripts.items():
            executable(self.bin / name, script)

    def set_up(self, check=True):
        (self.root / "pip-calls").write_text("")
        command = [self.bin / "sh", "tools/setup.sh"]
        env = {"PATH": str(self.bin), "PYTHON": "python3"}
        done = run(command, cwd=self.root, check=check, **env)
        self.installed = (self.root / "pip-calls").read_text().splitlines()
        self.output, self.errors = done.stdout.splitlines(), done.stderr.splitlines()
        lines = [line for line in self.output if not line.startswith("setup: ")]
        self.about_ffcv = [line for line in lines if "ffcv" in line]
        self.ffcv_built = any(call.endswith(" ffcv") for call in self.installed)
        return done.returncode


machine = pytest.fixture(lambda tmp_path: Machine(tmp_path))


@pytest.fixture
def ready(machine):
    """A machine with all the libraries that ffcv needs."""
    for library in ("opencv4", "libturbojpeg"):
        (machine.root / "libraries" / library).touch()
    return machine


def test_without_apt_one_line_lists_what_to_install(machine):
    machine.set_up()
    (line,) = machine.about_ffcv
    for word in ("apt-get", " libturbojpeg0-dev libopencv-dev ", "make", "torchvision"):
        assert word in line
    assert machine.errors == []
    assert any("-e .[kernels,dev]" in call for call in machine.installed)
    assert any(call.endswith(" timm pillow") for call in machine.installed)
    assert not machine.ffcv_built


def test_apt_installs_only_what_is_missing(machine):
    executable(machine.bin / "apt-get", APT_GET)
    (machine.root / "libraries/libturbojpeg").touch()
    machine.set_up()
    calls = (machine.root / "apt-calls").read_text().splitlines()
    assert calls[0] == "update"
    assert calls[1].endswith("install -y --no-install-recommends libopencv-dev")
    assert machine.ffcv_built
    assert machine.about_ffcv == []


def test_second_run_does_nothing_and_prints_nothing(ready):
    ready.set_up()
    assert ready.ffcv_built
    ready.set_up()
    assert (ready.installed, ready.output, ready.errors) == ([], [], [])


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml", "tools/setup.sh"])
def test_changed_inputs_are_installed_again_even_after_a_failure(ready, name):
    ready.set_up()
    with (ready.root / name).open("a") as file:
        file.write("# changed\n")
    (ready.root / "pip-fails").touch()
    assert ready.set_up(check=False) != 0
    (ready.root / "pip-fails").unlink()
    ready.set_up()
    assert len(ready.installed) == 3


@pytest.mark.parametrize(
    ("flaw", "words"),
    [("old-python", r"3\.10.*python3.*3\.9\.18"), ("no-venv", "python3.*python3-venv")],
)
def test_unsuitable_python_is_reported_in_one_line(machine, flaw, words):
    (machine.root / flaw).touch()
    assert machine.set_up(check=False) == 1
    assert machine.output == []
    assert len(machine.errors) == 1
    assert re.search(words, machine.errors[0])


def test_versions_name_tests_that_exist():
    tests = runpy.run_path(str(ROOT / "tools/versions.py"))["TESTS"]
    assert {"tests/test_wire.py", "tests/ddp", "tests/local_sgd/test_algorithm.py"} <= set(tests)
    assert [path for path in tests if not (ROOT / path).exists()] == []
