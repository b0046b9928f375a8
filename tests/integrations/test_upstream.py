"""Scripts with the idioms of torchvision, timm and nanoGPT run and resume with the inserted lines.

The stand-ins have the lines at which recipes.integrations.upstream inserts torchcomp.
"""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from recipes.errors import RecipeError
from recipes.integrations.upstream import SCRIPTS, Edit, edited, edits_of, parse, read
from tests.support.outcomes import same
from tests.support.ranks import on_processes

STAND_INS = Path(__file__).parent / "stand_ins"
DOCS = Path(__file__).parents[2] / "docs" / "integrations"
RANKS = 2
# The arguments of a whole run, of one that is interrupted, and of one that resumes.
RUNS = {
    "torchvision": [[], ["--stop", "2"], ["--resume", "checkpoint.pth"]],
    "timm": [[], ["--stop", "2"], ["--resume", "run/last.pth.tar"]],
    "nanogpt": [["scratch", "99"], ["scratch", "10"], ["resume", "99"]],
}
COMPRESS = ["--compress", "ef(topk(0.1))"]
# No script evaluates or saves at the end of a round: they have 7, 3 and 5 steps in between.
LOCAL = {name: ["--sync", "every(4)"] for name in SCRIPTS}


def stand_in(name, method, folder):
    """Write the stand-in of a script, with the lines of torchcomp, and return its folder."""
    arguments = parse([name, "--source", str(STAND_INS), *method])
    files = edited(read(STAND_INS / name), edits_of(SCRIPTS[name], arguments))
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


def run_script(folder, arguments):
    """Run a stand-in on this rank, and return its counters if they are global variables."""
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with (
        # The group exists already.
        mock.patch.multiple(
            dist, init_process_group=mock.Mock(), destroy_process_group=mock.Mock()
        ),
        mock.patch.object(sys, "argv", ["train.py", *arguments]),
    ):
        found = runpy.run_path("train.py", run_name="__main__")
    engine = found.get("handle") or found.get("sync")
    return None if engine is None else engine.stats


def final(folder):
    return [torch.load(folder / f"final.rank{rank}", weights_only=True) for rank in range(RANKS)]


def test_the_sync_flag_of_a_script_sends_gradients_once_and_does_not_end_local_steps(tmp_path):
    for name, method, syncs in (("local", LOCAL["nanogpt"], 4), ("compress", COMPRESS, 13)):
        folder = stand_in("nanogpt", method, tmp_path / name)
        stats = on_processes(RANKS, run_script, folder, RUNS["nanogpt"][0])[0]
        assert (stats.steps, stats.syncs) == (13, syncs)
    # Saved after 10 steps, inside the round from 8 to 12.
    files = [tmp_path / f"local/ckpt.pt.rank{rank}" for rank in range(RANKS)]
    own = [torch.load(file, weights_only=True) for file in files]
    assert not same(own[0]["model"], own[1]["model"])


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("kind", ["compress", "local"])
def test_a_script_resumes_bit_for_bit_also_inside_a_round(name, kind, tmp_path):
    """Save in the middle of the run; the last round ends with it, so the ranks have one model."""
    method = COMPRESS if kind == "compress" else LOCAL[name]
    folders = [stand_in(name, method, tmp_path / each) for each in ("whole", "resumed")]
    for folder, arguments in zip([folders[0], folders[1], folders[1]], RUNS[name], strict=True):
        on_processes(RANKS, run_script, folder, arguments)
    whole, resumed = map(final, folders)
    assert same([each["weights"] for each in whole], [each["weights"] for each in resumed])
    assert same(whole[0]["weights"], whole[1]["weights"])


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("method", [("--compress", "ef(topk(0.01))"), ("--sync", "every(4)")])
def test_the_page_of_a_script_shows_every_inserted_line(name, method):
    page = (DOCS / f"{name}.md").read_text()
    shown = {line[1:].strip() for line in page.splitlines() if line.startswith("+")}
    edits = edits_of(SCRIPTS[name], parse([name, "--source", ".", *method]))
    assert {line.strip() for edit in edits for line in edit.lines.splitlines()} <= shown | {"..."}


@pytest.mark.parametrize("text", ["", "start = 1\n", "step = 1\nstep = 2\n"])
def test_an_upstream_script_that_has_changed_is_an_error(text):
    with pytest.raises(RecipeError, match=r"utils\.py.*'step = '"):
        edited({"utils.py": text}, [Edit("step = ", "...", "utils.py")])
