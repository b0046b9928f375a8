"""Runs of recipes/train.py: they learn, they are reproducible, and they resume bit for bit."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcomp
from recipes.errors import RecipeError
from tests.recipes.conftest import TorchRun, steps_and_losses, summary_in, wait_for_checkpoint
from tests.recipes.forked_ranks import RECIPES, Launcher
from tests.support.cases import only
from tests.support.logs import messages_of
from tests.support.patience import PATIENCE

TrainHere = Callable[..., dict[str, Any]]

METHODS = {
    "dense": [],
    "ef": ["--compress", "ef(topk(0.01))"],
    # Its trial outlasts the run: two runs measure other times, and may choose other methods.
    "auto": ["--compress", "auto(steps=400)"],
    "qsr": ["--sync", "qsr(alpha=0.2, h_base=4)"],
    "both": ["--sync", "every(4)", "--compress", "ef(topk(0.01))"],
}


# One rank, in this process.


def test_a_short_run_learns_and_reports(train_here: TrainHere, digits_flags: list[str]) -> None:
    summary = train_here(*digits_flags, "--epochs", "3", "--log-every", "22")
    assert summary["test_accuracy"] > 0.9
    folder = Path(summary["settings"]["out"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [22, 22, 44, 44, 66, 66]
    assert lines[-1]["test_accuracy"] == summary["test_accuracy"]
    assert {"loss", "lr", "bytes_sent", "ms"} <= lines[0].keys()
    assert lines[-1]["images_per_second"] > 0
    assert lines[-1]["wait_share"] is None  # plain DDP does not show it
    # The learning rate of the last step, which is not yet --final-lr.
    assert lines[-2]["lr"] > 1e-6
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert "features.0.weight" in weights


@pytest.mark.parametrize("method", [["--compress", "mean"], ["--sync", "every(8)"]])
def test_an_epoch_reports_the_share_of_time_spent_waiting(
    train_here: TrainHere,
    digits_flags: list[str],
    method: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = train_here(*digits_flags, "--epochs", "1", *method)
    lines = (Path(summary["settings"]["out"]) / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert 0 < last["wait_share"] < 1
    (progress,) = [line for line in capsys.readouterr().out.splitlines() if "images/s" in line]
    assert f"{last['images_per_second']:,.0f} images/s, {last['wait_share']:.0%}" in progress


def test_auto_chooses_in_the_first_steps(
    train_here: TrainHere, digits_flags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    auto = "auto(candidates=[ef(topk(0.1))], steps=20)"
    train_here(*digits_flags, "--epochs", "1", "--compress", auto)  # 22 steps
    assert len(messages_of("advisor.auto", caplog)) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer", "adamw", "--lr", "0.003", "--amp", "bf16", "--label-smoothing", "0.1"],
        ["--accumulate", "4", "--nesterov", "--channels-last"],
        ["--schedule", "step", "--milestones", "1", "--warmup-steps", "5", "--eval-every", "5"],
        ["--model", "timm/test_resnet"],
        ["--mixup", "0.2", "--clip-norm", "0.5", "--randaugment-ops", "2", "--amp", "bf16"],
        ["--compress", "ef(topk(0.1))", "--lr-inside", "--momentum", "0"],
        [
            *("--mixup-shares", "micro-batch", "--mixup", "0.2", "--accumulate", "4"),
            *("--randaugment-ops", "2"),
        ],
        ["--sync", "every(3)", "--bn-images", "100"],
        ["--outer", "nesterov(lr=0.9, momentum=0.5)", "--sync", "every(3)"],
    ],
    ids=lambda flags: flags[1].replace("/", "-"),
)
@pytest.mark.thorough
def test_options_train_repeat_and_resume(
    flags: list[str], train_here: TrainHere, digits_flags: list[str]
) -> None:
    # 4 steps per epoch: every other checkpoint is inside an epoch.
    repeat_and_resume(train_here, [*digits_flags, "--epochs", "2", "--batch-size", "360", *flags])


def repeat_and_resume(train_here: TrainHere, flags: list[str]) -> None:
    """Train, train again with checkpoints, and resume from the middle of an epoch."""
    whole = train_here(*flags)
    shutil.rmtree(whole["settings"]["out"])
    again = train_here(*flags, "--checkpoint-every", "2")
    assert again["weights_sha256"] == whole["weights_sha256"]
    delete_newest_checkpoint(Path(again["settings"]["out"]))
    resumed = train_here(*flags, "--checkpoint-every", "2", "--resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def delete_newest_checkpoint(out: Path) -> None:
    shutil.rmtree(sorted((out / "checkpoints").iterdir())[-1])


def test_accumulation_changes_the_result_by_rounding_alone(
    train_here: TrainHere, digits_flags: list[str]
) -> None:
    # The whole epoch is one step. Batch statistics differ between micro-batches, so the losses of
    # the step differ slightly.
    flags = [*digits_flags, "--epochs", "1", "--batch-size", "1440", "--log-every", "1"]
    losses = []
    for pieces in ("1", "4"):
        out = Path(train_here(*flags, "--accumulate", pieces)["settings"]["out"])
        losses.append(steps_and_losses(out)[0][1])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_photographs_with_torchvision(
    train_here: TrainHere, photo_folder: Path, tmp_path: Path
) -> None:
    flags = ["--dataset", "folder", "--data-path", str(photo_folder), "--loader", "torchvision"]
    flags += ["--model", "smallcnn", "--batch-size", "4", "--epochs", "1", "--workers", "1"]
    flags += ["--image-size", "48", "--threads", "1"]
    assert train_here(*flags, "--out", str(tmp_path / "run"))["steps"] == 3


@pytest.mark.usefixtures("needs_ffcv")
@pytest.mark.thorough
def test_photographs_with_ffcv(photo_folder: Path, tmp_path: Path) -> None:
    convert("--source", str(photo_folder), "--out", str(tmp_path / "b"))
    assert (tmp_path / "b" / "val_500_0.50_90.beton").is_file()
    flags = ["--dataset", "folder", "--data-path", str(tmp_path / "b"), "--loader", "ffcv"]
    flags += ["--model", "smallcnn", "--batch-size", "4", "--epochs", "2", "--threads", "1"]
    flags += ["--image-size", "48", "--randaugment-ops", "2", "--mixup", "0.2"]
    # In a separate process: at exit, Numba fails in the code that it compiled for JPEGs.
    done = run_script(*flags, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("random crops cannot be seeded") == 1
    assert summary_in(tmp_path / "run")["steps"] == 6


@pytest.mark.usefixtures("needs_ffcv")
def test_a_corrupt_photograph_stops_the_conversion(photo_folder: Path, tmp_path: Path) -> None:
    for name in ("0.jpg", "3.jpg"):
        (photo_folder / "train" / "cat" / name).write_bytes(b"not a photograph")
    with pytest.raises(RecipeError, match=r"cat/[03].jpg .*2 of 12"):
        convert("--source", str(photo_folder), "--out", str(tmp_path / "b"))
    assert not list((tmp_path / "b").iterdir())


@pytest.mark.usefixtures("needs_ffcv")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jpeg-share", "2"], r"--jpeg-share.* 0 to 1.* 2\.0"),
        (["--quality", "0"], r"--quality.* 1 to 100.* 0"),
        (["--max-resolution", "5000"], r"--max-resolution.* 1 to 1672.* 5000"),
    ],
)
def test_bad_formats(flags: list[str], message: str, photo_folder: Path, tmp_path: Path) -> None:
    paths = ["--source", str(photo_folder), "--out", str(tmp_path)]
    with pytest.raises(RecipeError, match=message):
        convert(*paths, *flags)


def convert(*flags: str) -> None:
    from recipes import write_beton

    write_beton.convert(write_beton.parse([*flags, "--workers", "2"]))


# Bad input that is found when the run begins.


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (["--batch-size", "64", "--accumulate", "3"], RecipeError, "--batch-size 64.* 3 .*1 ranks"),
        (["--warmup-steps", "440"], RecipeError, "--warmup-steps 440.* 440 steps"),
        (["--batch-size", "2000"], RecipeError, "--batch-size.* 1442 .*2000"),
        (["--amp", "fp16", "--device", "cpu"], RecipeError, "--amp fp16"),
        (
            ["--lr", "1e30", "--threads", "1"],
            RecipeError,
            "epoch 1 .*nan.* --lr",
        ),
        (["--resume"], RecipeError, "--resume: .*checkpoints"),
        (["--compress", "ef(topkk(0.01))"], torchcomp.SpecError, "topk"),
        (["--compress", "auto(steps=2)", "--dry-run"], torchcomp.SpecError, "steps"),
        (["--compress", "auto(candidates=[none])", "--dry-run"], torchcomp.SpecError, "none"),
        (["--sync", "qsr(alpha=0, h_base=4)"], torchcomp.SpecError, "alpha"),
        (["--sync", "topk(0.1)"], torchcomp.SpecError, "schedule"),
        (["--outer", "slowmo"], RecipeError, "--outer slowmo .*--sync"),
        (["--sync", "every(2)", "--outer", "mean"], torchcomp.SpecError, r"outer step.*'mean'"),
        (
            ["--compress", "every(2)"],
            torchcomp.SpecError,
            r"every\(2\).*schedule",
        ),
        (["--sync", "swap(switch=440)"], torchcomp.SpecError, r"switch.*440"),
        (
            ["--mixup", "0.2", "--batch-size", "63"],
            RecipeError,
            "--mixup.* --batch-size 63 .*1 ranks 63 ",
        ),
        (
            ["--mixup", "0.2", "--mixup-shares", "micro-batch", "--accumulate", "64"],
            RecipeError,
            "--mixup-shares micro-batch .* --batch-size 64 .* --accumulate 64",
        ),
    ],
)
def test_bad_input(
    flags: list[str],
    error: type[Exception],
    message: str,
    train_here: TrainHere,
    digits_flags: list[str],
) -> None:
    with pytest.raises(error, match=message):
        train_here(*digits_flags, *flags)


def test_resuming_another_run_and_overwriting_one(
    train_here: TrainHere, digits_flags: list[str]
) -> None:
    flags = [*digits_flags, "--epochs", "1", "--checkpoint-every", "10"]
    train_here(*flags)
    with pytest.raises(RecipeError, match=r"--out .*--resume"):
        train_here(*flags)
    with pytest.raises(RecipeError, match=r"lr 0\.1 .*0\.2"):
        train_here(*flags, "--resume", "--lr", "0.2")
    with pytest.raises(RecipeError, match=r"compress 'none' .*'ef"):
        train_here(*flags, "--resume", "--compress", "ef(topk(0.5))")


def test_the_command_line_shows_one_line_and_no_traceback() -> None:
    done = run_script("--lr", "fast")
    assert done.returncode == 1
    assert done.stderr.startswith("error: --lr: ")
    assert "'fast'" in done.stderr
    assert done.stderr.count("\n") == 1


def run_script(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "recipes.train", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize(
    "config", sorted((RECIPES / "configs").glob("*.yaml")), ids=lambda p: p.stem
)
@pytest.mark.parametrize("method", METHODS)
def test_configurations_dry_run(
    config: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes import train
    from recipes.settings import read_settings

    flags = ["--config", str(config), "--dry-run", "--plan-ranks", "4", *METHODS[method]]
    train.print_plan(read_settings(flags))
    shown = capsys.readouterr().out
    assert "\nplan\n" in shown
    assert "sent per step" in shown
    assert "synchronisations" in shown


def test_local_steps_are_evaluated_with_reestimated_statistics(
    train_here: TrainHere, digits_flags: list[str]
) -> None:
    # A single rank has nothing to average, so --bn-images changes the statistics only.
    weights = []
    for images in ("0", "360"):
        flags = ["--epochs", "1", "--sync", "every(2)", "--bn-images", images]
        out = Path(train_here(*digits_flags, *flags)["settings"]["out"])
        weights.append(torch.load(out / "weights.pt", weights_only=True))
    differing = {name for name, value in weights[0].items() if not value.equal(weights[1][name])}
    assert differing == {name for name in weights[0] if "running" in name or "num_b" in name}


def test_gradients_are_clipped(train_here: TrainHere, digits_flags: list[str]) -> None:
    flags = ["--epochs", "1", "--batch-size", "1440", "--momentum", "0", "--weight-decay", "0"]
    changes = []
    for norm in ("0", "0.01"):
        out = Path(train_here(*digits_flags, *flags, "--clip-norm", norm)["settings"]["out"])
        weights = torch.load(out / "weights.pt", weights_only=True)
        seeded = fresh_weights()
        change = [(weights[name] - value).square().sum() for name, value in seeded.items()]
        changes.append(float(torch.stack(change).sum().sqrt()) / 0.1)
    assert changes[0] > 0.1
    assert changes[1] == pytest.approx(0.01, rel=1e-3)


def fresh_weights() -> dict[str, torch.Tensor]:
    from recipes.models import SmallCNN
    from recipes.random_state import seed_all

    seed_all(0)
    return {name: value.detach() for name, value in SmallCNN(1, 10).named_parameters()}


def test_local_steps_repeat_micro_batches_that_overflow_in_float16(
    train_here: TrainHere, digits_flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    monkeypatch.setattr("recipes.train.build_model", lambda *args, **kwargs: copy.deepcopy(linear))
    # --amp fp16 is refused on a CPU.
    cpu = torch.device("cpu")
    monkeypatch.setattr("recipes.distributed._device", lambda settings, local_rank: cpu)
    flags = [*digits_flags, "--epochs", "1", "--batch-size", "720", "--accumulate", "2"]
    flags += ["--sync", "every(2)", "--amp", "fp16", "--clip-norm", "0.5"]
    moved = []
    for scale in (2.0**10, 2.0**30):
        with monkeypatch.context() as patch:
            patch.setattr("torch.amp.GradScaler", scaler_with_init_scale(scale))
            out = Path(train_here(*flags)["settings"]["out"])
        weights = torch.load(out / "weights.pt", weights_only=True)
        moved.append(weights["1.weight"] - linear[1].weight.detach())
    assert moved[0].norm() > 0.05
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=1e-3)


def scaler_with_init_scale(scale: float) -> type[torch.amp.GradScaler]:
    class Scaler(torch.amp.GradScaler):
        def __init__(self, device: str, *, enabled: bool) -> None:
            super().__init__(device, init_scale=scale, enabled=enabled)

    return Scaler


# Several ranks.


@pytest.mark.parametrize("method", only(METHODS, now=["both"]))
def test_a_killed_run_resumes_and_ends_with_the_same_weights(
    method: str, forked: Launcher, tmp_path: Path, digits_flags: list[str]
) -> None:
    # 22 steps per epoch: step 25 is inside the second epoch and inside a round (4, 8, ...).
    flags = [*digits_flags, "--epochs", "3", "--log-every", "1", *METHODS[method]]
    whole = forked.start(*flags, "--out", str(tmp_path / "whole"))
    killed_flags = [*flags, "--out", str(tmp_path / "killed"), "--checkpoint-every", "5"]
    killed = forked.start(*killed_flags)
    wait_for_checkpoint(tmp_path / "killed" / "checkpoints", 25, killed)
    killed.kill()
    assert not (tmp_path / "killed" / "summary.json").exists()
    whole.finish()
    printed = forked.start(*killed_flags, "--resume").finish()
    assert re.search(r"resumed after step \d+", printed)
    one, other = summary_in(tmp_path / "whole"), summary_in(tmp_path / "killed")
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["bytes_sent"] == other["bytes_sent"]
    assert one["synchronisations"] == other["synchronisations"]
    assert one["replicas_agree"]
    assert steps_and_losses(tmp_path / "whole") == steps_and_losses(tmp_path / "killed")


SHARD = 'bidirectional(topk(0.02), quantize("int8"), selection="shard")'


@pytest.mark.parametrize(
    ("method", "saved", "before", "after"),
    [
        # The checkpoint after step 6 waits for the end of the round.
        pytest.param([*METHODS["both"]], 4, 2, 1, id="local", marks=pytest.mark.thorough),
        pytest.param(
            ["--compress", SHARD], 6, 1, 2, id="bidirectional", marks=pytest.mark.thorough
        ),
    ],
)
def test_a_killed_run_resumes_with_another_number_of_ranks(
    method: list[str],
    saved: int,
    before: int,
    after: int,
    forked: Launcher,
    tmp_path: Path,
    digits_flags: list[str],
) -> None:
    out = tmp_path / "killed"
    flags = [*digits_flags, *method, "--epochs", "2", "--out", str(out), "--checkpoint-every", "6"]
    flags += ["--elastic", "--auto-resume"]
    killed = forked.start(*flags, ranks=before)
    wait_for_checkpoint(out / "checkpoints", 2 * saved, killed)
    killed.kill()
    printed = forked.start(*flags, ranks=after).finish()
    found = re.search(r"resumed after step (\d+)", printed)
    assert found is not None
    assert int(found[1]) % saved == 0
    summary = summary_in(out)
    assert (summary["ranks"], summary["steps"]) == (after, 44)
    assert summary["replicas_agree"]


@pytest.mark.thorough
def test_three_dense_ranks_resume_bit_for_bit(
    forked: Launcher, tmp_path: Path, digits_flags: list[str]
) -> None:
    # From three ranks on, the position of a gradient in DDP's buckets affects how its sum rounds.
    flags = [*digits_flags, "--epochs", "1", "--batch-size", "240", "--checkpoint-every", "2"]
    forked.start(*flags, ranks=3).finish()
    whole = summary_in(tmp_path / "run")
    delete_newest_checkpoint(tmp_path / "run")
    forked.start(*flags, "--resume", ranks=3).finish()
    assert summary_in(tmp_path / "run")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.thorough
def test_an_error_on_every_rank_ends_the_run(torchrun: TorchRun, digits_flags: list[str]) -> None:
    process = torchrun.start(*digits_flags, "--batch-size", "63")
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert re.search(r"error \(rank [01]\): --batch-size 63 .*2 ranks", printed)
    # torchrun itself prints a traceback after the ranks' messages.
    assert "Traceback" not in printed.split("recipes.train FAILED")[0].split("error (rank")[0]
