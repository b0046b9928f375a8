"""What is compared with what: settings, points and grids, and the published parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from recipes.optimizers import step_decay
from torchcomp.specs.learning_rates import LRFunction, decaying, warmed_up

PARALLEL = "parallel"
METHODS = (PARALLEL, "constant H", "linear", "QSR", "cubic", "post-local", "SWAP")
MAIN_METHODS = (PARALLEL, "constant H", "QSR")
FINAL_LR = 1e-6
# Warm-up takes this fraction of the epochs, as in the paper: 5 of 200, and 10,000 of 93,600 steps.
_EPOCHS_PER_WARMUP_EPOCH = 20
# "step" multiplies the learning rate by gamma at these fractions of the epochs.
_DROPS, _GAMMA = (0.5, 0.75), 0.1


@dataclass(frozen=True)
class Setting:
    """What all methods of one comparison share."""

    dataset: str = "digits"
    label_noise: float = 0.2  # fraction of the training labels that are replaced by random classes
    model: str = "mlp"
    optimizer: str = "sgd"  # "sgd" (momentum 0.9) or "adamw"
    decay: str = "cosine"  # of the learning rate after warm-up, such as "cosine" or "step"
    ranks: int = 4  # K, the workers
    batch: int = 32  # images per step, summed over all ranks: each takes a share, as in the paper
    epochs: int = 120  # passes over the training images

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
class Point:
    """What is tuned: "parallel" or the schedule of averages, peak lr and weight decay."""

    method: str
    schedule: str
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Run:
    """All that the outcome of a run depends on; ``part`` is "validation" or "test"."""

    setting: Setting
    point: Point
    seed: int
    part: str


@dataclass(frozen=True)
class Grid:
    """The points to try: the same number for every method."""

    # Peak learning rates of parallel training, by optimizer. The others use the best.
    lrs: Mapping[str, tuple[float, ...]]
    weight_decays: Mapping[str, tuple[float, ...]]
    periods: tuple[int, ...] = (2, 4, 8)  # H of constant H, and of post-local SGD
    # H_base, and the coefficient (alpha, for QSR) divided by the peak learning rate.
    rules: tuple[tuple[int, float], ...] = ((2, 1.0), (4, 1.0), (4, 2.0))
    # When SWAP stops averaging every step, as a share of the steps after warm-up.
    switches: tuple[float, ...] = (0.5, 0.7, 0.9)
    seeds: int = 3  # how many seeds every point is tried with

    def points(
        self, method: str, setting: Setting, samples: int, peak: float | None = None
    ) -> list[Point]:
        """Return the points of a method; ``peak`` is the best lr of parallel training."""
        optimizer, decays = setting.optimizer, self.weight_decays[setting.optimizer]
        if method == PARALLEL:
            lrs = self.lrs[optimizer]
            return [Point(method, method, lr, decay) for lr in lrs for decay in decays]
        assert peak is not None
        schedules = self._schedules(method, peak, setting, samples)
        return [Point(method, each, peak, decay) for each in schedules for decay in decays]

    def _schedules(self, method: str, peak: float, setting: Setting, samples: int) -> list[str]:
        exponents = {"linear": 1, "QSR": 2, "cubic": 3}
        if method in exponents:
            return [rule(exponents[method], peak * ratio, h) for h, ratio in self.rules]
        warmup = setting.warmup_steps(samples)
        after = setting.total_steps(samples) - warmup
        half, *switches = (warmup + round(share * after) for share in (0.5, *self.switches))
        schedules = {
            "constant H": [f"every({h})" for h in self.periods],
            "post-local": [f"post_local(switch={half}, h={h})" for h in self.periods],
            "SWAP": [f"swap(switch={switch})" for switch in switches],
        }
        return schedules[method]


GRID = Grid(
    lrs={"sgd": (0.05, 0.1, 0.2), "adamw": (0.001, 0.003, 0.01)},
    weight_decays={"sgd": (5e-4, 5e-3, 2e-2), "adamw": (0.1, 0.5, 2.0)},
)
QUICK_GRID = Grid(
    lrs={"sgd": (0.1,), "adamw": (0.003,)},
    weight_decays={"sgd": (5e-4,), "adamw": (0.1,)},
    periods=(4,),
    rules=((2, 1.0),),
    switches=(0.5,),
    seeds=1,
)


def rule(exponent: int, coefficient: float, h_base: int) -> str:
    """Return the schedule H = max(h_base, floor((coefficient / lr)^exponent))."""
    if exponent == 2:
        return f"qsr(alpha={coefficient:g}, h_base={h_base})"
    return f"power(coef={coefficient:g}, exponent={exponent}, h_base={h_base})"


@dataclass(frozen=True)
class Study:
    setting: Setting
    methods: tuple[str, ...] = MAIN_METHODS


SGD_MLP = Setting()
ADAMW_MLP = Setting(optimizer="adamw")
ADAMW_VIT = Setting(model="vit", optimizer="adamw", epochs=40)

PARTS = {
    "sgd_mlp": (Study(SGD_MLP, METHODS),),
    "adamw_mlp": (Study(ADAMW_MLP),),
    "adamw_vit": (Study(ADAMW_VIT),),
    "lengths": tuple(Study(Setting(epochs=epochs)) for epochs in (30, 360)),
    "decays": tuple(Study(Setting(decay=decay)) for decay in ("linear", "step-cosine", "step")),
    "workers": tuple(Study(Setting(ranks=ranks)) for ranks in (2, 8)),
    "clean_labels": (Study(Setting(label_noise=0.0)),),
}
"""The comparisons, by the names that ``--only`` takes."""
