"""A job: the configuration of one launch, passed to its workers as JSON."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Job:
    """One launch: methods measured one after another by the same processes.

    Attributes:
        task: "steps" (time and bytes of a step), "accuracy" (time to a test accuracy) or
            "prediction" (what predictions need, and the times to compare them with).
        model: The model; for "prediction", the first of `models`.
        models: For "prediction", the models, and the methods that each is measured with.
        levels: For each of `methods`, 1 for an exchange among all ranks or 2 for one inside the
            hosts and one between them. By default, 1.
        ranks: Number of ranks of each host.
        counted: Whether the kernel's counters of the interface belong to this job alone.
        seconds: Bound on the measured time per method.
        least: Smallest number of measured steps per method.
        rounds: How often the list of methods is repeated. If the machine slows down, this slows
            all methods.
        rates: Peak learning rates to try, for the task "accuracy", with each of `seeds`.
        timeout: Seconds after which a worker without a result is ended.
    """

    task: str
    model: str
    batch: int
    world: int
    address: str
    port: int
    interface: str
    counted: bool
    methods: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    ranks: int = 1
    seconds: float = 20.0
    least: int = 3
    rounds: int = 1
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (0.1,)
    target: float = 0.99
    models: tuple[tuple[str, tuple[str, ...]], ...] = ()
    timeout: float = 600.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        values = json.loads(text)
        # JSON has no tuples.
        return Job(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
