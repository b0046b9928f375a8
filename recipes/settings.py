"""Every setting of a training run: its default, its limits, its help, in one place."""

from dataclasses import dataclass

from recipes.errors import RecipeError
from recipes.options import check_epochs, check_limits, option, read_options


@dataclass(frozen=True)
class Settings:
    """A resolved configuration: defaults, then the configuration file, then the command line."""

    dataset: str = option(
        "digits",
        "digits is embedded; the others are read from --data-path",
        choices=("digits", "cifar10", "imagenet", "folder"),
    )
    data_path: str = option("", "CIFAR-10 archive, image folder, or the folder of .beton files")
    data_cache: str = option("", "folder for .beton files made on the fly (default: user's cache)")
    loader: str = option(
        "auto",
        "auto is ffcv, or torchvision where ffcv is not installed",
        choices=("auto", "ffcv", "torchvision"),
    )
    workers: int = option(
        0, "loader threads or processes per rank (0: as many as --threads)", least=0
    )
    image_size: int = option(
        0, "photographs: pixels a side (0: the data set's, which is 224)", least=0
    )
    crop_ratio: float = option(
        0.875, "photographs: share of the shorter side that a test image keeps", above=0, most=1
    )
    randaugment_ops: int = option(0, "RandAugment: operations an image (0: none)", least=0)
    randaugment_magnitude: int = option(10, "RandAugment: their strength, of 30", least=0, most=30)
    mixup: float = option(0.0, "MixUp: alpha of Beta(alpha, alpha) (0: none)", least=0)

    model: str = option(
        "smallcnn", "smallcnn, simple_vit/b16 or ti16, torchvision/NAME or timm/NAME"
    )
    small_stem: bool = option(False, "torchvision ResNets: a 3x3 stem without pooling, for CIFAR")
    channels_last: bool = option(False, "keep images and weights in channels_last order")
    label_smoothing: float = option(
        0.0, "share of a label spread over all classes", least=0, below=1
    )

    epochs: int = option(20, "passes over the training set", least=1)
    batch_size: int = option(64, "images per step, over all ranks", least=1)
    accumulate: int = option(1, "micro-batches that a rank splits its batch into", least=1)
    optimizer: str = option("sgd", "sgd or adamw", choices=("sgd", "adamw"))
    momentum: float = option(0.9, "sgd's momentum", least=0, below=1)
    nesterov: bool = option(False, "sgd's Nesterov momentum")
    beta1: float = option(0.9, "adamw's first decay", least=0, below=1)
    beta2: float = option(0.999, "adamw's second decay", least=0, below=1)
    weight_decay: float = option(0.0005, "weight decay on all parameters", least=0)
    clip_norm: float = option(0.0, "largest norm of a rank's gradient (0: any)", least=0)
    lr: float = option(0.1, "peak learning rate", above=0)
    final_lr: float = option(1e-6, "rate where warm-up begins and where the decay ends", least=0)
    schedule: str = option(
        "cosine",
        "cosine, linear, step-cosine (its powers of two) or step",
        choices=("cosine", "linear", "step-cosine", "step"),
    )
    warmup_steps: int = option(0, "steps of linear warm-up", least=0)
    milestones: tuple[int, ...] = option((), "epochs at which the step schedule drops")
    gamma: float = option(0.1, "the step schedule's factor", above=0)

    compress: str = option(
        "none", 'how gradients (with --sync: changes) are compressed, e.g. "ef(topk(0.01))"'
    )
    sync: str = option("none", 'local steps, e.g. "qsr(alpha=0.0175, h_base=4)"')
    outer: str = option("none", 'local steps: outer step, e.g. "nesterov(lr=0.7, momentum=0.9)"')
    bn_images: int = option(
        4096,
        "local steps: training images, over all ranks, that batch normalisation's statistics are "
        "estimated from before an evaluation (0: the mean of the ranks' own)",
        least=0,
    )

    device: str = option("auto", "auto is cuda where there is one", choices=("auto", "cpu", "cuda"))
    amp: str = option("off", "autocast to bf16 or fp16", choices=("off", "bf16", "fp16"))
    threads: int = option(0, "torch's threads per rank (0: this machine's cores shared)", least=0)
    deterministic: bool = option(True, "cuda: only cuDNN's repeatable algorithms, at some cost")
    seed: int = option(0, "of weights, order and augmentation", least=0, most=2**63 - 1)

    out: str = option("runs/train", "folder for metrics, summary, weights and checkpoints")
    checkpoint_every: int = option(0, "steps between checkpoints (0: none)", least=0)
    resume: bool = option(False, "go on from the last complete checkpoint in --out")
    log_every: int = option(10, "steps between lines in metrics.jsonl", least=1)
    eval_every: int = option(1, "epochs between evaluations", least=1)
    dry_run: bool = option(False, "print the configuration and the plan, and stop")
    plan_ranks: int = option(0, "ranks that --dry-run plans for (0: those started)", least=0)
    shrink: bool = option(False, "train a shrunken copy for a step, and stop")

    def __post_init__(self) -> None:
        check_limits(self)
        _check_together(self)


def read_settings(words: list[str]) -> Settings:
    """Resolve the command line and the configuration file that it names."""
    return read_options(Settings, words)


def _check_together(settings: Settings) -> None:
    if settings.nesterov and settings.momentum == 0:
        raise RecipeError("--nesterov needs --momentum above 0: it looks ahead along the momentum")
    if settings.final_lr > settings.lr:
        raise RecipeError(f"--final-lr {settings.final_lr} is above the peak --lr {settings.lr}")
    if settings.schedule == "step-cosine" and settings.final_lr == 0:
        raise RecipeError("--schedule step-cosine needs --final-lr above 0: it takes its logarithm")
    if settings.outer != "none" and settings.sync == "none":
        raise RecipeError(f"--outer {settings.outer} follows the averages of --sync: give it, too")
    # Without training, a data set is opened only where its size is not known beforehand.
    opened = settings.dataset == "folder" or not (settings.dry_run or settings.shrink)
    if settings.dataset != "digits" and opened and not settings.data_path:
        raise RecipeError(f"--dataset {settings.dataset} needs --data-path: it is not embedded")
    _check_milestones(settings)


def _check_milestones(settings: Settings) -> None:
    epochs = settings.milestones
    if bool(epochs) != (settings.schedule == "step"):
        raise RecipeError("--milestones belongs to --schedule step, which needs at least one")
    check_epochs("--milestones", epochs, settings.epochs)
