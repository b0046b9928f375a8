"""The options of a run in the paper's setting."""

from dataclasses import dataclass

from torch import nn

from recipes.errors import RecipeError
from recipes.jointspar.image_sets import FACTS
from recipes.jointspar.layer_training import Course, Method
from recipes.jointspar.networks import small_network
from recipes.models import build_model
from recipes.options import check_epochs, check_limits, option


@dataclass(frozen=True)
class Setting:
    """A configuration: where the paper is silent, the values are ours (docs/jointspar.md)."""

    dataset: str = option("digits", "one of the paper's six, or digits", choices=tuple(FACTS))
    data: str = option("", "folder of the data set; digits needs none")
    model: str = option("conv", "mlp, conv, or as in recipes.train")
    small_stem: bool = option(False, "torchvision ResNets: a 3x3 stem, for small images")
    batch: int = option(1024, "images of one worker in a step", least=1)
    epochs: int = option(90, "passes over the training images", least=1)
    warmup_epochs: int = option(5, "of them, with a rate that rises linearly", least=0)
    rate: float = option(0.1, "peak rate of one worker; it is multiplied by their number", above=0)
    drops: tuple[int, ...] = option((30, 50, 70), "epochs at which the rate is divided by 10")
    momentum: float = option(0.9, "of LARS", least=0, below=1)
    weight_decay: float = option(5e-4, "of LARS; none on biases and norms", least=0)
    trust: float = option(0.01, "LARS's trust coefficient", above=0)
    shift: int = option(0, "random shifts of training images by at most so many pixels", least=0)
    mirror: bool = option(False, "mirror training images at random")
    method: str = option(
        "jointspar",
        "how gradients are exchanged",
        choices=("dense", "jointspar", "uniform", "topk"),
    )
    budget: float = option(
        0.6,
        "share of the layers' costs, or for topk of dense DDP's bytes; 1 for dense",
        above=0,
        most=1,
    )
    costs: str = option(
        "layers",
        "what the budget counts: layers is the paper's",
        choices=("layers", "bytes", "time"),
    )
    p_min: float = option(0.0125, "least probability of a layer", above=0, most=1)
    alpha: float = option(0.01, "step size of JointSpar's bandit", above=0)
    seed: int = option(0, "of weights, order and draws", least=0, most=2**63 - 1)
    out: str = option("runs/jointspar_paper", "folder for metrics and summary")
    dry_run: bool = option(False, "print the configuration and the plan, and stop")
    workers: int = option(0, "workers that --dry-run plans for (0: those started)", least=0)

    def __post_init__(self) -> None:
        check_limits(self)
        check_epochs("--drops", self.drops, self.epochs)
        if self.warmup_epochs >= self.epochs:
            raise RecipeError(
                f"--warmup-epochs {self.warmup_epochs} leaves nothing of --epochs {self.epochs}"
            )
        if (self.method == "dense") != (self.budget == 1):
            raise RecipeError(
                f"--budget {self.budget:g} does not fit --method {self.method}: dense sends all, "
                "budget 1, and the others a share below 1"
            )
        if self.exchange.samples and self.p_min > self.budget:
            raise RecipeError(
                f"--p-min {self.p_min:g} is above --budget {self.budget:g}: every layer is kept "
                "at least so often, which alone costs more"
            )

    @property
    def exchange(self) -> Method:
        """How gradients are exchanged."""
        return Method(self.method, self.budget, costs=self.costs)

    def course(self, steps_per_epoch: int, workers: int) -> Course:
        """Length and rates in steps."""
        return Course(
            steps=self.epochs * steps_per_epoch,
            warmup=self.warmup_epochs * steps_per_epoch,
            drops=tuple(drop * steps_per_epoch for drop in self.drops),
            rate=self.rate * workers,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            trust=self.trust,
            p_min=self.p_min,
            alpha=self.alpha,
        )

    def module(self) -> nn.Module:
        """The network."""
        facts = FACTS[self.dataset]
        if self.model in ("mlp", "conv"):
            return small_network(self.model, facts)
        return build_model(
            self.model,
            channels=facts.channels,
            classes=facts.classes,
            small_stem=self.small_stem,
        )
