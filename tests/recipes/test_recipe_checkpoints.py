"""A set of checkpoints counts only when it is whole, and only for the run that it belongs to."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipes.checkpoints import Checkpoints
from recipes.errors import RecipeError
from recipes.random_state import random_state, restore, seed_all

SETTINGS = {"model": "smallcnn", "epochs": 3}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", rank=0, ranks=1)


def test_the_newest_whole_set_is_loaded(checkpoints: Checkpoints) -> None:
    for step in (5, 10):
        checkpoints.save(step, {"step": step, "w": torch.full((3,), float(step))}, SETTINGS)
    # A third one that was killed before its marker was written.
    unfinished = checkpoints.folder / "step-000000015"
    unfinished.mkdir()
    (unfinished / "rank-0.pt").write_bytes(b"half")
    state = checkpoints.load(SETTINGS)
    assert state["step"] == 10
    assert torch.equal(state["w"], torch.full((3,), 10.0))


def test_only_the_last_two_sets_are_kept(checkpoints: Checkpoints) -> None:
    for step in range(1, 6):
        checkpoints.save(step, {"step": step}, SETTINGS)
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["step-000000004", "step-000000005"]


def test_a_set_that_another_rank_has_begun_is_left_alone(checkpoints: Checkpoints) -> None:
    ahead = checkpoints.folder / "step-000000009"
    ahead.mkdir(parents=True)
    for step in range(1, 5):
        checkpoints.save(step, {"step": step}, SETTINGS)
    assert ahead.is_dir()


def test_nothing_to_resume_from(checkpoints: Checkpoints) -> None:
    with pytest.raises(RecipeError, match=r"--resume: no complete checkpoint in .*checkpoints"):
        checkpoints.load(SETTINGS)


def test_another_configuration(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, {}, SETTINGS)
    with pytest.raises(RecipeError, match="has model 'smallcnn' and this run has 'timm/x'"):
        checkpoints.load({**SETTINGS, "model": "timm/x"})


def test_another_number_of_ranks(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, {}, SETTINGS)
    more = Checkpoints(checkpoints.folder, rank=0, ranks=4)
    with pytest.raises(RecipeError, match="was written by 1 ranks and this run has 4"):
        more.load(SETTINGS)


def test_a_damaged_file(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, {"w": torch.zeros(100)}, SETTINGS)
    path = next(checkpoints.folder.rglob("rank-0.pt"))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RecipeError, match=r"--resume: .*rank-0.pt cannot be read"):
        checkpoints.load(SETTINGS)


def test_every_generator_goes_on_where_it_was(checkpoints: Checkpoints) -> None:
    import random

    import numpy as np

    def draws() -> list[float]:
        return [random.gauss(0, 1), float(np.random.normal()), torch.randn(()).item()]

    seed_all(3)
    # An odd number of Gaussian draws leaves half a pair behind.
    draws()
    checkpoints.save(5, {"random": random_state()}, SETTINGS)
    wanted = [draws() for _ in range(3)]
    restore(checkpoints.load(SETTINGS)["random"])
    assert [draws() for _ in range(3)] == wanted
