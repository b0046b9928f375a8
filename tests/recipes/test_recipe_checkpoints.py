"""A checkpoint is loaded only if it is complete and was written by the same run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipes.checkpoints import Checkpoints
from recipes.errors import RecipeError
from recipes.random_state import random_state, seed_all, set_random_state

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


def test_a_damaged_file(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, {"w": torch.zeros(100)}, SETTINGS)
    path = next(checkpoints.folder.rglob("rank-0.pt"))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RecipeError, match=r"--resume: .*rank-0\.pt"):
        checkpoints.load(SETTINGS)


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
