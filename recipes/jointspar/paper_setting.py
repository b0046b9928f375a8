"""The options of a run in the paper's setting."""

from dataclasses import dataclass

from torch import nn

from recipes.errors import RecipeError
from recipes.jointspar.image_sets import SIZES
from recipes.jointspar.layer_training import Hyperparameters, Method
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
    momentum: float = option(0.9, "momentum of LARS", min=0, below=1)
    weight_decay: float = option(5e-4, "weight decay of LARS; none on biases and norms", min=0)
    trust: float = option(0.01, "LARS's trust coefficient", above=0)
    shift: int = option(0, "maximum random shift of training images, in pixels", min=0)
    mirror: bool = option(False, "mirror training images at random")
    method: str = option(
        "jointspar",
        "how gradients are exchanged",
        choices=("dense", "jointspar", "uniform", "topk"),
    )
    budget: float = option(
        0.6,
        "share of the layers' costs; for topk, share of dense DDP's bytes; 1 for dense",
        above=0,
        max=1,
    )
    costs: str = option(
        "layers",
        "unit of the budget; the paper's is layers",
        choices=("layers", "bytes", "time"),
    )
    p_min: float = option(0.0125, "minimum probability of a layer", above=0, max=1)
    alpha: float = option(0.01, "step size of JointSpar's bandit", above=0)
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
        if (self.method == "dense") != (self.budget == 1):
            raise RecipeError(
                f"--budget {self.budget:g} cannot be used with --method {self.method}: dense needs "
                "a budget of 1, and the other methods need a budget below 1"
            )
        if self.exchange.samples and self.p_min > self.budget:
            raise RecipeError(
                f"--p-min must be at most --budget {self.budget:g}, found {self.p_min:g}: keeping "
                "every layer with probability p-min would exceed the budget"
            )

    @property
    def exchange(self) -> Method:
        """How gradients are exchanged."""
        return Method(self.method, self.budget, costs=self.costs)

    def hyperparameters(self, steps_per_epoch: int, workers: int) -> Hyperparameters:
        """Return the length in steps, the learning rate and the other settings."""
        return Hyperparameters(
            steps=self.epochs * steps_per_epoch,
            warmup=self.warmup_epochs * steps_per_epoch,
            drops=tuple(drop * steps_per_epoch for drop in self.drops),
            # Linear scaling, as in the paper.
            lr=self.lr * workers,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            trust=self.trust,
            p_min=self.p_min,
            alpha=self.alpha,
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
