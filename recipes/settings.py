"""All settings of a training run, with their defaults, limits and help texts."""

from dataclasses import dataclass

from recipes.errors import RecipeError
from recipes.options import check_epochs, check_limits, option, read_options


@dataclass(frozen=True)
class Settings:
    """The settings of a run: defaults, overridden by the configuration file, then by flags."""

    # Data.
    dataset: str = option(
        "digits",
        "digits comes with scikit-learn; the others are read from --data-path",
        choices=(
            *("digits", "mnist", "fashion-mnist", "svhn", "cifar10", "cifar100"),
            *("imagenet", "folder"),
        ),
    )
    data_path: str = option("", "torchvision's root, image folder, or folder of .beton files")
    loader: str = option(
        "auto",
        "of photographs; auto: ffcv if --data-path has .beton files, else torchvision",
        choices=("auto", "ffcv", "torchvision"),
    )
    workers: int = option(
        0, "loader threads or processes per rank (0: as many as --threads)", min=0
    )
    image_size: int = option(0, "photographs: height and width in pixels (0: 224)", min=0)
    crop_ratio: float = option(
        0.875, "photographs: share of the shorter side that a test image keeps", above=0, max=1
    )
    randaugment_ops: int = option(0, "RandAugment: operations per image (0: none)", min=0)
    randaugment_magnitude: int = option(10, "RandAugment: magnitude", min=0, max=30)
    mixup: float = option(0.0, "MixUp: alpha of Beta(alpha, alpha) (0: none)", min=0)
    mixup_shares: str = option(
        "image", "MixUp: a share for each image or micro-batch", choices=("image", "micro-batch")
    )

    # Model and loss.
    model: str = option(
        "smallcnn",
        "smallcnn, simple_vit/b16 or ti16, vit_pytorch/simple_b16 or simple_ti16, torchvision/NAME "
        "or timm/NAME",
    )
    small_stem: bool = option(
        False, "torchvision ResNets: 3x3 stem without pooling, for small images"
    )
    channels_last: bool = option(False, "use the channels_last memory format")
    label_smoothing: float = option(
        0.0, "share of a label's probability that is spread over all classes", min=0, below=1
    )

    # Optimizer and learning rate.
    epochs: int = option(20, "passes over the training set", min=1)
    batch_size: int = option(64, "images per optimizer step, summed over all ranks", min=1)
    accumulate: int = option(1, "micro-batches per optimizer step on each rank", min=1)
    optimizer: str = option("sgd", "sgd or adamw", choices=("sgd", "adamw"))
    momentum: float = option(0.9, "SGD: momentum", min=0, below=1)
    nesterov: bool = option(False, "SGD: Nesterov momentum")
    beta1: float = option(0.9, "AdamW: decay of the gradient's mean", min=0, below=1)
    beta2: float = option(0.999, "AdamW: decay of the squared gradient's mean", min=0, below=1)
    weight_decay: float = option(0.0005, "weight decay on all parameters", min=0)
    clip_norm: float = option(0.0, "maximum gradient norm (0: no clipping)", min=0)
    lr: float = option(0.1, "peak learning rate", above=0)
    final_lr: float = option(
        1e-6, "learning rate at the first step of warm-up and at the end of the decay", min=0
    )
    schedule: str = option(
        "cosine",
        "learning-rate decay; step-cosine rounds the cosine to powers of two",
        choices=("cosine", "linear", "step-cosine", "step"),
    )
    warmup_steps: int = option(0, "steps of linear warm-up", min=0)
    milestones: tuple[int, ...] = option(
        (), "step schedule: epochs at which the learning rate drops"
    )
    gamma: float = option(0.1, "step schedule: factor of each drop", above=0)

    # torchcomp: "none" for both compress and sync is plain DDP.
    compress: str = option(
        "none",
        'compress gradients (with --sync: pseudo-gradients), e.g. "ef(topk(0.01))"; "auto" times '
        "several methods first",
    )
    lr_inside: bool = option(
        False, "with --compress: keep the residual in the unit of the update, not of the gradient"
    )
    guard: int = option(
        0,
        "with --compress: steps between comparisons of the applied mean with the dense mean, and "
        "of the replicas (0: none)",
        min=0,
    )
    sync: str = option("none", 'local steps between averages, e.g. "qsr(alpha=0.0175, h_base=4)"')
    outer: str = option("none", 'with --sync: outer step, e.g. "nesterov(lr=0.7, momentum=0.9)"')
    bn_images: int = option(
        4096,
        "with --sync: training images, summed over all ranks, from which batch normalisation's "
        "statistics are re-estimated before an evaluation (0: the mean of the ranks' statistics)",
        min=0,
    )

    # Device, precision and reproducibility.
    device: str = option("auto", "auto: cuda if available", choices=("auto", "cpu", "cuda"))
    amp: str = option("off", "autocast to bf16 or fp16", choices=("off", "bf16", "fp16"))
    threads: int = option(0, "CPU threads per rank (0: an equal share of the cores)", min=0)
    deterministic: bool = option(
        True, "CUDA: use deterministic cuDNN algorithms, which can be slower"
    )
    seed: int = option(0, "seed of weights, data order and augmentation", min=0, max=2**63 - 1)

    # Output, checkpoints and dry runs.
    out: str = option("runs/train", "folder for metrics, summary, weights and checkpoints")
    checkpoint_every: int = option(0, "steps between checkpoints (0: none)", min=0)
    signal_every: int = option(
        10, "steps between the checks whether a rank got SIGUSR1 or SIGTERM", min=1
    )
    timeout: int = option(
        0,
        "seconds that a rank waits for another one, before the run ends (0: PyTorch's, which are "
        "1800 with gloo and 600 with NCCL)",
        min=0,
    )
    resume: bool = option(False, "resume from the newest complete checkpoint in --out")
    auto_resume: bool = option(False, "resume if --out has a complete checkpoint, else start")
    elastic: bool = option(
        False, "resume with any number of ranks; save local steps between rounds"
    )
    log_every: int = option(10, "steps between lines in metrics.jsonl", min=1)
    eval_every: int = option(1, "epochs between evaluations", min=1)
    dry_run: bool = option(False, "print the configuration and the plan, without training")
    plan_ranks: int = option(0, "number of ranks for --dry-run (0: the started ones)", min=0)
    shrink: bool = option(False, "train a shrunken copy for a step or two instead")

    def __post_init__(self) -> None:
        check_limits(self)
        _check_together(self)


def read_settings(argv: list[str]) -> Settings:
    """Read the settings from a command line and the configuration file that it names."""
    return read_options(Settings, argv)


def _check_together(settings: Settings) -> None:
    # torch.optim.SGD raises for this too, but only after the data and the model are ready.
    if settings.nesterov and settings.momentum == 0:
        raise RecipeError("--nesterov needs --momentum above 0, found 0")
    if settings.final_lr > settings.lr:
        raise RecipeError(
            f"--final-lr must be at most the peak --lr {settings.lr}, found {settings.final_lr}"
        )
    if settings.schedule == "step-cosine" and settings.final_lr == 0:
        raise RecipeError(
            "--schedule step-cosine needs --final-lr above 0, because it takes the logarithm"
        )
    if settings.outer != "none" and settings.sync == "none":
        raise RecipeError(
            f"--outer {settings.outer} needs --sync: an outer step follows an average of weights"
        )
    if settings.lr_inside and (settings.compress == "none" or settings.sync != "none"):
        raise RecipeError(
            "--lr-inside needs --compress, and no --sync: only the residual of compressed "
            "gradients can be in another unit; pseudo-gradients contain the learning rate already"
        )
    if settings.guard and (settings.compress == "none" or settings.sync != "none"):
        raise RecipeError(
            "--guard needs --compress, and no --sync: it compares the mean of compressed gradients "
            "with that of the same gradients uncompressed"
        )
    # --dry-run and --shrink do not read the data, except to count the images of a folder.
    opened = settings.dataset == "folder" or not (settings.dry_run or settings.shrink)
    if settings.dataset != "digits" and opened and not settings.data_path:
        raise RecipeError(
            f"--dataset {settings.dataset} needs --data-path, the folder or archive to read; "
            "nothing is downloaded"
        )
    _check_milestones(settings)


def _check_milestones(settings: Settings) -> None:
    epochs = settings.milestones
    if settings.schedule == "step" and not epochs:
        raise RecipeError("--schedule step needs --milestones, such as 30,60,80")
    if settings.schedule != "step" and epochs:
        raise RecipeError(
            f"--milestones is only for --schedule step, found --schedule {settings.schedule}"
        )
    check_epochs("--milestones", epochs, settings.epochs)
