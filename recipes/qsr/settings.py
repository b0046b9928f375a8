"""What is compared with what: the settings of the published experiment, part by part."""

from dataclasses import dataclass
from functools import partial

from recipes.errors import RecipeError
from recipes.lr_schedules import step_decay
from torchcomp.learning_rates import DECAYS, LRFunction, decaying, warmed_up

MODELS = ("mlp", "vit", "cnn")
OPTIMIZERS = ("sgd", "adamw")
ALL_DECAYS = (*DECAYS, "step")
METHODS = ("parallel", "constant H", "linear", "QSR", "cubic", "post-local", "SWAP")
MAIN_METHODS = ("parallel", "constant H", "QSR")
LABEL_NOISE = {"digits": 0.2, "cifar10": 0.0}
FINAL_LR = 1e-6
_MODELS_OF = {"digits": ("mlp", "vit"), "cifar10": ("cnn",)}
# Warm-up takes this fraction of the epochs, as in the paper: 5 of 200, and 10,000 of 93,600 steps.
_EPOCHS_PER_WARMUP_EPOCH = 20
# "step" multiplies the learning rate by gamma at these fractions of the epochs.
_DROPS, _GAMMA = (0.5, 0.75), 0.1


@dataclass(frozen=True)
class Setting:
    """What all methods of one comparison share.

    Attributes:
        dataset: "digits" or "cifar10".
        label_noise: fraction of the training labels that are replaced by random classes.
        model: "mlp" or "vit" for the digits, "cnn" for CIFAR-10.
        optimizer: "sgd" (momentum 0.9) or "adamw".
        decay: of the learning rate after warm-up, one of :data:`ALL_DECAYS`.
        ranks: K, the workers.
        batch: images per step, summed over all ranks: each takes a share, as in the paper.
        epochs: passes over the training images.
    """

    dataset: str = "digits"
    label_noise: float = LABEL_NOISE["digits"]
    model: str = "mlp"
    optimizer: str = "sgd"
    decay: str = "cosine"
    ranks: int = 4
    batch: int = 32
    epochs: int = 120

    def check(self) -> None:
        """Raise RecipeError if the values do not go together."""
        models = _MODELS_OF[self.dataset]
        if self.model not in models:
            raise RecipeError(
                f"--model {self.model}: expected {' or '.join(models)} for {self.dataset}"
            )
        if self.batch % self.ranks:
            raise RecipeError(
                f"--ranks {self.ranks}: expected a divisor of the batch of {self.batch} images"
            )
        if self.epochs < 2:
            raise RecipeError(f"--epochs {self.epochs}: expected at least 2, one of them warm-up")

    def total_steps(self, samples: int) -> int:
        """Return T, the number of steps, for a number of training images."""
        return self.epochs * (samples // self.batch)

    def warmup_steps(self, samples: int) -> int:
        """Return W, the number of steps of warm-up."""
        return max(1, self.epochs // _EPOCHS_PER_WARMUP_EPOCH) * (samples // self.batch)

    def lr_function(self, peak: float, samples: int) -> LRFunction:
        """Return the learning rate as a function of the step: linear warm-up, then decay."""
        total, warmup = self.total_steps(samples), self.warmup_steps(samples)
        if self.decay != "step":
            return decaying(
                self.decay, peak=peak, total_steps=total, warmup_steps=warmup, final=FINAL_LR
            )
        drops = tuple(round(share * total) for share in _DROPS)
        after = partial(step_decay, peak=peak, gamma=_GAMMA, drops=drops)
        return partial(warmed_up, after=after, peak=peak, final=FINAL_LR, steps=warmup)


@dataclass(frozen=True)
class Study:
    """One comparison.

    Attributes:
        setting: what its methods share.
        methods: which are compared.
        curves: whether the accuracy is also measured during the run.
        map: whether QSR also runs with every H_base and alpha of a map, with tuning seeds.
    """

    setting: Setting
    methods: tuple[str, ...] = MAIN_METHODS
    curves: bool = False
    map: bool = False


SGD_MLP = Setting()
ADAMW_MLP = Setting(optimizer="adamw")
CIFAR10 = Setting("cifar10", LABEL_NOISE["cifar10"], "cnn", batch=256, epochs=100)
ADAMW_VIT = Setting(model="vit", optimizer="adamw", epochs=40)

PARTS = {
    "sgd_mlp": (Study(SGD_MLP, METHODS, curves=True, map=True),),
    "adamw_mlp": (Study(ADAMW_MLP, curves=True, map=True),),
    "adamw_vit": (Study(ADAMW_VIT, curves=True),),
    "lengths": tuple(Study(Setting(epochs=epochs)) for epochs in (30, 360)),
    "decays": tuple(Study(Setting(decay=decay)) for decay in ("linear", "step-cosine", "step")),
    "workers": tuple(Study(Setting(ranks=ranks)) for ranks in (2, 8)),
    "clean_labels": (Study(Setting(label_noise=0.0)),),
}
"""The published comparisons, by the names that ``--only`` takes."""
OWN = "own"
"""The part of a setting that the command line describes."""
