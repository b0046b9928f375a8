"""Runs of recipes/train.py: they learn, and after a kill or a signal they resume bit for bit."""

import copy
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partialmethod
from pathlib import Path

import pytest
import torch

import torchcomp
from recipes import interruption, write_beton
from recipes.errors import RecipeError
from recipes.models import SmallCNN
from recipes.random_state import seed_all
from recipes.signals import REQUEUE, SIGNALS
from tests.recipes.runs import assert_equal_runs, steps_and_losses, steps_of, summary_in, train_rank
from tests.support.cases import only
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes

SHARD = 'bidirectional(topk(0.02), quantize("int8"), selection="shard")'
METHODS = {
    # From three ranks on, the position of a gradient in DDP's buckets affects how its sum rounds.
    "dense": ["--batch-size", "63"],
    "ef": ["--compress", "ef(topk(0.01))"],
    # Its trial outlasts the run: two runs measure other times, and may choose other methods.
    "auto": ["--compress", "auto(steps=400)"],
    "qsr": ["--sync", "qsr(alpha=0.2, h_base=4)"],
    "both": ["--sync", "every(4)", "--compress", "ef(topk(0.01))"],
}


def weights_of(summary):
    folder = Path(summary["settings"]["out"])
    return torch.load(folder / "weights.pt", weights_only=True)


@pytest.mark.parametrize("method", [[], ["--compress", "mean"], ["--sync", "every(8)"]])
def test_a_short_run_learns_and_reports(method, train_here, digits_flags, capsys):
    summary = train_here(*digits_flags, "--epochs", "3", "--log-every", "22", *method)
    assert summary["test_accuracy"] > 0.9
    folder = Path(summary["settings"]["out"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [22, 22, 44, 44, 66, 66]
    assert lines[-1]["test_accuracy"] == summary["test_accuracy"]
    assert {"loss", "lr", "bytes_sent", "ms"} <= lines[0].keys()
    # The learning rate of the last step, which is not yet --final-lr.
    assert lines[-2]["lr"] > 1e-6
    # Plain DDP does not show how long it waits.
    waited = lines[-1]["wait_share"]
    assert (waited is None) == (not method)
    shown = f"{lines[-1]['images_per_second']:,.0f} images/s"
    shown += f", {waited:.0%} of the time" if waited is not None else "\n"
    assert shown in capsys.readouterr().out
    assert "features.0.weight" in weights_of(summary)


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer adamw --lr 0.003 --amp bf16 --label-smoothing 0.1",
        "--accumulate 4 --nesterov --channels-last",
        "--schedule step --milestones 1 --warmup-steps 5 --eval-every 5",
        "--model timm/test_resnet",
        "--mixup 0.2 --clip-norm 0.5 --randaugment-ops 2 --amp bf16",
        "--compress ef(topk(0.1)) --lr-inside --momentum 0",
        "--mixup-shares micro-batch --mixup 0.2 --accumulate 4 --randaugment-ops 2",
        "--outer nesterov(lr=0.9,momentum=0.5) --sync every(3) --bn-images 100",
    ],
)
@pytest.mark.thorough
def test_options_train_repeat_and_resume(flags, train_here, digits_flags):
    # 4 steps per epoch: every other checkpoint is inside an epoch.
    words = [*digits_flags, "--epochs", "2", "--batch-size", "360", *flags.split()]
    whole = train_here(*words)
    shutil.rmtree(whole["settings"]["out"])
    again = train_here(*words, "--checkpoint-every", "2")
    assert again["weights_sha256"] == whole["weights_sha256"]
    delete_newest_checkpoint(Path(again["settings"]["out"]))
    resumed = train_here(*words, "--checkpoint-every", "2", "--resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def delete_newest_checkpoint(out):
    shutil.rmtree(sorted((out / "checkpoints").iterdir())[-1])


def test_accumulation_changes_the_result_by_rounding_alone(train_here, digits_flags, out):
    # The whole epoch is one step. Batch statistics differ between micro-batches, so the losses of
    # the step differ slightly.
    flags = [*digits_flags, "--epochs", "1", "--batch-size", "1440", "--log-every", "1"]
    losses = []
    for pieces in ("1", "4"):
        train_here(*flags, "--accumulate", pieces)
        losses.append(steps_and_losses(out)[0][1])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_local_steps_are_evaluated_with_reestimated_statistics(train_here, digits_flags):
    # A single rank has nothing to average, so --bn-images changes the statistics only.
    flags = [*digits_flags, "--epochs", "1", "--sync", "every(2)", "--bn-images"]
    one, other = (weights_of(train_here(*flags, images)) for images in ("0", "360"))
    differing = {name for name, value in one.items() if not value.equal(other[name])}
    assert differing == {name for name in one if "running" in name or "num_b" in name}


def test_gradients_are_clipped(train_here, digits_flags):
    flags = ["--epochs", "1", "--batch-size", "1440", "--momentum", "0", "--weight-decay", "0"]
    seed_all(0)
    start = dict(SmallCNN(1, 10).named_parameters())
    norms = []
    for norm in ("0", "0.01"):
        weights = weights_of(train_here(*digits_flags, *flags, "--clip-norm", norm))
        change = [(weights[name] - value).detach().flatten() for name, value in start.items()]
        norms.append(float(torch.cat(change).norm()) / 0.1)
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


def test_local_steps_repeat_micro_batches_that_overflow_in_float16(
    train_here, digits_flags, monkeypatch
):
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    monkeypatch.setattr("recipes.train.build_model", lambda *args, **kwargs: copy.deepcopy(linear))
    # --amp fp16 is refused on a CPU.
    cpu = torch.device("cpu")
    monkeypatch.setattr("recipes.distributed._device", lambda settings, local_rank: cpu)
    flags = [*digits_flags, "--epochs", "1", "--batch-size", "720", "--accumulate", "2"]
    flags += ["--sync", "every(2)", "--amp", "fp16", "--clip-norm", "0.5"]
    scaler, moved = torch.amp.GradScaler, []
    for scale in (2.0**10, 2.0**30):
        with monkeypatch.context() as patch:
            start = {"__init__": partialmethod(scaler.__init__, init_scale=scale)}
            made = type("Scaler", (scaler,), start)
            patch.setattr("torch.amp.GradScaler", made)
            weights = weights_of(train_here(*flags))
        moved.append(weights["1.weight"] - linear[1].weight.detach())
    assert moved[0].norm() > 0.05
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=1e-3)


REFUSED = {
    # By the parser.
    "a.yaml": r"'a\.yaml'.*--config a\.yaml",
    "--momentun 0.9": "'--momentun'.*--momentum",
    "--lr nan": "--lr: .*'nan'",
    "--momentum 1": r"--momentum .*below 1, .*1\.0",
    "--optimizer adam": "--optimizer 'adam' .*sgd, adamw.* adamw",
    # Together.
    "--dataset cifar10": "--dataset cifar10 .*--data-path",
    "--schedule step": "--schedule step .*--milestones",
    "--schedule step --milestones 5,3": "--milestones 5,3.* 19.*--epochs 20",
    "--milestones 5": "--milestones .*step.*cosine",
    "--lr-inside --compress ef(topk(0.1)) --sync every(3)": "--lr-inside .*--sync",
    "--guard 5": "--guard .*--compress",
    "--nesterov --momentum 0": "--nesterov .*--momentum",
    "--outer slowmo": "--outer slowmo .*--sync",
    # With the data, the ranks and the device.
    "--batch-size 64 --accumulate 3": "--batch-size 64.* 3 .*1 ranks",
    "--warmup-steps 440": "--warmup-steps 440.* 440 steps",
    "--amp fp16 --device cpu": "--amp fp16",
    "--lr 1e30": "epoch 1 .*nan.* --lr",
    "--resume": "--resume: .*checkpoints",
    "--mixup 0.2 --batch-size 63": "--mixup.* --batch-size 63 .*1 ranks 63 ",
    "--mixup 0.2 --mixup-shares micro-batch --accumulate 64": "--accumulate 64",
    "--image-size 32": r"--image-size 32 .*digits .*8 x 8",
    "--dataset folder --data-path nowhere": "--data-path nowhere",
    "--loader ffcv": "--loader ffcv .*digits",
    "--batch-size 2000": "--batch-size .*1442 .*2000",
    "--model smalcnn": "--model 'smalcnn': .*simple_vit/SIZE.* smallcnn.$",
    "--model simple_vit/b15": "simple_vit .*'b15'.*'b16'",
    "--model timm/vit_tiny_patch16_22": "timm .*'vit_tiny_patch16_22'.*_224'",
    "--model smallcnn --small-stem": "--small-stem",
    "--model simple_vit/b16": "--model simple_vit/b16 .*16",
    # By torchcomp.
    "--compress ef(topkk(0.01))": "topk",
    "--compress every(2)": r"every\(2\).*schedule",
    "--sync swap(switch=440)": r"switch.*440",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_flags(flags, train_here, digits_flags):
    with pytest.raises((RecipeError, torchcomp.SpecError), match=REFUSED[flags]):
        train_here(*digits_flags, *flags.split())


def test_a_run_is_resumed_with_its_settings_or_left_alone(train_here, digits_flags):
    flags = [*digits_flags, "--epochs", "1", "--checkpoint-every", "10"]
    first = train_here(*flags, "--auto-resume")
    assert train_here(*flags, "--auto-resume")["weights_sha256"] == first["weights_sha256"]
    for changed, message in (
        ([], r"--out .*--resume"),
        (["--resume", "--lr", "0.2"], r"lr 0\.1 .*0\.2"),
        (["--resume", "--compress", "ef(topk(0.5))"], r"compress 'none' .*'ef"),
    ):
        with pytest.raises(RecipeError, match=message):
            train_here(*flags, *changed)


def run_script(*flags):
    command = [sys.executable, "-m", "recipes.train", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_the_command_line_shows_one_line_and_no_traceback():
    done = run_script("--lr", "fast")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: --lr: ")


def convert(*flags):
    write_beton.convert(write_beton.parse([*flags, "--workers", "2"]))


@pytest.mark.usefixtures("needs_ffcv")
@pytest.mark.thorough
def test_photographs_with_ffcv(photo_folder, photo_flags, tmp_path):
    convert("--source", str(photo_folder), "--out", str(tmp_path / "b"))
    assert (tmp_path / "b" / "val_500_0.50_90.beton").is_file()
    flags = [*photo_flags, "--data-path", str(tmp_path / "b"), "--loader", "ffcv"]
    flags += ["--batch-size", "4", "--epochs", "2", "--randaugment-ops", "2", "--mixup", "0.2"]
    # In a separate process: at exit, Numba fails in the code that it compiled for JPEGs.
    done = run_script(*flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("random crops cannot be seeded") == 1
    assert summary_in(tmp_path / "run")["steps"] == 6


@pytest.mark.usefixtures("needs_ffcv")
def test_conversions_that_stop(photo_folder, tmp_path):
    for name in ("0.jpg", "3.jpg"):
        (photo_folder / "train" / "cat" / name).write_bytes(b"not a photograph")
    for flags, message in (
        ([], r"cat/[03].jpg .*2 of 12"),
        (["--jpeg-share", "2"], r"--jpeg-share.* 0 to 1.* 2\.0"),
        (["--max-resolution", "5000"], r"--max-resolution.* 1 to 1672.* 5000"),
    ):
        with pytest.raises(RecipeError, match=message):
            convert("--source", str(photo_folder), "--out", str(tmp_path / "b"), *flags)
        assert not list(tmp_path.glob("b/*"))


@pytest.mark.parametrize("method", only(METHODS, now=["both"]))
def test_a_killed_run_resumes_and_ends_with_the_same_weights(method, tmp_path):
    # 22 steps per epoch: step 28 is inside the second epoch and inside a round (4, 8, ...).
    flags = ["--threads", "1", "--epochs", "3", "--log-every", "1", *METHODS[method]]
    flags += ["--checkpoint-every", "5", "--auto-resume", "--out"]
    whole, killed, ranks = tmp_path / "whole", tmp_path / "killed", 3 if method == "dense" else 2
    on_processes(ranks, train_rank, [*flags, str(killed)], signal.SIGKILL, 28, [1], catch=True)
    assert steps_of(killed) == [20, 25]
    for out, first in ((killed, 26), (whole, 1)):
        assert on_processes(ranks, train_rank, [*flags, str(out)]) == [(first, 0)] * ranks
    assert_equal_runs(whole, killed)


@pytest.mark.parametrize(
    ("method", "saved", "before", "after"),
    # The checkpoint after step 6 waits for the end of the round.
    [
        (METHODS["both"], 4, 2, 1),
        pytest.param(["--compress", SHARD], 6, 1, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_run_resumes_with_another_number_of_ranks(
    method, saved, before, after, digits_flags, out
):
    flags = [*digits_flags, *method, "--epochs", "2", "--checkpoint-every", "6"]
    flags += ["--elastic", "--auto-resume"]
    dies = (signal.SIGKILL, 2 * saved + 7, [before - 1])
    on_processes(before, train_rank, flags, *dies, catch=True)
    ((first, code), *_) = on_processes(after, train_rank, flags)
    assert (first % saved, code) == (1, 0)
    summary = summary_in(out)
    assert (summary["ranks"], summary["steps"]) == (after, 44)
    assert summary["replicas_agree"]


# 22 steps per epoch. The ranks ask each other at steps 3, 6, ..., mostly inside a round of 4.
SYNCED = ["--threads", "1", "--epochs", "4", "--log-every", "1", "--eval-every", "4"]
SYNCED += ["--bn-images", "0", "--signal-every", "3", "--auto-resume"]
SYNCED += ["--sync", "every(4)", "--compress", "ef(topk(0.01))", "--out"]


@pytest.mark.parametrize(
    ("number", "signalled"),
    [(signal.SIGTERM, [1]), pytest.param(signal.SIGUSR1, [0, 1], marks=pytest.mark.thorough)],
)
def test_all_ranks_stop_at_one_step_and_resume_with_the_same_bits(number, signalled, tmp_path, out):
    flags = [*SYNCED, str(out)]
    # The signals at step 25 are known at the question of step 27, and end the run at step 30.
    assert on_processes(2, train_rank, flags, number, 25, signalled) == [(1, REQUEUE)] * 2
    assert steps_of(out) == [30]
    assert not (out / "summary.json").exists()
    assert on_processes(2, train_rank, flags) == [(31, 0)] * 2
    assert on_processes(2, train_rank, [*SYNCED, str(tmp_path / "whole")]) == [(1, 0)] * 2
    assert_equal_runs(tmp_path / "whole", out)


@pytest.mark.thorough
def test_a_signal_to_the_launcher_reaches_the_ranks(out):
    command = [sys.executable, "-m", "recipes.cluster.launch", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "recipes.train", *SYNCED, str(out), "--epochs", "400"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        launcher.terminate()
        assert launcher.wait(PATIENCE) == REQUEUE
    finally:
        launcher.kill()
    assert len(steps_of(out)) == 1


@pytest.fixture
def saved(monkeypatch):
    """Signal this process before and after it saves, and list what it saves."""
    save, saved = torch.save, []

    def save_between_signals(state, file):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        save(state, file)
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        saved.append(Path(file.name).parent.name)

    monkeypatch.setattr(torch, "save", save_between_signals)
    return saved


def test_signals_during_the_saving_do_not_damage_the_checkpoint(
    train_here, digits_flags, saved, monkeypatch
):
    flags = [*digits_flags, "--epochs", "1", "--signal-every", "4", "--checkpoint-every", "5"]
    monkeypatch.setattr(interruption, "ignore_signals", lambda: None)
    with pytest.raises(SystemExit) as exit_:
        train_here(*flags)
    assert exit_.value.code == REQUEUE
    # After the signals at step 5, the ranks ask at step 8 and stop at step 12.
    assert saved == ["step-000000005", "step-000000010", "step-000000012"]
    monkeypatch.undo()
    resumed = train_here(*flags, "--resume")
    whole = train_here(*flags, "--out", f"{digits_flags[-1]}-whole")
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("every", only(["11", "22", "30"], now=["22"]))
def test_a_run_that_ends_before_the_answer_or_with_it_finishes(every, train_here, digits_flags):
    flags = [*digits_flags, "--epochs", "1", "--checkpoint-every", "10"]
    assert train_here(*flags, "--signal-every", every)["steps"] == 22


@pytest.mark.usefixtures("saved")
def test_a_signal_on_a_full_disk_does_not_ask_for_a_requeue(train_here, digits_flags, out):
    # As above: the signals at step 5 stop the ranks at step 12.
    full = out / "checkpoints" / "step-000000012" / ".rank-0.pt"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    flags = ["--epochs", "1", "--signal-every", "4", "--checkpoint-every", "5"]
    with pytest.raises(RecipeError, match=r"step 12 .*No space left on device"):
        train_here(*digits_flags, *flags)


def test_loader_processes_ignore_the_signals(train_here, photo_flags, monkeypatch):
    signalled = set()

    def signal_loaders(state, file):
        for process in multiprocessing.active_children():
            for number in SIGNALS:
                os.kill(process.pid, number)
            signalled.add(process.pid)

    monkeypatch.setattr(torch, "save", signal_loaders)
    flags = ["--model", "smallcnn", "--batch-size", "2", "--checkpoint-every", "1"]
    assert train_here(*photo_flags, *flags)["steps"] == 6
    assert signalled
