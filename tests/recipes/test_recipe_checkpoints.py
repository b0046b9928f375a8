"""A checkpoint is loaded only if it is complete and was written by the same run."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchcomp
from recipes.checkpoints import MARKER, Checkpoints, Marker
from recipes.errors import RecipeError
from recipes.random_state import random_state, seed_all, set_random_state
from recipes.resizing import resized
from tests.support.ranks import on_threads

SETTINGS = {"model": "smallcnn", "epochs": 3}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", rank=0, world_size=1)


def test_the_newest_complete_checkpoint_is_loaded(checkpoints: Checkpoints) -> None:
    for step in (5, 10):
        checkpoints.save(step, {"step": step, "w": torch.full((3,), float(step))}, SETTINGS)
    # The run was killed while it wrote a third one, before the marker.
    unfinished = checkpoints.folder / "step-000000015"
    unfinished.mkdir()
    (unfinished / "rank-0.pt").write_bytes(b"half")
    state = checkpoints.load(SETTINGS)
    assert state["step"] == 10
    assert torch.equal(state["w"], torch.full((3,), 10.0))


def test_only_the_last_two_checkpoints_are_kept(checkpoints: Checkpoints) -> None:
    for step in range(1, 6):
        checkpoints.save(step, {"step": step}, SETTINGS)
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["step-000000004", "step-000000005"]


def steps_in(checkpoints: Checkpoints) -> list[int]:
    """Return the steps of the complete checkpoints."""
    return sorted(int(path.parent.name[5:]) for path in checkpoints.folder.glob(f"*/{MARKER}"))


def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(checkpoints: Checkpoints) -> None:
    for step in (10, 15):
        checkpoints.save(step, {"step": step}, SETTINGS)
    truncate(checkpoints.folder / "step-000000015" / "rank-0.pt")
    with pytest.raises(RecipeError, match="epochs"):
        checkpoints.load({**SETTINGS, "epochs": 4})
    assert steps_in(checkpoints) == [10, 15]
    assert checkpoints.load(SETTINGS)["step"] == 10
    for step in (12, 14):
        checkpoints.save(step, {"step": step}, SETTINGS)
    assert steps_in(checkpoints) == [12, 14]


def test_what_cannot_be_deleted_or_is_not_ours_stays(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: object, **options: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    checkpoints.save(1, {}, SETTINGS)
    copies = [checkpoints.folder / name / "a" for name in ("step-000000000.bak", "step-0-best")]
    for copy in copies:
        copy.parent.mkdir()
        copy.touch()
    (checkpoints.folder / "step-000000000").write_text("a file")
    monkeypatch.setattr(os, "rmdir", busy)
    for step in (2, 3):
        assert checkpoints.save(step, {}, SETTINGS) is None
    assert steps_in(checkpoints) == [2, 3]
    assert all(copy.exists() for copy in copies)


# Another run, or another folder, by mistake.


def test_a_file_that_another_run_replaces_is_damaged(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Checkpoints(tmp_path / "other", rank=0, world_size=1)
    other.save(10, {"step": 10, "w": torch.ones(3)}, SETTINGS)
    theirs = next(other.folder.rglob("rank-0.pt"))
    checkpoints.save(5, {"step": 5, "w": torch.zeros(3)}, SETTINGS)
    replace = os.replace

    def replace_twice(source: Path, target: Path) -> None:
        replace(source, target)
        if target.name == theirs.name:
            shutil.copy(theirs, target)

    monkeypatch.setattr(os, "replace", replace_twice)
    assert checkpoints.save(10, {"step": 10, "w": torch.zeros(3)}, SETTINGS) is None
    assert checkpoints.load(SETTINGS)["step"] == 5


def test_what_was_just_saved_is_kept_below_the_steps_of_another_run(
    checkpoints: Checkpoints,
) -> None:
    for step in (100, 110, 10):
        assert checkpoints.save(step, {"step": step}, SETTINGS) is None
    assert steps_in(checkpoints) == [10, 100, 110]


def test_a_save_counts_if_another_run_removes_its_marker(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Marker.write

    def removed(marker: Marker, folder: Path) -> None:
        write(marker, folder)
        (folder / MARKER).unlink()

    monkeypatch.setattr(Marker, "write", removed)
    assert checkpoints.save(1, {}, SETTINGS) is None
    assert (checkpoints.folder / "step-000000001").exists()


def save_and_load_in_a_folder_that_cannot_be_listed(folder: Path) -> tuple[str | None, str]:
    checkpoints = Checkpoints(folder, dist.get_rank(), 2)
    problem = checkpoints.save(1, {}, SETTINGS)
    with pytest.raises(RecipeError) as caught:
        checkpoints.load(SETTINGS)
    return problem, str(caught.value)


def test_no_rank_waits_for_one_that_cannot_list_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path, pattern: str) -> Iterator[Path]:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "glob", stale)
    first, second = on_threads(2, save_and_load_in_a_folder_that_cannot_be_listed, tmp_path)
    assert first == second
    assert first[0] is None
    assert str(tmp_path) in first[1]


def save_in_own_folder(folder: Path) -> str | None:
    rank = dist.get_rank()
    return Checkpoints(folder / str(rank), rank, 2).save(5, {"rank": rank}, SETTINGS)


def test_a_folder_that_the_ranks_do_not_share_is_found_at_once(tmp_path: Path) -> None:
    problems = on_threads(2, save_in_own_folder, tmp_path)
    assert problems[0] == problems[1]
    assert f"{tmp_path / '0' / 'step-000000005' / 'rank-1.pt'}" in problems[0]
    assert "--out" in problems[0]
    assert not list(tmp_path.rglob(MARKER))


def save_what_cannot_be_saved_on_rank_1(folder: Path) -> str | None:
    rank = dist.get_rank()
    state = {"hook": threading.Lock()} if rank == 1 else {}
    return Checkpoints(folder, rank, 2).save(5, state, SETTINGS)


def test_no_rank_waits_for_one_that_cannot_save_its_state(tmp_path: Path) -> None:
    problems = on_threads(2, save_what_cannot_be_saved_on_rank_1, tmp_path)
    assert problems[0] == problems[1]
    assert problems[0].startswith("rank 1: TypeError: ")
    assert not list(tmp_path.rglob("*.pt"))


# Loading.


def test_nothing_to_resume_from(checkpoints: Checkpoints) -> None:
    with pytest.raises(RecipeError, match=r"--resume: .*checkpoints;.*--checkpoint-every"):
        checkpoints.load(SETTINGS)


def test_another_configuration(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, {}, SETTINGS)
    with pytest.raises(RecipeError, match=r"model 'smallcnn' .*'timm/x'"):
        checkpoints.load({**SETTINGS, "model": "timm/x"})


def test_another_number_of_ranks(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, {}, SETTINGS)
    more = Checkpoints(checkpoints.folder, rank=0, world_size=4)
    with pytest.raises(RecipeError, match=r"1 ranks .*4"):
        more.load(SETTINGS)


def test_another_number_of_ranks_gets_the_states_of_all(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, {"w": 1.0}, SETTINGS)
    assert checkpoints.load(SETTINGS, resized=lambda states: {"all": states}) == {"w": 1.0}
    loaded = on_threads(2, load_resized, checkpoints.folder)
    assert loaded == [{"rank": 0, "all": [{"w": 1.0}]}, {"rank": 1, "all": [{"w": 1.0}]}]


def load_resized(folder: Path) -> dict[str, object]:
    checkpoints = Checkpoints(folder, dist.get_rank(), 2)
    with pytest.raises(RecipeError, match="model"):
        checkpoints.load({**SETTINGS, "model": "timm/x"}, resized=lambda states: {})
    return checkpoints.load(SETTINGS, lambda states: {"rank": checkpoints.rank, "all": states})


def write_files_of(states: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write a checkpoint of several ranks, and return their files."""

    def save() -> None:
        rank = dist.get_rank()
        assert Checkpoints(folder, rank, len(states)).save(5, states[rank], SETTINGS) is None

    on_threads(len(states), save)
    return sorted(folder.rglob("rank-*.pt"))


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Measure by how many bytes the memory of this process grows, without pages of files."""

    def now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    start, over = now(), threading.Event()
    seen = [start]

    def watch() -> None:
        while not over.is_set():
            seen.append(now())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(seen) - start
    finally:
        over.set()
        thread.join()


def residuals(exchange: torchcomp.InProcessExchange) -> dict[str, Any]:
    """Return the state of a rank with a residual of 2 MiB."""
    gradients = {f"{index}": torch.ones(1 << 15) for index in range(16)}
    averager = torchcomp.Averager("ef(topk(0.01))", exchange, gradients)
    averager.average_all(gradients)
    return averager.state_dict()


def test_another_number_of_ranks_needs_less_memory_than_two_files(tmp_path: Path) -> None:
    methods = torchcomp.run_in_process(4, residuals)
    common = {"model": torch.zeros(3 << 19), "meter": torch.zeros(3)}
    (path, *_) = write_files_of([{**common, "method": method} for method in methods], tmp_path)
    with peak_memory() as peak:
        state = Checkpoints(tmp_path, 0, 1).load(SETTINGS, lambda states: resized(states, 4, 24, 0))
    assert (state["method"]["rank"], state["method"]["world_size"]) == (4, 24)
    assert peak() < 2 * path.stat().st_size


def test_every_changed_bit_of_a_marker_is_found(tmp_path: Path) -> None:
    marker = Marker(("0f", "1e"), {"lr": 0.2, "compress": "ef(topk(0.01))"})
    marker.write(tmp_path)
    path = tmp_path / MARKER
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        try:
            # JSON ignores white space, so a changed space can leave everything as it was.
            assert Marker.read(tmp_path) == marker
        except RecipeError:
            continue
        assert chr(good[bit // 8]).isspace()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def flip_a_bit(path: Path) -> None:
    """Change a bit in the middle, which is the tensor. torch.load() does not notice it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert torch.load(path)["w"].count_nonzero() == 1


def delete(path: Path) -> None:
    path.unlink()


def garble_the_marker(path: Path) -> None:
    path.with_name("complete.json").write_bytes(b"\xff{")


def empty_the_marker(path: Path) -> None:
    path.with_name("complete.json").write_text("{}")


DAMAGE = [truncate, flip_a_bit, delete, garble_the_marker, empty_the_marker]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped(
    damage: Callable[[Path], None], checkpoints: Checkpoints, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 10):
        checkpoints.save(step, {"step": step, "w": torch.zeros(1000)}, SETTINGS)
    newest = checkpoints.folder / "step-000000010"
    damage(newest / "rank-0.pt")
    assert checkpoints.load(SETTINGS)["step"] == 5
    (line,) = capfd.readouterr().err.splitlines()
    assert str(newest) in line


def test_without_an_intact_checkpoint(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, {"w": torch.zeros(1000)}, SETTINGS)
    truncate(next(checkpoints.folder.rglob("rank-0.pt")))
    with pytest.raises(RecipeError, match=r"--resume: .*checkpoints are damaged"):
        checkpoints.load(SETTINGS)


def test_a_full_disk_keeps_the_checkpoint_before(checkpoints: Checkpoints) -> None:
    assert checkpoints.save(5, {"step": 5}, SETTINGS) is None
    for step, name in ((10, ".rank-0.pt"), (15, ".complete.json")):
        full = checkpoints.folder / f"step-{step:09d}" / name
        full.parent.mkdir()
        full.symlink_to("/dev/full")
        problem = checkpoints.save(step, {"step": step}, SETTINGS)
        assert problem == "rank 0: No space left on device"
        # The next run does not find it, and half a file takes no space.
        assert [*full.parent.iterdir()] == []
    assert checkpoints.load(SETTINGS)["step"] == 5
    assert checkpoints.save(20, {"step": 20}, SETTINGS) is None
    assert checkpoints.load(SETTINGS)["step"] == 20


def on_one_of_two_ranks(folder: Path) -> tuple[str | None, Path | None]:
    rank = dist.get_rank()
    checkpoints = Checkpoints(folder, rank, 2)
    checkpoints.save(5, {"step": 5, "rank": rank}, SETTINGS)
    full = folder / "step-000000010" / ".rank-1.pt"
    if rank == 1:
        full.parent.mkdir(exist_ok=True)
        full.symlink_to("/dev/full")
    problem = checkpoints.save(10, {"step": 10, "rank": rank}, SETTINGS)
    # Rank 1 finds the damage, and both forget this checkpoint.
    checkpoints.save(15, {"step": 15, "rank": rank}, SETTINGS)
    if rank == 1:
        truncate(folder / "step-000000015" / "rank-1.pt")
    assert checkpoints.load(SETTINGS) == {"step": 5, "rank": rank}
    return problem, checkpoints.newest()


def test_all_ranks_know_what_happens_to_one_of_them(tmp_path: Path) -> None:
    expected = "rank 1: No space left on device", tmp_path / "step-000000005"
    assert on_threads(2, on_one_of_two_ranks, tmp_path) == [expected] * 2
    assert sorted(tmp_path.glob("step-000000010/*")) == []


def test_all_random_generators_resume(checkpoints: Checkpoints) -> None:
    import random

    import numpy as np

    def draws() -> list[float]:
        return [random.gauss(0, 1), float(np.random.normal()), torch.randn(()).item()]

    seed_all(3)
    # Gaussians are drawn in pairs. After an odd number, the state includes the second of a pair.
    draws()
    checkpoints.save(5, {"random": random_state()}, SETTINGS)
    wanted = [draws() for _ in range(3)]
    set_random_state(checkpoints.load(SETTINGS)["random"])
    assert [draws() for _ in range(3)] == wanted
