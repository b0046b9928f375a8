"""The options of a run in the paper's setting."""

from dataclasses import dataclass

from torch import nn

from recipes.errors import RecipeError
from recipes.jointspar.image_sets import SIZES
from recipes.jointspar.layer_training import Hyperparameters
from recipes.jointspar.methods import OPTIMIZERS, Method, check_optimizer, parse_method
from recipes.jointspar.networks import small_network
from recipes.models import build_model
from recipes.options import check_epochs, check_limits, option


@dataclass(frozen=True)
class Setting:
    """A configuration. Values that the paper does not state are ours (docs/jointspar.md)."""

    dataset: str = option("digits", "one of the paper's six, or digits", choices=tuple(SIZES))
    data: str = option("", "folder of the data set; digits needs none")
    model: str = option("conv", "mlp, conv, or as in recipes.train")
    small_stem: bool = option(False, "torchvision ResNets: a 3x3 stem, for small images")
    batch: int = option(1024, "images of one worker per step", min=1)
    epochs: int = option(90, "passes over the training images", min=1)
    warmup_epochs: int = option(5, "epochs of linear warm-up of the learning rate", min=0)
    lr: float = option(
        0.1, "peak learning rate of one worker; multiplied by the number of workers", above=0
    )
    drops: tuple[int, ...] = option(
        (30, 50, 70), "epochs at which the learning rate is divided by 10"
    )
    optimizer: str = option(
        "lars", "lars-own divides by the norm of each gradient", choices=OPTIMIZERS
    )
    momentum: float = option(0.9, "momentum of the optimizer", min=0, below=1)
    weight_decay: float = option(5e-4, "weight decay; none on biases and norms", min=0)
    trust: float = option(0.01, "LARS's trust coefficient", above=0)
    shift: int = option(0, "maximum random shift of training images, in pixels", min=0)
    mirror: bool = option(False, "mirror training images at random")
    method: str = option(
        "jointspar(0.6)",
        "how gradients are exchanged, such as dense, topk(0.05), or jointspar with the arguments "
        "of torchcomp.JointSpar",
    )
    seed: int = option(0, "seed of weights, data order and draws", min=0, max=2**63 - 1)
    out: str = option("runs/jointspar_paper", "folder for metrics and summary")
    dry_run: bool = option(False, "print the configuration and the plan, without training")
    workers: int = option(0, "number of workers for --dry-run (0: the started ones)", min=0)

    def __post_init__(self) -> None:
        check_limits(self)
        check_epochs("--drops", self.drops, self.epochs)
        if self.warmup_epochs >= self.epochs:
            raise RecipeError(
                f"--warmup-epochs must be below --epochs {self.epochs}, found {self.warmup_epochs}"
            )
        check_optimizer(self.exchange, self.optimizer)

    @property
    def exchange(self) -> Method:
        """How gradients are exchanged."""
        return parse_method(self.method)

    def hyperparameters(self, steps_per_epoch: int, workers: int) -> Hyperparameters:
        """Return the length in steps, the learning rate and the other settings."""
        return Hyperparameters(
            steps=self.epochs * steps_per_epoch,
            warmup=self.warmup_epochs * steps_per_epoch,
            drops=tuple(drop * steps_per_epoch for drop in self.drops),
            # Linear scaling, as in the paper.
            lr=self.lr * workers,
            optimizer=self.optimizer,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            trust=self.trust,
        )

    def module(self) -> nn.Module:
        """Return the network with fresh weights."""
        sizes = SIZES[self.dataset]
        if self.model in ("mlp", "conv"):
            return small_network(self.model, sizes)
        return build_model(
            self.model,
            channels=sizes.channels,
            classes=sizes.classes,
            small_stem=self.small_stem,
        )
