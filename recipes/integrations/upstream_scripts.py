"""Where the lines of torchcomp go in the training scripts of torchvision, timm and nanoGPT.

An :class:`Edit` finds its place by the beginning of a line of the upstream file, its *anchor*. In
the inserted lines, ``SPEC`` stands for the method or the schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import RecipeError
from recipes.integrations.upstream_data import write_image_folder, write_tokens


@dataclass(frozen=True)
class Edit:
    """A change at one line of an upstream file.

    Attributes:
        anchor: the beginning of the line, without its indentation.
        lines: what replaces the line, indented like it; ``...`` is the line itself.
        file: the file, in the script's folder.
    """

    anchor: str
    lines: tuple[str, ...]
    file: str = "train.py"

    def apply(self, text: str) -> str:
        """Return the changed text of the file."""
        lines = text.splitlines()
        found = [index for index, line in enumerate(lines) if line.lstrip().startswith(self.anchor)]
        if len(found) != 1:
            raise RecipeError(
                f"{self.file}: expected one line that begins with {self.anchor!r}, found "
                f"{len(found)}, so this is another version of the upstream script: check out the "
                "version that its page in docs/integrations names"
            )
        line = lines[found[0]]
        indent = line[: len(line) - len(line.lstrip())]
        new = [line if each == "..." else indent + each for each in self.lines]
        return "\n".join([*lines[: found[0]], *new, *lines[found[0] + 1 :], ""])


def after(anchor: str, *lines: str) -> Edit:
    """Insert lines after the anchor."""
    return Edit(anchor, ("...", *lines))


def before(anchor: str, *lines: str) -> Edit:
    """Insert lines before the anchor."""
    return Edit(anchor, (*lines, "..."))


@dataclass(frozen=True)
class Place:
    """Where an ``if`` statement is inserted, and its condition."""

    insert: Callable[..., Edit]  # `before` or `after`
    anchor: str
    condition: str

    def edit(self, *body: str) -> Edit:
        """Insert the ``if`` statement with this body."""
        return self.insert(self.anchor, f"if {self.condition}:", *("    " + line for line in body))


@dataclass(frozen=True)
class Script:
    """An upstream training script.

    Attributes:
        folder: the folder of ``train.py`` in a clone.
        flags: flags of a small run. The user's flags follow, and win.
        cpu_flags: further flags on CPU.
        data: the folder of the data of these flags, next to the script.
        write_data: writes them.
        fixes: what the script needs to run at all.
        cpu: what it needs to run on CPU and gloo.
        imports: ``import torchcomp``.
        compress: the line that registers a method.
        local: the line that takes local steps.
        report: prints what was sent, at the end of the run.
        load: loads every rank's own state.
        save: saves it.
        load_path: an expression, the file of a rank to load.
        save_path: the same to save.
        module: an expression, the model without DDP.
    """

    folder: str
    flags: tuple[str, ...]
    cpu_flags: tuple[str, ...]
    data: str
    write_data: Callable[[Path], None]
    fixes: tuple[Edit, ...]
    cpu: tuple[Edit, ...]
    imports: Edit
    compress: Edit
    local: Edit
    report: Place
    load: Place
    save: Place
    load_path: str
    save_path: str
    module: str

    def compressed(self) -> tuple[Edit, ...]:
        """Compress gradients, and save and load every rank's residual."""
        saved = f"saved = torch.load({self.load_path}, weights_only=True)"
        return (
            self.imports,
            self.load.edit(saved, "handle.load_state_dict(saved)"),
            self.compress,
            self.save.edit(f"torch.save(handle.state_dict(), {self.save_path})"),
            self.report.edit("print(handle.stats)"),
        )

    def local_steps(self) -> tuple[Edit, ...]:
        """Take local steps. Inside a round, every rank has its own weights and optimizer state."""
        parts = {"model": self.module, "optimizer": "optimizer", "sync": "sync"}
        return (
            self.imports,
            self.load.edit(
                f"saved = torch.load({self.load_path}, weights_only=True)",
                *(f'{part}.load_state_dict(saved["{name}"])' for name, part in parts.items()),
            ),
            self.local,
            self.save.edit(
                "own = {",
                *(f'    "{name}": {part}.state_dict(),' for name, part in parts.items()),
                "}",
                f"torch.save(own, {self.save_path})",
            ),
            self.report.edit("print(sync.stats)"),
        )


# The torchvision of the package registry is a CUDA build (torchcomp/torchvision_compat.py).
_COMPAT = (
    "from torchcomp.torchvision_compat import import_torchvision",
    "import_torchvision()  # with a CPU build of torch",
)

_TORCHVISION = Script(
    folder="references/classification",
    flags=(
        *("--data-path", "data", "--output-dir", ".", "--workers", "1"),
        *("--model", "shufflenet_v2_x0_5", "--batch-size", "32", "--epochs", "4", "--lr", "0.05"),
        *("--lr-scheduler", "cosineannealinglr", "--print-freq", "10"),
        *("--train-crop-size", "32", "--val-resize-size", "32", "--val-crop-size", "32"),
    ),
    cpu_flags=("--device", "cpu"),
    data="data",
    write_data=write_image_folder,
    # It saves its arguments, which weights_only=True refuses to load.
    fixes=(
        Edit(
            "checkpoint = torch.load(args.resume",
            ('checkpoint = torch.load(args.resume, map_location="cpu", weights_only=False)',),
        ),
    ),
    cpu=(
        before("import presets", *_COMPAT),
        Edit(
            "model = torch.nn.parallel.DistributedDataParallel(",
            ("model = torch.nn.parallel.DistributedDataParallel(model)",),
        ),
        Edit("torch.cuda.set_device(", (), "utils.py"),
        Edit("args.dist_backend = ", ('args.dist_backend = "gloo"',), "utils.py"),
        Edit('t = torch.tensor(val, device="cuda")', ("t = torch.tensor(val)",), "utils.py"),
    ),
    imports=after("import torch.utils.data", "import torchcomp"),
    compress=after(
        "model_without_ddp = model.module",
        "handle = torchcomp.register(model, SPEC, scaler=scaler)",
    ),
    local=after(
        "model_without_ddp = model.module",
        "sync = torchcomp.LocalSGD(",
        "    model, optimizer, SPEC, total_steps=args.epochs * len(data_loader),",
        "    warmup_steps=args.lr_warmup_epochs * len(data_loader), scaler=scaler,",
        ")",
    ),
    report=Place(before, "total_time = time.time() - start_time", "args.distributed"),
    load=Place(
        after,
        'args.start_epoch = checkpoint["epoch"] + 1',
        "args.distributed and not args.test_only",
    ),
    save=Place(before, "checkpoint = {", "args.distributed"),
    load_path='f"{args.resume}.rank{args.rank}"',
    save_path='f"{args.output_dir}/checkpoint.pth.rank{args.rank}"',
    module="model_without_ddp",
)

_TIMM_SCALER = 'scaler=getattr(loss_scaler, "_scaler", None)'

_TIMM = Script(
    folder=".",
    flags=(
        *("--data-dir", "data", "--output", ".", "--experiment", "run"),
        *("--model", "test_resnet", "--num-classes", "10", "--input-size", "3", "32", "32"),
        *("--batch-size", "32", "--epochs", "4", "--warmup-epochs", "1", "--lr", "0.1"),
        *("--sched-on-updates", "--no-aug", "--workers", "1", "--log-interval", "10"),
    ),
    cpu_flags=("--device", "cpu"),
    data="data",
    write_data=write_image_folder,
    fixes=(),
    cpu=(
        before("import torchvision.utils", *_COMPAT),
        Edit(
            "task.prepare_distributed(",
            ("task.prepare_distributed(broadcast_buffers=not args.no_ddp_bb)",),
        ),
    ),
    imports=after("import torch.nn as nn", "import torchcomp"),
    compress=after(
        "task.prepare_distributed(",
        "handle = torchcomp.register(",
        f"    task.get_trainable_module(), SPEC, {_TIMM_SCALER}",
        ")",
    ),
    local=before(
        "start_epoch = 0",
        "if args.distributed:",
        "    sync = torchcomp.LocalSGD(",
        "        model, optimizer, SPEC, total_steps=num_epochs * updates_per_epoch,",
        f"        warmup_steps=args.warmup_epochs * updates_per_epoch, {_TIMM_SCALER},",
        "    )",
    ),
    report=Place(before, "torch.distributed.destroy_process_group()", "utils.is_primary(args)"),
    load=Place(after, "start_epoch = 0", "args.distributed and args.resume"),
    save=Place(before, "if saver is not None:", "args.distributed"),
    load_path='f"{args.resume}.rank{args.rank}"',
    save_path='f"{args.output}/{args.experiment}/last.pth.tar.rank{args.rank}"',
    module="utils.unwrap_model(model)",
)

_NANOGPT = Script(
    folder=".",
    flags=(
        *("--dataset=chain", "--out_dir=.", "--batch_size=16", "--gradient_accumulation_steps=4"),
        *("--n_layer=2", "--n_head=4", "--n_embd=64", "--block_size=32", "--max_iters=200"),
        *("--lr_decay_iters=200", "--warmup_iters=10", "--learning_rate=3e-3", "--min_lr=3e-4"),
        *("--eval_interval=50", "--eval_iters=20", "--log_interval=10", "--compile=False"),
    ),
    cpu_flags=("--backend=gloo", "--device=cpu", "--dtype=float32"),
    data="data/chain",
    write_data=write_tokens,
    fixes=(),
    cpu=(
        Edit("device = f'cuda:{ddp_local_rank}'", ()),
        Edit("torch.cuda.set_device(device)", ()),
        Edit("model = DDP(model", ("model = DDP(model)",)),
    ),
    imports=after("import torch", "import torchcomp"),
    compress=after("model = DDP(model", "handle = torchcomp.register(model, SPEC, scaler=scaler)"),
    local=after(
        "model = DDP(model",
        "sync = torchcomp.LocalSGD(",
        "    model, optimizer, SPEC, total_steps=max_iters + 1, warmup_steps=warmup_iters,",
        "    scaler=scaler,",
        ")",
    ),
    report=Place(before, "destroy_process_group()", "master_process"),
    load=Place(after, "raw_model = model.module", "ddp and init_from == 'resume'"),
    save=Place(
        before,
        "if iter_num % eval_interval == 0 and master_process:",
        "ddp and iter_num % eval_interval == 0 and iter_num > 0",
    ),
    load_path="f'{out_dir}/ckpt.pt.rank{ddp_rank}'",
    save_path="f'{out_dir}/ckpt.pt.rank{ddp_rank}'",
    module="raw_model",
)

SCRIPTS = {"torchvision": _TORCHVISION, "timm": _TIMM, "nanogpt": _NANOGPT}
