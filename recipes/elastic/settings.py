"""The settings of a run, which are flags of ``recipes.elastic.train``."""

from dataclasses import dataclass

from recipes.errors import RecipeError
from recipes.options import as_plain_dict, check_batch, check_limits, option, read_options
from torchcomp.local_sgd import Nesterov
from torchcomp.specs.spec import parse_aggregator, parse_outer_step, parse_schedule

# The number of ranks is not a setting: it can change. These do not affect the result.
_FREE = {"out", "checkpoint_every", "timeout"}


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    compress: str = option("ef(topk(0.01))", "how gradients or pseudo-gradients are averaged")
    sync: str = option("none", 'local steps, such as "every(8)"; none averages gradients')
    outer: str = option("none", 'the outer step of local steps, such as "nesterov()"')
    steps: int = option(2000, "optimizer steps", min=1)
    batch: int = option(60, "samples per step, of all ranks together", min=1)
    lr: float = option(0.2, "learning rate of SGD at the first step; it falls to 0", above=0)
    seed: int = option(0, "of weights and batches", min=0)
    checkpoint_every: int = option(50, "steps between two checkpoints", min=1)
    timeout: int = option(
        0,
        "seconds that a rank waits for another one, before all restart (0: PyTorch's, 1800)",
        min=0,
    )
    out: str = option("runs/elastic", "folder of the checkpoints and the log")

    @property
    def to_match(self) -> dict[str, object]:
        """What a resumed run must keep."""
        return {name: value for name, value in as_plain_dict(self).items() if name not in _FREE}


def read_settings(argv: list[str], world_size: int) -> Settings:
    """Read the flags."""
    settings = read_options(Settings, argv)
    check_limits(settings)
    _check_specs(settings)
    check_batch(settings.batch, world_size)
    return settings


def _check_specs(settings: Settings) -> None:
    parse_aggregator(settings.compress)
    if settings.sync != "none":
        parse_schedule(settings.sync)
    if settings.outer == "none":
        return
    if settings.sync == "none":
        raise RecipeError(f"--outer {settings.outer} needs local steps: add --sync")
    if not isinstance(parse_outer_step(settings.outer), Nesterov):
        raise RecipeError(f"--outer {settings.outer}: the account knows nesterov(...) alone")
