"""The settings of a run, which are flags of ``recipes.nodes.train``."""

from dataclasses import dataclass

from recipes.errors import RecipeError
from recipes.nodes.modes import MODES
from recipes.options import check_batch, check_limits, option, read_options
from recipes.small_gpt.training import BATCH, LR
from torchcomp.specs.spec import parse_aggregator


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Its nodes are made of consecutive ranks, as torchrun starts them."""

    mode: str = option("hsdp", "how the model is replicated and sharded", choices=MODES)
    compress: str = option("ef(topk(0.1))", 'what nodes exchange: a spec; "mean" sends everything')
    ranks_per_node: int = option(2, "ranks that share a network card", min=1)
    steps: int = option(200, "optimizer steps", min=1)
    batch: int = option(BATCH, "sequences per step, of all ranks together", min=1)
    lr: float = option(LR, "peak learning rate of AdamW", above=0)
    seed: int = option(0, "of weights and batches", min=0)
    log_every: int = option(20, "steps between two lines", min=1)
    checkpoint_every: int = option(0, "steps between two checkpoints (0: none)", min=0)
    resume: bool = option(False, "continue from the newest checkpoint in --out, in any mode")
    out: str = option("runs/nodes", "folder of the checkpoints")
    device: str = option(
        "auto", "auto: a GPU per rank, or the CPU if there is none", choices=("auto", "cpu", "cuda")
    )

    @property
    def task(self) -> str:
        """What a resumed run must keep. The mode and the number of ranks can change."""
        return f"{self.steps} steps, batch {self.batch}, lr {self.lr:g}, seed {self.seed}"


def read_settings(argv: list[str], world_size: int) -> Settings:
    settings = read_options(Settings, argv)
    check_limits(settings)
    parse_aggregator(settings.compress)
    if world_size % settings.ranks_per_node:
        raise RecipeError(
            f"--ranks-per-node {settings.ranks_per_node}: {world_size} ranks cannot be divided "
            "into nodes of that size. Start as many ranks on each node"
        )
    check_batch(settings.batch, world_size)
    return settings
