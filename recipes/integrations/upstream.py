"""Run the training script of torchvision, timm or nanoGPT with one more line, on this machine.

    python -m recipes.integrations.upstream nanogpt --source CLONE --compress "ef(topk(0.01))"
    python -m recipes.integrations.upstream timm --source CLONE --sync "every(4)" -- --model-ema

It copies the script out of a clone of its repository, inserts the lines of torchcomp, prints them
as a diff, makes a small data set, and starts the script with torchrun. Flags after ``--`` go to the
script. Without ``--compress`` and ``--sync``, plain DDP trains.
"""

import argparse
import difflib
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import torchcomp
from recipes.errors import RecipeError, exit_on_user_error
from torchcomp.local_sgd.schedules import Schedule

_ROOT = Path(__file__).resolve().parents[2]
_TEST_SHARE = 5
_SYMBOLS = 64
_TOKENS = {"train": 200_000, "val": 20_000}

Files = dict[str, str]
SCRIPTS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text()
)
"""The scripts and their edits, as ``upstream.yaml`` describes them."""


@dataclass(frozen=True)
class Edit:
    """A change at the only line of an upstream file that begins with ``at``."""

    at: str
    lines: str
    file: str = "train.py"

    def apply(self, text: str) -> str:
        lines = text.splitlines()
        found = [index for index, line in enumerate(lines) if line.lstrip().startswith(self.at)]
        if len(found) != 1:
            raise RecipeError(
                f"{self.file}: expected one line that begins with {self.at!r}, found {len(found)}, "
                "so this is another version of the upstream script: check out the version that "
                "its page in docs/integrations names"
            )
        line = lines[found[0]]
        indent = line[: len(line) - len(line.lstrip())]
        new = [line if each == "..." else indent + each for each in self.lines.splitlines()]
        return "\n".join([*lines[: found[0]], *new, *lines[found[0] + 1 :], ""])


def main() -> None:
    with exit_on_user_error():
        arguments = parse(sys.argv[1:])
        script, out = SCRIPTS[arguments.script], arguments.out or Path("runs", arguments.script)
        upstream = read(arguments.source / script["folder"])
        needed = script["fixes"] + (script["cpu"] if arguments.device == "cpu" else [])
        plain = edited(upstream, (Edit(**each) for each in needed))
        files = edited(plain, edits_of(script, arguments))
    print(diff(upstream, plain), diff(plain, files), sep="\n", flush=True)
    write(out, files)
    if not (out / script["data"]).exists():
        made = write_tokens if arguments.script == "nanogpt" else write_image_folder
        made(out / script["data"])
    sys.exit(run(arguments, script, out))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Flags after -- go to the script.",
        allow_abbrev=False,
    )
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--source", type=Path, required=True, help="clone of its repository")
    method = parser.add_mutually_exclusive_group()
    method.add_argument("--compress", metavar="SPEC", help='such as "ef(topk(0.01))"')
    method.add_argument("--sync", metavar="SPEC", help='such as "qsr(alpha=0.05, h_base=4)"')
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine [2]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="[cpu]")
    parser.add_argument("--out", type=Path, help="folder [runs/SCRIPT]")
    # argparse cannot do this: "script" and a list of flags on both sides of the options.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = parser.parse_args(arguments[:end])
    parsed.flags = arguments[end + 1 :]
    if parsed.ranks < 1:
        parser.error(f"--ranks must be at least 1, not {parsed.ranks}")
    return parsed


def read(folder: Path) -> Files:
    if not (folder / "train.py").is_file():
        raise RecipeError(f"--source: no train.py in {folder}; pass a clone of the repository")
    return {path.name: path.read_text() for path in sorted(folder.glob("*.py"))}


def edits_of(script: Mapping[str, Any], arguments: argparse.Namespace) -> list[Edit]:
    spec = arguments.compress or arguments.sync
    if spec is None:
        return []
    if isinstance(torchcomp.parse(spec), Schedule) != (spec == arguments.sync):
        raise RecipeError("--compress takes a method and --sync a schedule, not the other way")
    edits = script["compress" if arguments.compress else "sync"]
    return [Edit(**{**each, "lines": each["lines"].replace("SPEC", repr(spec))}) for each in edits]


def edited(files: Files, edits: Iterable[Edit]) -> Files:
    new = dict(files)
    for edit in edits:
        new[edit.file] = edit.apply(new.get(edit.file, ""))
    return new


def diff(old: Files, new: Files) -> str:
    """Return what changed, with one line around each change."""
    return "\n".join(
        line
        for name in old
        for line in difflib.unified_diff(
            old[name].splitlines(), new[name].splitlines(), name, name, n=1, lineterm=""
        )
    )


def write(folder: Path, files: Files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def write_image_folder(folder: Path) -> None:
    """Write scikit-learn's handwritten digits as JPEG files, one sub-folder per class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for index, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        split = "train" if index % _TEST_SHARE else "val"
        path = folder / split / str(label) / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        colour = np.array(hsv_to_rgb(label / 10, 1, 1)) * 255 / 16
        tiles = np.tile(pixels.reshape(8, 8, 1), (4, 4, 1)) * colour
        Image.fromarray(tiles.astype(np.uint8)).save(path)


def write_tokens(folder: Path) -> None:
    """Write ``train.bin``, ``val.bin`` (uint16) and ``meta.pkl``: a random Markov chain."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    chances = generator.dirichlet(np.full(_SYMBOLS, 0.05), size=_SYMBOLS)
    cumulative = chances.cumsum(-1)
    for split, length in _TOKENS.items():
        tokens = np.zeros(length, dtype=np.uint16)
        for index, draw in enumerate(generator.random(length - 1), start=1):
            row = cumulative[tokens[index - 1]]
            # Rounding can leave the last sum below the draw.
            tokens[index] = min(int(row.searchsorted(draw)), _SYMBOLS - 1)
        tokens.tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": _SYMBOLS}))


def run(arguments: argparse.Namespace, script: Mapping[str, Any], folder: Path) -> int:
    """Run the script with torchrun, in its folder, and return its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.ranks), "train.py"]
    command += shlex.split(script["flags"])
    command += shlex.split(script["cpu_flags"]) if arguments.device == "cpu" else []
    command += arguments.flags
    source = arguments.source.resolve() / script["folder"]
    path = [str(source), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        # One thread per rank, and idle threads that do not take the other rank's core.
        **{"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"},
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
