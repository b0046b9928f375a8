"""Data sets, loaders and augmentation, and errors for bad input."""

import gc
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.errors import RecipeError
from recipes.image_data import beton, sources
from recipes.image_data.augment import Augmentation, MixUp, RandAugment, normalise
from recipes.image_data.batches import dataset_sizes, open_batches
from recipes.image_data.order import TrainOrder
from recipes.image_data.presets import PRESETS
from recipes.settings import Settings

CPU = torch.device("cpu")


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


# Small data sets.


def test_digits_match_their_preset():
    data, preset = sources.read_public("digits", None), PRESETS["digits"]
    assert (len(data["train"]), len(data["test"])) == (preset.train_images, preset.test_images)
    assert data["train"].images.mean() == pytest.approx(preset.mean[0], abs=0.01)
    assert data["train"].images.std() == pytest.approx(preset.std[0], abs=0.01)
    # One fifth of each class are test images, a quarter of the number of training images.
    shares = np.bincount(data["test"].labels) / np.bincount(data["train"].labels)
    assert 0.22 < shares.min() < shares.max() < 0.26


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("mnist", "MNIST", (28, 28)),
        ("svhn", "SVHN", (3, 32, 32)),
        ("cifar100", "CIFAR100", (32, 32, 3)),
    ],
)
def test_torchvision_reads_the_small_data_sets(name, kind, shape, tmp_path, monkeypatch):
    class Made:
        def __init__(self, root, split="", train=False):
            assert root == str(tmp_path)
            self.data = np.full((6, *shape), 3 if train or split == "train" else 4, np.uint8)
            self.targets = [0, 1, 2, 0, 1, 2]

    monkeypatch.setattr(sources.vision().datasets, kind, Made)
    found = sources.read_public(name, tmp_path)
    size, channels = PRESETS[name].size, PRESETS[name].channels
    assert found["train"].images.shape == (6, size, size, channels)
    assert (found["train"].images.max(), found["test"].images.max()) == (3, 4)
    assert found["train"].classes == 3


AUTHORS = {"randaugment_ops": 2, "mixup": 0.2, "mixup_shares": "micro-batch"}


@pytest.mark.parametrize("more", [{}, {"randaugment_ops": 2, "mixup": 0.2}], ids=["plain", "all"])
def test_ranks_together_see_what_one_rank_sees(more):
    whole = list(opened(**more).train(1, 20))
    halves = [list(opened(rank, 2, **more).train(1, 20)) for rank in range(2)]
    assert len(whole) == 2
    for step, (images, labels) in enumerate(whole):
        parts = [half[step] for half in halves]
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


def test_ranks_together_see_what_one_rank_with_as_many_micro_batches_sees():
    whole = all_of(opened(**AUTHORS, accumulate=4).train(1, 20))
    halves = [list(opened(rank, 2, **AUTHORS, accumulate=2).train(1, 20)) for rank in range(2)]
    parts = [part for pair in zip(*halves, strict=True) for part in pair]
    assert same(all_of(iter(parts)), whole)
    assert not same(all_of(opened(**AUTHORS, accumulate=2).train(1, 20)), whole)


@pytest.mark.parametrize("more", [{}, AUTHORS], ids=["plain", "authors"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_epoch_resumes_bit_for_bit_from_any_step(step, more):
    batches = opened(**more)
    whole, rest = list(batches.train(2, 18)), list(batches.train(2, 18 + step))
    assert len(rest) == len(whole) - step
    assert all(same(a, b) for a, b in zip(rest, whole[step:], strict=True))


def test_every_test_image_is_in_one_shard():
    labels = torch.cat([all_of(opened(rank, 3, batch_size=60).test())[1] for rank in range(3)])
    expected = sources.read_public("digits", None)["test"].labels
    assert sorted(labels.tolist()) == sorted(expected.tolist())


# Augmentation.


def augmentation(name, ranks=1, rank=0):
    return Augmentation(PRESETS[name], TrainOrder(100, 20, rank, ranks, seed=3))


def test_shifts_move_images_by_at_most_a_pixel():
    images = torch.zeros(20, 8, 8, 1, dtype=torch.uint8)
    images[:, 4, 4] = 9
    positions = augmentation("digits")(images, epoch=0, step=0).squeeze(-1).nonzero()
    assert len(positions) == 20
    assert (positions[:, 1:] - 4).abs().max() == 1
    assert len(positions[:, 1:].unique(dim=0)) > 4


def operations(ranks=1, rank=0):
    return RandAugment(2, 10, TrainOrder(100, 20, rank, ranks, seed=3))


CHANGES = {
    "shift and mirror": lambda *ranks: augmentation("cifar10", *ranks),
    "randaugment": lambda *ranks: operations(*ranks),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_augmentation_depends_on_epoch_and_step_and_not_on_ranks(kind):
    images = torch.randint(0, 256, (20, 32, 32, 3), dtype=torch.uint8)
    whole = CHANGES[kind]()(images, 1, 2)
    halves = [CHANGES[kind](2, r)(images[10 * r : 10 * r + 10], 1, 2) for r in range(2)]
    assert torch.equal(torch.cat(halves), whole)
    assert not torch.equal(whole, images)
    assert not torch.equal(CHANGES[kind]()(images, 1, 3), whole)
    assert not torch.equal(CHANGES[kind]()(images, 2, 2), whole)


# MixUp.


def mixing(ranks=1, rank=0, alpha=0.2, **more):
    return MixUp(alpha, 4, TrainOrder(100, 20, rank, ranks, seed=3), **more)


BY_MICRO_BATCH = {"shares": "micro-batch", "micro_batches": 2}


@pytest.mark.parametrize("more", [{}, BY_MICRO_BATCH], ids=["image", "micro-batch"])
def test_images_and_labels_are_mixed_with_the_same_share(more):
    images, labels = torch.randn(20, 1, 2, 2), torch.arange(20) % 4
    shares, others = mixing(**more).draw(1, 2)
    mixed, targets = mixing(**more)(images, labels, 1, 2)
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


# Photographs.


def where(folder, **more):
    return {"dataset": "folder", "data_path": str(folder), "batch_size": 4, **more}


def test_settings_reach_the_training_images(photo_folder):
    small = where(photo_folder, image_size=32)
    plain = all_of(opened(**small).train(0, 0))
    assert plain[0].shape == (12, 3, 32, 32)
    changed = all_of(opened(**small, randaugment_ops=2).train(0, 0))
    assert not torch.equal(changed[0], plain[0])
    mixed = all_of(opened(**small, mixup=0.2).train(0, 0))
    assert torch.equal(mixed[1].sum(1), torch.ones(12))


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


def test_photographs_are_cropped_reproducibly(photo_folder):
    before = torch.get_rng_state()
    whole = all_of(opened(**where(photo_folder)).train(1, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert whole[0].shape == (12, 3, 224, 224)
    later = all_of(opened(**where(photo_folder)).train(1, 1))
    assert same(later, tuple(part[4:] for part in whole))
    assert dataset_sizes(Settings(**where(photo_folder))).classes == 2


def test_a_corrupt_photograph_is_named(photo_folder):
    bad = photo_folder / "train" / "dog" / "3.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(RecipeError, match=r"dog/3\.jpg"):
        all_of(opened(**where(photo_folder)).train(0, 0))


def test_missing_class_folders_and_images(photo_folder):
    shutil.rmtree(photo_folder / "val" / "dog")
    with pytest.raises(RecipeError, match=r"train/.*val/.* dog"):
        opened(**where(photo_folder))
    shutil.rmtree(photo_folder / "val")
    with pytest.raises(RecipeError, match=r"val .*sub-folder"):
        opened(**where(photo_folder))
    shutil.copytree(photo_folder / "train", photo_folder / "val")
    for image in (photo_folder / "train").rglob("*.jpg"):
        image.unlink()
    with pytest.raises(RecipeError, match=r"train .*\.jpg"):
        opened(**where(photo_folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 32}, r"--image-size 32 .*digits .*8 x 8"),
        ({"dataset": "cifar10", "data_path": "nowhere"}, r"--dataset cifar10 .*root"),
        ({"dataset": "folder", "data_path": "nowhere"}, r"--data-path nowhere"),
        ({"loader": "ffcv"}, r"--loader ffcv .*digits"),
    ],
)
def test_bad_data_settings(changes, message):
    with pytest.raises(RecipeError, match=message):
        opened(**changes)


# .beton files.


def test_a_missing_ffcv_is_an_error_that_says_what_to_install(photo_folder, monkeypatch):
    (photo_folder / "train_x.beton").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "ffcv", None)
    with pytest.raises(RecipeError, match=r"libturbojpeg0-dev.*--loader torchvision"):
        opened(**where(photo_folder))


@pytest.mark.usefixtures("needs_ffcv")
class TestBadBeton:
    @pytest.fixture
    def path(self, photo_folder, tmp_path):
        path = tmp_path / "train_tiny.beton"
        beton.write_beton(path, sources.photographs(photo_folder)["train"])
        beton.check_beton(path)
        return path

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda content: content[:10], "missing or empty"),
            (lambda content: content[:1000], "truncated"),
            (lambda content: content[:-1], "truncated"),
            # Never finished, no images, and no .beton file at all.
            (lambda content: content[:16] + bytes(8) + content[24:], "truncated"),
            (lambda content: content[:8] + bytes(8) + content[16:], "0 samples"),
            (lambda content: b"\xff" * 10_000, "version is 65535"),
        ],
    )
    def test_a_damaged_file_is_named(self, change, message, path):
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(RecipeError, match=rf"train_tiny\.beton.*{message}.*write_beton"):
            beton.check_beton(path)

    def test_one_split_missing(self, path):
        with pytest.raises(RecipeError, match=r"val\*\.beton .*none.*--loader torchvision"):
            opened(**where(path.parent, loader="ffcv"))
