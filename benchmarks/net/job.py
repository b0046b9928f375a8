"""A job: what the workers of one launch are told to do, as JSON on their command line."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Job:
    """One launch: methods measured one after another by the same processes.

    `task` is "steps" (time and bytes of a step) or "accuracy" (time to a test accuracy). `seconds`
    bounds what is measured of a method and `least` is the least number of its steps. `rounds`
    repeats the list of methods, so that a machine that slows down slows them all. `counted` is
    whether the kernel's counters of the interface are this job's alone.
    """

    task: str
    model: str
    batch: int
    methods: tuple[str, ...]
    world: int
    address: str
    port: int
    interface: str
    counted: bool
    seconds: float = 20.0
    least: int = 3
    rounds: int = 1
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (0.1,)
    target: float = 0.99
    timeout: float = 600.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        values = json.loads(text)
        return Job(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
