"""Each image appears once per epoch. A step has the same images for any number of ranks."""

import numpy as np
import pytest

from recipes.errors import RecipeError
from recipes.image_data.order import TrainOrder
from recipes.image_data.order import test_shard as shard_of


def orders(world_size, *, samples=103, batch=12, seed=5):
    return [TrainOrder(samples, batch, rank, world_size, seed) for rank in range(world_size)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_a_step_has_the_same_images_for_any_number_of_ranks(ranks):
    together = np.concatenate([order.batches(3) for order in orders(ranks)], axis=1)
    assert np.array_equal(together, orders(1)[0].batches(3))


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_epoch_has_no_image_twice_and_drops_less_than_a_batch(ranks):
    seen = np.concatenate([order.batches(0).ravel() for order in orders(ranks)])
    assert len(np.unique(seen)) == len(seen) == 103 // 12 * 12
    assert seen.min() >= 0
    assert seen.max() < 103


def test_an_epoch_resumes_from_any_step():
    order = orders(2)[1]
    whole = order.batches(2)
    for step in range(order.steps_per_epoch + 1):
        assert np.array_equal(order.batches(2, step), whole[step:])


@pytest.mark.parametrize(("samples", "ranks"), [(10, 1), (10, 3), (11, 4), (3, 3)])
def test_test_shards_cover_every_image_once(samples, ranks):
    shards = [shard_of(samples, rank, ranks) for rank in range(ranks)]
    assert sorted(np.concatenate(shards)) == list(range(samples))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_batch_not_divisible_by_ranks():
    with pytest.raises(RecipeError, match=r"--batch-size 10 .*4 ranks"):
        TrainOrder(samples=100, batch_size=10, rank=0, world_size=4, seed=0)


def test_batch_larger_than_the_training_set():
    with pytest.raises(RecipeError, match=r"--batch-size .*100 .*128"):
        TrainOrder(samples=100, batch_size=128, rank=0, world_size=2, seed=0)
