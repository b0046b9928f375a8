"""A checkpoint is loaded only if it is complete and was written by the same run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipes.checkpoints import Checkpoints
from recipes.errors import RecipeError
from recipes.random_state import random_state, seed_all, set_random_state
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


def test_a_checkpoint_that_another_rank_is_writing_is_kept(checkpoints: Checkpoints) -> None:
    ahead = checkpoints.folder / "step-000000009"
    ahead.mkdir(parents=True)
    for step in range(1, 5):
        checkpoints.save(step, {"step": step}, SETTINGS)
    assert ahead.is_dir()


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
    # Rank 1 finds the damage.
    checkpoints.save(15, {"step": 15, "rank": rank}, SETTINGS)
    if rank == 1:
        truncate(folder / "step-000000015" / "rank-1.pt")
    assert checkpoints.load(SETTINGS) == {"step": 5, "rank": rank}
    return problem, checkpoints.newest()


def test_all_ranks_know_what_happens_to_one_of_them(tmp_path: Path) -> None:
    expected = "rank 1: No space left on device", tmp_path / "step-000000015"
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
