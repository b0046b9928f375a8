"""A checkpoint is loaded only if it is complete and was written by the same run."""

import errno
import json
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recipes.checkpoints import MARKER, Checkpoints
from recipes.errors import RecipeError
from recipes.random_state import random_state, seed_all, set_random_state
from recipes.report import Report
from tests.support.ranks import on_threads

SETTINGS = {"model": "smallcnn", "epochs": 3}


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", rank=0, world_size=1)


def save(checkpoints, *steps):
    for step in steps:
        state = {"step": step, "w": torch.zeros(1000)}
        assert checkpoints.save(step, state, SETTINGS) is None


def steps_in(checkpoints):
    """Return the steps of the complete checkpoints."""
    return sorted(int(path.parent.name[5:]) for path in checkpoints.folder.glob(f"*/{MARKER}"))


def file_of(checkpoints, step, name="rank-0.pt"):
    return checkpoints.folder / f"step-{step:09d}" / name


def test_the_last_two_are_kept_and_the_newest_complete_one_is_loaded(checkpoints):
    with pytest.raises(RecipeError, match=r"--resume: .*checkpoints;.*--checkpoint-every"):
        checkpoints.load(SETTINGS)
    save(checkpoints, 1, 2, 3, 4, 5)
    assert len(list(checkpoints.folder.iterdir())) == 2
    # The run was killed while it wrote another one, before the marker.
    file_of(checkpoints, 6).parent.mkdir()
    file_of(checkpoints, 6).write_bytes(b"half")
    assert checkpoints.load(SETTINGS)["step"] == 5
    with pytest.raises(RecipeError, match=r"model 'smallcnn' .*'timm/x'"):
        checkpoints.load({**SETTINGS, "model": "timm/x"})
    with pytest.raises(RecipeError, match=r"1 ranks .*4"):
        Checkpoints(checkpoints.folder, rank=0, world_size=4).load(SETTINGS)


def truncate(path):
    path.write_bytes(path.read_bytes()[:200])


def flip_a_bit(path):
    """Change a bit in the middle, which is the tensor. torch.load() does not notice it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert torch.load(path)["w"].count_nonzero() == 1


DAMAGE = {"truncated": truncate, "a bit": flip_a_bit, "deleted": Path.unlink}
DAMAGE["marker"] = lambda path: path.with_name(MARKER).write_bytes(b"\xff{")
DAMAGE["a setting"] = lambda path: path.with_name(MARKER).write_text(
    path.with_name(MARKER).read_text().replace("smallcnn", "smallcnm")
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_does_not_count_as_kept(damage, checkpoints, capfd):
    save(checkpoints, 10, 15)
    DAMAGE[damage](file_of(checkpoints, 15))
    with pytest.raises(RecipeError, match="epochs"):
        checkpoints.load({**SETTINGS, "epochs": 4})
    assert steps_in(checkpoints) == [10, 15]
    capfd.readouterr()
    assert checkpoints.load(SETTINGS)["step"] == 10
    (line,) = capfd.readouterr().err.splitlines()
    assert "step-000000015" in line
    save(checkpoints, 12, 14)
    assert steps_in(checkpoints) == [12, 14]
    for step in (12, 14):
        truncate(file_of(checkpoints, step))
    with pytest.raises(RecipeError, match=r"--resume: .*checkpoints are damaged"):
        checkpoints.load(SETTINGS)


def test_what_cannot_be_deleted_or_is_of_others_stays(checkpoints, monkeypatch):
    def busy(path, **options):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    save(checkpoints, 1)
    copy = checkpoints.folder / "step-000000000.bak"
    copy.mkdir()
    monkeypatch.setattr(os, "rmdir", busy)
    # Below the steps of another run, what was just saved is kept.
    save(checkpoints, 2, 100, 110, 10)
    assert steps_in(checkpoints) == [10, 100, 110]
    assert copy.exists()


def in_own_folder(folder):
    rank = dist.get_rank()
    return Checkpoints(folder / str(rank), rank, 2).save(5, {"rank": rank}, SETTINGS)


def with_a_lock_on_rank_1(folder):
    state = {"hook": threading.Lock()} if dist.get_rank() == 1 else {}
    return Checkpoints(folder, dist.get_rank(), 2).save(5, state, SETTINGS)


def test_no_rank_waits_for_one_that_fails(tmp_path, monkeypatch):
    for act, said in (
        (in_own_folder, f"{tmp_path}/0/step-000000005/rank-1.pt"),
        (with_a_lock_on_rank_1, "rank 1: TypeError: "),
    ):
        first, second = on_threads(2, act, tmp_path)
        assert first == second
        assert said in first
        assert not list(tmp_path.rglob(MARKER))

    def stale(path, pattern):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    def load():
        with pytest.raises(RecipeError, match=str(tmp_path)):
            Checkpoints(tmp_path, dist.get_rank(), 2).load(SETTINGS)

    monkeypatch.setattr(Path, "glob", stale)
    on_threads(2, load)


def on_one_of_two_ranks(folder):
    rank = dist.get_rank()
    checkpoints = Checkpoints(folder, rank, 2)
    checkpoints.save(5, {"step": 5, "rank": rank}, SETTINGS)
    if rank == 1:
        full = file_of(checkpoints, 10, ".rank-1.pt")
        full.parent.mkdir(exist_ok=True)
        full.symlink_to("/dev/full")
    problem = checkpoints.save(10, {"step": 10, "rank": rank}, SETTINGS)
    # Rank 1 finds the damage, and both forget this checkpoint.
    checkpoints.save(15, {"step": 15, "rank": rank}, SETTINGS)
    if rank == 1:
        truncate(file_of(checkpoints, 15, "rank-1.pt"))
    assert checkpoints.load(SETTINGS) == {"step": 5, "rank": rank}
    # Rank 1 sees other files: another machine's cache of the file system.
    return problem, Checkpoints(folder if rank == 0 else folder / "x", rank, 2).newest()


def test_all_ranks_know_what_happens_to_one_of_them(tmp_path):
    expected = "rank 1: No space left on device", tmp_path / "step-000000005"
    assert on_threads(2, on_one_of_two_ranks, tmp_path) == [expected] * 2
    assert sorted(tmp_path.glob("step-000000010/*")) == []


def test_all_random_generators_resume(checkpoints):
    def draws():
        return [random.gauss(0, 1), float(np.random.normal()), torch.randn(()).item()]

    seed_all(3)
    # Gaussians are drawn in pairs. After an odd number, the state includes the second of a pair.
    draws()
    checkpoints.save(5, {"random": random_state()}, SETTINGS)
    wanted = [draws() for _ in range(3)]
    set_random_state(checkpoints.load(SETTINGS)["random"])
    assert [draws() for _ in range(3)] == wanted


def report_in(folder, done=0):
    return Report(folder, total=100, done=done, is_main=True)


def test_a_full_disk_ends_a_run_at_its_results_only(tmp_path, capfd):
    with report_in(tmp_path) as report:
        (tmp_path / "metrics.jsonl").unlink()
        for name in ("metrics.jsonl", ".summary.json"):
            (tmp_path / name).symlink_to("/dev/full")
        for step in (3, 4):
            report.log_metrics(step=step)
        with pytest.raises(RecipeError, match="No space left on device"):
            report.write_summary({"steps": 1})
    (line,) = capfd.readouterr().err.splitlines()
    assert "metrics.jsonl" in line
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("line", ["\0" * 40, '{"step": 4', "[]", "7", '{"step": "two"}'])
def test_a_resumed_run_keeps_whole_lines_up_to_its_step(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{line}\n{{"step": 2}}\n{{"step": 3}}\n'
    path.write_text(text)
    (tmp_path / ".metrics.jsonl").symlink_to("/dev/full")
    report_in(tmp_path, done=2)
    assert path.read_text() == text
    with report_in(tmp_path, done=2) as report:
        report.log_metrics(step=3)
    assert [json.loads(each)["step"] for each in path.read_text().splitlines()] == [1, 2, 3]
