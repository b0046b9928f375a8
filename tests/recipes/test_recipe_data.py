"""Data sets, their order, loaders and augmentation, and errors for bad input."""

import gc
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.errors import RecipeError
from recipes.image_data import beton, sources
from recipes.image_data.augment import Augmentation, MixUp, RandAugment, normalise
from recipes.image_data.batches import dataset_sizes, open_batches
from recipes.image_data.order import TrainOrder
from recipes.image_data.order import test_shard as shard_of
from recipes.image_data.presets import PRESETS
from recipes.settings import Settings

CPU = torch.device("cpu")
ALL = {"randaugment_ops": 2, "mixup": 0.2}
# As the QSR paper's authors do it: the result depends on the size of a micro-batch.
AUTHORS = {**ALL, "mixup_shares": "micro-batch"}


@pytest.fixture(autouse=True, scope="module")
def _no_garbage():
    # Loader processes are forks. They would free what earlier tests left for the garbage collector,
    # and a process group joins threads that a fork does not have.
    gc.collect()


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


def opened(rank=0, world_size=1, **changes):
    return open_batches(Settings(**changes), rank, world_size, CPU, workers=1)


def all_of(batches):
    pairs = [(images.clone(), labels.clone()) for images, labels in batches]
    return tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_an_epoch_has_every_image_once_and_a_step_the_same_for_any_number_of_ranks(ranks):
    orders = [TrainOrder(103, 12, rank, ranks, seed=5) for rank in range(ranks)]
    together = np.concatenate([order.batches(3) for order in orders], axis=1)
    assert np.array_equal(together, TrainOrder(103, 12, 0, 1, seed=5).batches(3))
    assert len(np.unique(together)) == together.size == 103 // 12 * 12
    assert 0 <= together.min() < together.max() < 103
    whole = orders[-1].batches(2)
    for step in range(len(whole) + 1):
        assert np.array_equal(orders[-1].batches(2, step), whole[step:])
    shards = [shard_of(11, rank, ranks) for rank in range(ranks)]
    assert sorted(np.concatenate(shards)) == list(range(11))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_digits_match_their_preset():
    data, preset = sources.read_public("digits", None), PRESETS["digits"]
    assert (len(data["train"]), len(data["test"])) == (preset.train_images, preset.test_images)
    assert data["train"].images.mean() == pytest.approx(preset.mean[0], abs=0.01)
    assert data["train"].images.std() == pytest.approx(preset.std[0], abs=0.01)
    # One fifth of each class are test images, a quarter of the number of training images.
    shares = np.bincount(data["test"].labels) / np.bincount(data["train"].labels)
    assert 0.22 < shares.min() < shares.max() < 0.26
    labels = torch.cat([all_of(opened(rank, 3, batch_size=60).test())[1] for rank in range(3)])
    assert sorted(labels.tolist()) == sorted(data["test"].labels.tolist())


SHAPES = {"MNIST": (28, 28), "SVHN": (3, 32, 32), "CIFAR100": (32, 32, 3)}


@pytest.mark.parametrize("kind", SHAPES)
def test_torchvision_reads_the_small_data_sets(kind, tmp_path, monkeypatch):
    class Made:
        def __init__(self, root, split="", train=False):
            value = 3 if train or split == "train" else 4
            self.data = np.full((6, *SHAPES[kind]), value, np.uint8)
            self.targets = [0, 1, 2, 0, 1, 2]

    monkeypatch.setattr(sources.vision().datasets, kind, Made)
    found, preset = sources.read_public(kind.lower(), tmp_path), PRESETS[kind.lower()]
    assert found["train"].images.shape == (6, preset.size, preset.size, preset.channels)
    assert (found["train"].images.max(), found["test"].images.max()) == (3, 4)
    assert found["train"].classes == 3


@pytest.mark.parametrize("more", [{}, ALL, AUTHORS])
def test_ranks_together_see_what_one_rank_sees_and_an_epoch_resumes(more):
    by_micro_batch = more is AUTHORS
    whole = list(opened(**more, accumulate=4).train(1, 18))
    halves = [
        list(opened(rank, 2, **more, accumulate=2 if by_micro_batch else 4).train(1, 18))
        for rank in range(2)
    ]
    for step, pair in enumerate(zip(*halves, strict=True)):
        assert same(all_of(iter(pair)), whole[step])
    other = list(opened(**more, accumulate=2).train(1, 18))
    assert all(map(same, other, whole)) == (not by_micro_batch)
    for step in (1, 3):
        rest = list(opened(**more, accumulate=4).train(1, 18 + step))
        assert len(rest) == len(whole) - step
        assert all(map(same, rest, whole[step:]))


def test_shifts_move_images_by_at_most_a_pixel():
    images = torch.zeros(20, 8, 8, 1, dtype=torch.uint8)
    images[:, 4, 4] = 9
    augmentation = Augmentation(PRESETS["digits"], TrainOrder(100, 20, 0, 1, seed=3))
    positions = augmentation(images, epoch=0, step=0).squeeze(-1).nonzero()
    assert len(positions) == 20
    assert (positions[:, 1:] - 4).abs().max() == 1
    assert len(positions[:, 1:].unique(dim=0)) > 4


CHANGES = {
    "shift and mirror": lambda order: Augmentation(PRESETS["cifar10"], order),
    "randaugment": lambda order: RandAugment(2, 10, order),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_augmentation_depends_on_epoch_and_step_and_not_on_ranks(kind):
    images = torch.randint(0, 256, (20, 32, 32, 3), dtype=torch.uint8)
    change = CHANGES[kind](TrainOrder(100, 20, 0, 1, seed=3))
    whole = change(images, 1, 2)
    second = CHANGES[kind](TrainOrder(100, 20, 1, 2, seed=3))
    assert torch.equal(second(images[10:], 1, 2), whole[10:])
    for other in (images, change(images, 1, 3), change(images, 2, 2)):
        assert not torch.equal(other, whole)


@pytest.mark.parametrize("more", [{}, {"shares": "micro-batch", "micro_batches": 2}])
def test_images_and_labels_are_mixed_with_the_same_share(more):
    mixing = MixUp(0.2, 4, TrainOrder(100, 20, 0, 1, seed=3), **more)
    images, labels = torch.randn(20, 1, 2, 2), torch.arange(20) % 4
    shares, others = mixing.draw(1, 2)
    assert shares.max() <= 0.5
    mixed, targets = mixing(images, labels, 1, 2)
    for index, (share, other) in enumerate(zip(shares.float(), others, strict=True)):
        expected = (1 - share) * images[index] + share * images[other]
        torch.testing.assert_close(mixed[index], expected)
        weights = torch.zeros(4)
        weights[labels[index]] += 1 - share
        weights[labels[other]] += share
        torch.testing.assert_close(targets[index], weights)
    pairs = [index + 1 - 2 * (index % 2) for index in range(20)]
    assert (others.tolist() == pairs) == (not more)
    # A share for each image, or one for each of two micro-batches: images 0 to 9 and 10 to 19.
    assert len(set(shares.tolist())) == (2 if more else 20)
    assert sorted(others[:10].tolist()) == [*range(10)]


def where(folder, **more):
    return {"dataset": "folder", "data_path": str(folder), "batch_size": 4, **more}


def test_photographs_are_cropped_reproducibly_and_changed_as_the_settings_say(photo_folder):
    before = torch.get_rng_state()
    small = where(photo_folder, image_size=32)
    whole = all_of(opened(**small).train(1, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert whole[0].shape == (12, 3, 32, 32)
    assert same(all_of(opened(**small).train(1, 1)), tuple(part[4:] for part in whole))
    assert not torch.equal(all_of(opened(**small, randaugment_ops=2).train(1, 0))[0], whole[0])
    mixed = all_of(opened(**small, mixup=0.2).train(0, 0))
    assert torch.equal(mixed[1].sum(1), torch.ones(12))
    assert dataset_sizes(Settings(**small)).classes == 2


def test_a_test_image_keeps_its_share_of_the_shorter_side(photo_folder):
    narrow, wide = (
        all_of(opened(**where(photo_folder, image_size=32, crop_ratio=r)).test())[0]
        for r in (0.5, 1.0)
    )
    file = photo_folder / "val" / "cat" / "0.jpg"
    whole = Image.open(file).resize((40, 32), Image.Resampling.BILINEAR).crop((4, 0, 36, 32))
    bytes_ = torch.from_numpy(np.array(whole))[None]
    torch.testing.assert_close(wide[:1], normalise(bytes_, PRESETS["folder"]))
    assert not torch.equal(narrow, wide)


BAD_FOLDERS = {
    r"dog/3\.jpg": lambda folder: (folder / "train/dog/3.jpg").write_bytes(b"\xff\xd8\xff"),
    r"train/.*val/.* dog": lambda folder: shutil.rmtree(folder / "val" / "dog"),
    r"val .*sub-folder": lambda folder: shutil.rmtree(folder / "val"),
    r"train .*\.jpg": lambda folder: [each.unlink() for each in folder.rglob("train/*/*.jpg")],
    # Without ffcv, the message says what to install.
    r"libturbojpeg0-dev.*--loader torchvision": lambda f: (f / "train_x.beton").touch(),
}


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_bad_folders(message, photo_folder, monkeypatch):
    for name in ("ffcv", "ffcv.types"):  # another test can have imported both
        monkeypatch.setitem(sys.modules, name, None)
    BAD_FOLDERS[message](photo_folder)
    with pytest.raises(RecipeError, match=message):
        all_of(opened(**where(photo_folder)).train(0, 0))


@pytest.mark.usefixtures("needs_ffcv")
def test_a_damaged_beton_file_is_named(photo_folder, tmp_path):
    path = tmp_path / "train_tiny.beton"
    beton.write_beton(path, sources.photographs(photo_folder)["train"])
    beton.check_beton(path)
    with pytest.raises(RecipeError, match=r"val\*\.beton .*none.*--loader torchvision"):
        opened(**where(tmp_path, loader="ffcv"))
    good = path.read_bytes()
    # Cut, never finished, without images, and no .beton file at all.
    for content, message in (
        (good[:10], "missing or empty"),
        (good[:16] + bytes(8) + good[24:], "truncated"),
        (good[:8] + bytes(8) + good[16:], "0 samples"),
        (b"\xff" * 10_000, "version is 65535"),
    ):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=rf"train_tiny\.beton.*{message}.*write_beton"):
            beton.check_beton(path)
