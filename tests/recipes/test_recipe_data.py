"""Data sets, loaders and augmentation, and errors for bad input."""

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from recipes.errors import RecipeError
from recipes.image_data import beton, dataset_sizes, open_batches, sources
from recipes.image_data.augment import Augmentation, normalise
from recipes.image_data.mixup import MixUp
from recipes.image_data.order import TrainOrder
from recipes.image_data.presets import PRESETS
from recipes.image_data.randaugment import OPERATIONS, RandAugment
from recipes.settings import Settings
from tests.support.patience import PATIENCE
from torchcomp.advisor.torchvision_compat import import_torchvision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _no_garbage() -> None:
    # Loader processes are forks. They would free what earlier tests left for the garbage collector,
    # and a process group joins threads that a fork does not have.
    gc.collect()


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


def opened(rank: int = 0, world_size: int = 1, **changes: Any) -> Any:
    settings = Settings(**{"loader": "torchvision", **changes})
    return open_batches(settings, rank, world_size, CPU, workers=1)


def all_of(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    pairs = [(images.clone(), labels.clone()) for images, labels in batches]
    return tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# The digits.


def test_digits_match_their_preset() -> None:
    data, preset = sources.digits(), PRESETS["digits"]
    assert len(data["train"]) == preset.train_images
    assert len(data["test"]) == preset.test_images
    assert data["train"].images.mean() == pytest.approx(preset.mean[0], abs=0.01)
    assert data["train"].images.std() == pytest.approx(preset.std[0], abs=0.01)
    # One fifth of each class are test images, a quarter of the number of training images.
    shares = np.bincount(data["test"].labels) / np.bincount(data["train"].labels)
    assert shares.min() > 0.22
    assert shares.max() < 0.26


AUTHORS = {"randaugment_ops": 2, "randaugment_variant": "composer", "mixup": 0.2}
AUTHORS |= {"mixup_shares": "micro-batch"}


@pytest.mark.parametrize("more", [{}, {"randaugment_ops": 2, "mixup": 0.2}], ids=["plain", "all"])
def test_ranks_together_see_what_one_rank_sees(more: dict[str, Any]) -> None:
    whole = list(opened(**more).train(1, 20))
    halves = [list(opened(rank, 2, **more).train(1, 20)) for rank in range(2)]
    assert len(whole) == 2
    for step, (images, labels) in enumerate(whole):
        parts = [half[step] for half in halves]
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


def test_ranks_together_see_what_one_rank_with_as_many_micro_batches_sees() -> None:
    whole = all_of(opened(**AUTHORS, accumulate=4).train(1, 20))
    halves = [list(opened(rank, 2, **AUTHORS, accumulate=2).train(1, 20)) for rank in range(2)]
    parts = [part for pair in zip(*halves, strict=True) for part in pair]
    assert same(all_of(iter(parts)), whole)
    assert not same(all_of(opened(**AUTHORS, accumulate=2).train(1, 20)), whole)


@pytest.mark.parametrize("more", [{}, AUTHORS], ids=["plain", "authors"])
@pytest.mark.parametrize("step", [0, 1, 21])
def test_an_epoch_resumes_bit_for_bit_from_any_step(step: int, more: dict[str, Any]) -> None:
    batches = opened(**more)
    whole = list(batches.train(2, 0))
    rest = list(batches.train(2, step))
    assert len(rest) == len(whole) - step
    assert all(same(a, b) for a, b in zip(rest, whole[step:], strict=True))


def test_every_test_image_is_in_one_shard() -> None:
    labels = [all_of(opened(rank, 3, batch_size=60).test())[1] for rank in range(3)]
    assert sorted(torch.cat(labels).tolist()) == sorted(sources.digits()["test"].labels.tolist())


@pytest.mark.usefixtures("needs_ffcv")
def test_both_loaders_give_the_same_digits_bit_for_bit(cache: Path) -> None:
    ffcv = opened(1, 2, loader="ffcv", data_cache=str(cache))
    plain = opened(1, 2)
    assert same(all_of(ffcv.train(0, 4)), all_of(plain.train(0, 4)))
    # The first epoch, which began at step 4, must not shorten the next one.
    assert same(all_of(ffcv.train(1, 0)), all_of(plain.train(1, 0)))
    assert same(all_of(ffcv.test()), all_of(plain.test()))


# Augmentation.


def augmentation(name: str, ranks: int = 1, rank: int = 0) -> Augmentation:
    return Augmentation(PRESETS[name], TrainOrder(100, 20, rank, ranks, seed=3))


def test_shifts_move_images_by_at_most_a_pixel() -> None:
    images = torch.zeros(20, 8, 8, 1, dtype=torch.uint8)
    images[:, 4, 4] = 9
    moved = augmentation("digits")(images, epoch=0, step=0)
    positions = moved.squeeze(-1).nonzero()
    assert len(positions) == 20
    assert (positions[:, 1:] - 4).abs().max() == 1
    assert len(positions[:, 1:].unique(dim=0)) > 4


def test_colour_images_are_also_mirrored() -> None:
    ramp = torch.arange(32, dtype=torch.uint8)[None, None, :, None].expand(20, 32, 32, 3)
    result = augmentation("cifar10")(ramp, epoch=0, step=0)
    rising = (result[:, 16, 20, 0] > result[:, 16, 12, 0]).sum().item()
    assert 3 <= rising <= 17


def test_augmentation_depends_on_epoch_and_step_and_not_on_ranks() -> None:
    images = torch.randint(0, 256, (20, 32, 32, 3), dtype=torch.uint8)
    whole = augmentation("cifar10")(images, 1, 2)
    halves = [augmentation("cifar10", 2, r)(images[10 * r : 10 * r + 10], 1, 2) for r in range(2)]
    assert torch.equal(torch.cat(halves), whole)
    assert not torch.equal(augmentation("cifar10")(images, 1, 3), whole)
    assert not torch.equal(augmentation("cifar10")(images, 2, 2), whole)


def test_normalised_images_have_mean_0_and_deviation_1() -> None:
    digits = torch.from_numpy(sources.digits()["train"].images)
    result = normalise(digits, PRESETS["digits"])
    assert result.shape == (1442, 1, 8, 8)
    assert result.mean().abs() < 0.01
    assert (result.std() - 1).abs() < 0.01


# RandAugment.


def random_ops(variant: str = "torchvision", ranks: int = 1, rank: int = 0) -> RandAugment:
    return RandAugment(2, 10, TrainOrder(100, 20, rank, ranks, seed=3), variant)


# torchvision's names of our operations, in our order.
NAMES = ["Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness"]
NAMES += ["Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"]


@pytest.mark.parametrize("magnitude", [1, 10, 30])
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_operations_equal_torchvisions(index: int, magnitude: int) -> None:
    import_torchvision()
    from torchvision.transforms import InterpolationMode, autoaugment

    name = NAMES[index]
    images = torch.randint(0, 256, (3, 3, 40, 52), dtype=torch.uint8)
    images[:, :, :20] //= 3
    space = autoaugment.RandAugment()._augmentation_space(31, (40, 52))
    values, signed = space[name]
    level = float(values[magnitude]) if values.ndim else float(values)
    for sign in (-1, 1):
        strength = level * sign if signed else level
        expected = autoaugment._apply_op(images, name, strength, InterpolationMode.NEAREST, None)
        signs, uniform = torch.full((3,), sign), torch.rand(3)
        found = OPERATIONS["torchvision"][index](images, uniform, signs, magnitude)
        # torchvision's strengths are float32, so a blended byte can round differently.
        assert (found.int() - expected.int()).abs().max() <= 1


def test_there_are_as_many_operations_as_torchvision_has() -> None:
    import_torchvision()
    from torchvision.transforms import autoaugment

    assert set(autoaugment.RandAugment()._augmentation_space(31, (8, 8))) == set(NAMES)
    assert len(OPERATIONS["torchvision"]) == len(NAMES)


# Composer 0.15.1's operations on a Pillow image x: a level from 0.1 to the magnitude, with a sign s
# for the geometric ones, or a factor. In the order of its list.
AFFINE, BILINEAR = Image.Transform.AFFINE, Image.Resampling.BILINEAR


def sheared(x: Any, *matrix: float) -> Any:
    return x.transform(x.size, AFFINE, matrix, resample=BILINEAR)


COMPOSERS: dict[str, Callable[[Any, float, int, float], Any]] = {
    "autocontrast": lambda x, level, s, factor: ImageOps.autocontrast(x),
    "equalize": lambda x, level, s, factor: ImageOps.equalize(x),
    "posterize": lambda x, level, s, factor: ImageOps.posterize(x, 4 - int(level * 4 / 10)),
    "rotate": lambda x, level, s, factor: x.rotate(s * int(level * 3), resample=BILINEAR),
    "solarize": lambda x, level, s, factor: ImageOps.solarize(x, 256 - int(level * 25.6)),
    "shear_x": lambda x, level, s, factor: sheared(x, 1, s * level * 0.03, 0, 0, 1, 0),
    "shear_y": lambda x, level, s, factor: sheared(x, 1, 0, 0, s * level * 0.03, 1, 0),
    "translate_x": lambda x, level, s, f: sheared(x, 1, 0, s * int(level * x.width / 30), 0, 1, 0),
    "translate_y": lambda x, level, s, f: sheared(x, 1, 0, 0, 0, 1, s * int(level * x.height / 30)),
    "color": lambda x, level, s, factor: ImageEnhance.Color(x).enhance(factor),
    "contrast": lambda x, level, s, factor: ImageEnhance.Contrast(x).enhance(factor),
    "brightness": lambda x, level, s, factor: ImageEnhance.Brightness(x).enhance(
        0.75 * factor if factor > 1 else factor
    ),
    "sharpness": lambda x, level, s, factor: ImageEnhance.Sharpness(x).enhance(factor),
}


@pytest.mark.parametrize("magnitude", [3, 10])
@pytest.mark.parametrize("name", COMPOSERS)
def test_operations_equal_composers_on_pillow_images(name: str, magnitude: int) -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (16, 3, 40, 52), dtype=torch.uint8, generator=random)
    images[:, :, :20] //= 3
    # Channels of narrow ranges, and one of a single value.
    images[8:] = images[8:] // torch.arange(2, 10)[:, None, None, None] + 17
    images[15, 1] = 9
    uniform = torch.rand(16, dtype=torch.float64, generator=random)
    signs = torch.tensor([-1, 1]).repeat(8)
    operation = OPERATIONS["composer"][list(COMPOSERS).index(name)]
    found = operation(images, uniform, signs, magnitude).permute(0, 2, 3, 1).int()
    for index, (u, sign) in enumerate(zip(uniform.tolist(), signs.tolist(), strict=True)):
        level = 0.1 + u * (magnitude - 0.1)
        factor = 1 + u * (magnitude - 1) if sign > 0 else 1 - u * 0.09 * magnitude
        image = Image.fromarray(images[index].permute(1, 2, 0).numpy())
        expected = torch.from_numpy(np.array(COMPOSERS[name](image, level, sign, factor)))
        difference = (found[index] - expected.int()).abs()
        # Only the two kinds of interpolation can round differently.
        assert difference.max() <= (name in ("rotate", "shear_x", "shear_y"))
        assert difference.float().mean() < 0.01


def test_there_are_as_many_operations_as_composer_has() -> None:
    assert len(OPERATIONS["composer"]) == len(COMPOSERS)


@pytest.mark.parametrize("variant", OPERATIONS)
def test_operations_are_applied_in_sequence_to_each_image(variant: str) -> None:
    images = torch.randint(0, 256, (20, 32, 32, 3), dtype=torch.uint8)
    augment = random_ops(variant)
    drawn = augment._draw(1, 2)
    expected = images.permute(0, 3, 1, 2).clone()
    for image in range(20):
        own = slice(image, image + 1)
        for chosen, signs, uniform in zip(*drawn, strict=True):
            operation = OPERATIONS[variant][chosen[image]]
            expected[own] = operation(expected[own], uniform[own], signs[own], 10)
    assert torch.equal(augment(images, 1, 2), expected.permute(0, 2, 3, 1))
    chosen, signs, uniform = drawn
    assert len(chosen.unique()) > 7
    assert set(signs.unique().tolist()) == {-1, 1}
    assert len(uniform.unique()) == uniform.numel()


@pytest.mark.parametrize("variant", OPERATIONS)
def test_random_operations_depend_on_epoch_and_step_and_not_on_ranks(variant: str) -> None:
    images = torch.randint(0, 256, (20, 32, 32, 3), dtype=torch.uint8)
    whole = random_ops(variant)(images, 1, 2)
    halves = [random_ops(variant, 2, r)(images[10 * r : 10 * r + 10], 1, 2) for r in range(2)]
    assert torch.equal(torch.cat(halves), whole)
    assert not torch.equal(random_ops(variant)(images, 1, 3), whole)
    assert not torch.equal(random_ops(variant)(images, 2, 2), whole)


def test_without_operations_images_do_not_change() -> None:
    images = torch.randint(0, 256, (20, 8, 8, 1), dtype=torch.uint8)
    assert RandAugment(0, 10, TrainOrder(100, 20, 0, 1, seed=3))(images, 0, 0) is images


# MixUp.


def mixing(ranks: int = 1, rank: int = 0, alpha: float = 0.2, **more: Any) -> MixUp:
    return MixUp(alpha, 4, TrainOrder(100, 20, rank, ranks, seed=3), **more)


BY_MICRO_BATCH = {"shares": "micro-batch", "micro_batches": 2}


@pytest.mark.parametrize("more", [{}, BY_MICRO_BATCH], ids=["image", "micro-batch"])
def test_images_and_labels_are_mixed_with_the_same_share(more: dict[str, Any]) -> None:
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


def test_images_are_mixed_in_pairs() -> None:
    shares, others = mixing().draw(1, 2)
    assert others.tolist() == [index + 1 - 2 * (index % 2) for index in range(20)]
    assert len(set(shares.tolist())) == 20


def test_a_micro_batch_has_one_share_and_a_random_permutation() -> None:
    for rank in range(2):
        drawn = [mixing(2, rank, **BY_MICRO_BATCH).draw(0, step) for step in range(20)]
        orders = set()
        for shares, others in drawn:
            # A rank has 10 images, in two micro-batches: 0 to 4 and 5 to 9.
            assert [sorted(part) for part in others.view(2, 5).tolist()] == [
                [*range(5)],
                [*range(5, 10)],
            ]
            assert [len(set(part)) for part in shares.view(2, 5).tolist()] == [1, 1]
            assert shares[0] != shares[5]
            orders.add(tuple(others.tolist()))
        assert len(orders) == 20


@pytest.mark.parametrize("more", [{}, BY_MICRO_BATCH], ids=["image", "micro-batch"])
def test_shares_have_the_beta_distribution(more: dict[str, Any]) -> None:
    each = slice(None, None, 10 if more else 1)
    steps = 3000 if more else 300
    many = torch.cat([mixing(**more).draw(0, step)[0][each] for step in range(steps)]).numpy()
    assert len(set(many)) == len(many)
    drawn = np.random.default_rng(0).beta(0.2, 0.2, 100_000)
    expected = np.minimum(drawn, 1 - drawn)
    assert many.max() <= 0.5
    assert many.mean() == pytest.approx(expected.mean(), abs=0.01)
    assert many.std() == pytest.approx(expected.std(), abs=0.01)


def test_mixing_depends_on_epoch_and_step_and_not_on_ranks() -> None:
    images, labels = torch.randn(20, 1, 2, 2), torch.arange(20) % 4
    whole = mixing()(images, labels, 1, 2)
    parts = [slice(10 * rank, 10 * rank + 10) for rank in range(2)]
    halves = [mixing(2, r)(images[p], labels[p], 1, 2) for r, p in enumerate(parts)]
    assert same(tuple(torch.cat(pieces) for pieces in zip(*halves, strict=True)), whole)
    assert not torch.equal(mixing().draw(1, 2)[0], mixing().draw(1, 3)[0])
    assert not torch.equal(mixing().draw(1, 2)[0], mixing().draw(2, 2)[0])


def test_without_mixup_labels_stay_labels() -> None:
    images, labels = torch.randn(10, 1, 2, 2), torch.arange(10) % 4
    assert mixing(alpha=0.0)(images, labels, 0, 0) == (images, labels)


def test_settings_reach_the_training_images(photo_folder: Path) -> None:
    where = {"dataset": "folder", "data_path": str(photo_folder), "batch_size": 4, "image_size": 32}
    plain = all_of(opened(**where).train(0, 0))
    assert plain[0].shape == (12, 3, 32, 32)
    changed = all_of(opened(**where, randaugment_ops=2).train(0, 0))
    assert not torch.equal(changed[0], plain[0])
    other = all_of(opened(**where, randaugment_ops=2, randaugment_variant="composer").train(0, 0))
    assert not torch.equal(other[0], plain[0])
    assert not torch.equal(other[0], changed[0])
    mixed = all_of(opened(**where, mixup=0.2).train(0, 0))
    assert mixed[1].shape == (12, 2)
    assert torch.equal(mixed[1].sum(1), torch.ones(12))
    by_micro_batch = {"mixup": 0.2, "mixup_shares": "micro-batch", "accumulate": 2}
    assert not same(all_of(opened(**where, **by_micro_batch).train(0, 0)), mixed)


def test_a_test_image_keeps_its_share_of_the_shorter_side(photo_folder: Path) -> None:
    where = {"dataset": "folder", "data_path": str(photo_folder), "batch_size": 4, "image_size": 32}
    narrow, wide = (all_of(opened(**where, crop_ratio=r).test())[0] for r in (0.5, 1.0))
    file = photo_folder / "val" / "cat" / "0.jpg"
    whole = Image.open(file).resize((40, 32), Image.Resampling.BILINEAR).crop((4, 0, 36, 32))
    bytes_ = torch.from_numpy(np.array(whole))[None]
    preset = PRESETS["folder"]
    torch.testing.assert_close(wide[:1], normalise(bytes_, preset))
    assert not torch.equal(narrow, wide)


# CIFAR-10 and photographs.


def test_cifar_from_folder_parent_and_tarball(cifar_archive: Path, cifar_tarball: Path) -> None:
    read = [sources.cifar10(p) for p in (cifar_archive, cifar_archive.parent, cifar_tarball)]
    assert len({data["train"].fingerprint() for data in read}) == 1
    assert read[0]["train"].images.shape == (100, 32, 32, 3)
    assert len(read[0]["test"]) == 20


def test_cifar_archive_that_lacks_a_batch(cifar_archive: Path) -> None:
    (cifar_archive / "data_batch_3").unlink()
    with pytest.raises(RecipeError, match=r"data_batch_3.*CIFAR-10"):
        sources.cifar10(cifar_archive)


def test_cifar_archive_that_is_cut_short(cifar_archive: Path) -> None:
    path = cifar_archive / "data_batch_3"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RecipeError, match=r"data_batch_3 .*\("):
        sources.cifar10(cifar_archive)


@pytest.mark.usefixtures("needs_ffcv")
@pytest.mark.thorough
def test_both_loaders_give_the_same_cifar_bit_for_bit(cifar_archive: Path, tmp_path: Path) -> None:
    where = {"dataset": "cifar10", "data_path": str(cifar_archive), "batch_size": 20}
    ffcv = opened(loader="ffcv", data_cache=str(tmp_path), **where)
    plain = opened(**where)
    assert same(all_of(ffcv.train(1, 0)), all_of(plain.train(1, 0)))
    assert same(all_of(ffcv.test()), all_of(plain.test()))


def test_photographs_are_cropped_reproducibly(photo_folder: Path) -> None:
    where = {"dataset": "folder", "data_path": str(photo_folder), "batch_size": 4}
    whole = all_of(opened(**where).train(1, 0))
    assert whole[0].shape == (12, 3, 224, 224)
    later = all_of(opened(**where).train(1, 1))
    assert same(later, tuple(part[4:] for part in whole))
    assert all_of(opened(**where).test())[0].shape == (4, 3, 224, 224)
    sizes = dataset_sizes(Settings(**where))
    assert sizes == dataset_sizes(Settings(**where, loader="torchvision"))
    assert sizes.classes == 2


def test_reading_photographs_leaves_the_global_generator_alone(photo_folder: Path) -> None:
    where = {"dataset": "folder", "data_path": str(photo_folder), "batch_size": 4}
    batches = open_batches(Settings(**where, loader="torchvision"), 0, 1, CPU, workers=0)
    before = torch.get_rng_state()
    all_of(batches.train(0, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_corrupt_photograph_is_named(photo_folder: Path) -> None:
    bad = photo_folder / "train" / "dog" / "3.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    batches = opened(dataset="folder", data_path=str(photo_folder), batch_size=4)
    with pytest.raises(RecipeError, match=r"dog/3\.jpg"):
        all_of(batches.train(0, 0))


def test_missing_class_folders(photo_folder: Path) -> None:
    where = {"dataset": "folder", "data_path": str(photo_folder), "batch_size": 4}
    shutil.rmtree(photo_folder / "val" / "dog")
    with pytest.raises(RecipeError, match=r"train/.*val/.* dog"):
        opened(**where)
    shutil.rmtree(photo_folder / "val")
    with pytest.raises(RecipeError, match=r"val .*sub-folder"):
        opened(**where)


def test_empty_data_set(photo_folder: Path) -> None:
    for image in (photo_folder / "train").rglob("*.jpg"):
        image.unlink()
    with pytest.raises(RecipeError, match=r"train .*\.jpg"):
        opened(dataset="folder", data_path=str(photo_folder), batch_size=4)


def test_images_of_one_size_keep_it() -> None:
    with pytest.raises(RecipeError, match=r"--image-size 32 .*digits .*8 x 8"):
        opened(image_size=32)


def test_missing_data_path() -> None:
    with pytest.raises(RecipeError, match=r"--data-path nowhere .*cifar10"):
        opened(dataset="cifar10", data_path="nowhere")


# .beton files.


def test_auto_falls_back_to_torchvision_without_ffcv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ffcv", None)
    assert len(list(opened(0, 2, loader="auto").train(0, 20))) == 2
    opened(1, 2, loader="auto")
    # Rank 0 prints a note, and rank 1 does not.
    printed = capsys.readouterr().err
    assert "ffcv" in printed
    assert printed.count("--loader torchvision") == 1
    with pytest.raises(RecipeError, match=r"--loader ffcv: .*libturbojpeg0-dev"):
        opened(loader="ffcv")


def tiny() -> sources.Arrays:
    images = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2, 1)
    return sources.Arrays(images, np.arange(6, dtype=np.int64))


@pytest.mark.usefixtures("needs_ffcv")
class TestCachedBeton:
    def test_a_good_file_is_kept(self, tmp_path: Path) -> None:
        path = beton.cached_beton(tmp_path, "tiny", tiny())
        written = path.stat().st_ino
        assert beton.cached_beton(tmp_path, "tiny", tiny()).stat().st_ino == written

    @pytest.mark.parametrize("change", ["truncate", "record", "source", "version"])
    def test_a_stale_file_is_written_again(
        self, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = beton.cached_beton(tmp_path, "tiny", tiny())
        good, written = path.read_bytes(), path.stat().st_ino
        source = tiny()
        if change == "truncate":
            path.write_bytes(good[:-50])
        elif change == "record":
            (tmp_path / "tiny.json").write_text("{")
        elif change == "source":
            source.images[0, 0, 0, 0] = 99
        else:
            monkeypatch.setattr(beton, "WRITER_VERSION", beton.WRITER_VERSION + 1)
        beton.cached_beton(tmp_path, "tiny", source)
        assert path.stat().st_ino != written
        beton.check_beton(path)
        assert (path.read_bytes() == good) == (change != "source")

    @pytest.mark.thorough
    def test_two_processes_at_once(self, tmp_path: Path) -> None:
        code = (
            "import sys\n"
            "from pathlib import Path\n"
            "from recipes.image_data import beton, sources\n"
            "write = beton.write_beton\n"
            "beton.write_beton = lambda *args: (print('written'), write(*args))\n"
            f"folder = Path({str(tmp_path)!r})\n"
            "sys.stdin.readline()\n"
            "path = beton.cached_beton(folder, 'digits', sources.digits()['test'])\n"
            "beton.check_beton(path)\n"
        )
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            for process in started:
                process.stdin.write("\n")
                process.stdin.flush()
            printed = [process.communicate(timeout=PATIENCE)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [process.returncode for process in started] == [0, 0]
        assert sorted(printed) == ["", "written\n"]
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"digits.beton", "digits.json", "digits.lock"}


@pytest.mark.usefixtures("needs_ffcv")
class TestBadBeton:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "train_tiny.beton"
        beton.write_beton(path, tiny())
        return path

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"none\.beton.*recipes\.write_beton"):
            beton.check_beton(tmp_path / "none.beton")

    @pytest.mark.parametrize("left", [0, 10, 1000, -1])
    def test_cut_short(self, path: Path, left: int) -> None:
        path.write_bytes(path.read_bytes()[:left])
        with pytest.raises(RecipeError, match=r"train_tiny\.beton .*recipes\.write_beton"):
            beton.check_beton(path)

    def test_never_finished(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[16:24] = bytes(8)
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"train_tiny\.beton .*recipes\.write_beton"):
            beton.check_beton(path)

    def test_not_a_beton_at_all(self, path: Path) -> None:
        path.write_bytes(b"\xff" * 10_000)
        with pytest.raises(RecipeError, match=r"version .*65535"):
            beton.check_beton(path)

    def test_empty(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[8:16] = bytes(8)
        path.write_bytes(content)
        with pytest.raises(RecipeError, match="0 samples"):
            beton.check_beton(path)

    def test_one_split_missing(self, path: Path) -> None:
        with pytest.raises(RecipeError, match=r"--data-path .*val\*\.beton .*none"):
            opened(dataset="folder", loader="ffcv", data_path=str(path.parent))

    def test_photographs_that_were_not_converted(self, photo_folder: Path) -> None:
        with pytest.raises(RecipeError, match=r"beton.*recipes\.write_beton.*--loader torchvision"):
            opened(dataset="folder", loader="ffcv", data_path=str(photo_folder))
