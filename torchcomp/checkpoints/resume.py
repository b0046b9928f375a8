"""Resume: save and restore an averager, and compare those of all ranks before the first step."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from torchcomp.aggregators import Aggregator
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.saved_slots import load_slots, save_slots
from torchcomp.engine.method_in_use import FLUSH, MethodInUse
from torchcomp.engine.settlement import Steps
from torchcomp.engine.state import State
from torchcomp.exchange import Exchange


class Resumable(Steps):
    """Steps of one method that can be saved and continued.

    Attributes, beside those of :class:`~torchcomp.engine.settlement.Steps`:
        exchange: the collectives of the ranks.
        parameters: tensors by name, with the shapes, dtypes and devices of what is averaged.
        running: the method that runs, and its buckets.
        seed: seed of the method's random choices.
        aggregator: the method that the user chose; its ``str`` is the spec.
        flushing: whether the residual of another method is sent before :attr:`aggregator` runs.
    """

    exchange: Exchange
    parameters: dict[str, Tensor]
    running: MethodInUse
    seed: int
    aggregator: Aggregator
    flushing: bool = False

    @abstractmethod
    def settle(self) -> None:
        """Decide whether the last step counts, and end what it leaves open."""

    @abstractmethod
    def _changed(self) -> None:
        """Note that another method runs, or with another state."""

    def _compare_ranks(self, lrs: Mapping[str, float]) -> None:
        """Raise RankMismatchError if the ranks differ in what must be the same, such as `lrs`."""
        running, state, exchange = self.running, self.state, self.exchange
        # The scale that the state has, before it follows that of this step.
        values = {"spec": self.aggregator, "step": self.step, "seed": self.seed}
        values |= {"groups": running.groups, "buckets": running.buckets, "flushing": self.flushing}
        values |= {"lr": lrs, "scale": self.units.scale, "checksum": exchange.checksum}
        # Each rank's threshold search starts from the previous thresholds. If they differed, the
        # ranks would run different collectives.
        found = [(name, t.tolist()) for name, t in state.items("thresholds")]
        names = {slot.name for slot in running.slots(exchange) if slot.equal}
        equal = {f"{slot} {name}": part for slot in names for name, part in state.items(slot)}
        digest = checkpoint.digest_of(dict(sorted(equal.items())))
        on_level = {"thresholds": sorted(found), "checksum of equal slots": digest}
        exchange.verify("the first step", values, checkpoint.ONE_STEP, on_level)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: plain tensors, numbers and strings, keyed by parameter name.

        Every rank must save its own. ``torch.load(..., weights_only=True)`` can load it.
        """
        self.settle()
        running = self.running
        with self._lock:
            slots = running.slots(self.exchange)
            return {
                **checkpoint.header(str(self.aggregator), self.exchange),
                "step": self.step,
                "seed": self.seed,
                "scale": self.units.scale,
                "lrs": dict(self.units.lrs),
                "flushing": self.flushing,
                "groups": [list(group) for group in running.groups],
                "buckets": [list(group) for group in running.buckets],
                "parameters": checkpoint.layout_of(self.parameters),
                "traffic": self.meter.state_dict(),
                "slots": save_slots(slots, self.state, self.parameters),
            }

    def prepare(
        self,
        state: Any,
        advice: Mapping[str, str] = checkpoint.ADVICE,
        aggregator: Aggregator | None = None,
    ) -> Callable[[], None]:
        """Check a complete state dict without changing anything.

        Args:
            state: the result of :meth:`state_dict` on this rank.
            advice: what to do if "spec" or "world_size" differs, for the error message.
            aggregator: the method of the state, if the run changes to it.

        Returns:
            A function that restores the state. It restores the groups as well, so the run
            continues bit for bit even if this object was built with other groups.

        Raises:
            CheckpointError: if the state is damaged, or if it belongs to another model, method,
                rank or world size.
        """
        chosen = aggregator or self.aggregator
        checkpoint.check_header(state, str(chosen), self.exchange, advice)
        checkpoint.check_engine(state, self.parameters)
        groups, buckets = (checkpoint.groups_of(state[name]) for name in ("groups", "buckets"))
        # During a flush, the checkpoint has the slots of FLUSH and the spec of the next method.
        method = FLUSH if state["flushing"] else chosen
        declared = self.running.slots(self.exchange, method, buckets)
        slots = load_slots(declared, state, self.parameters, str(chosen))

        def restore() -> None:
            # A step in flight must not outlive the state that it began with.
            self._discard()
            self._flushed = self._taken_back = self._verified = False
            self.state, self.step, self.steps_kept = State(self._lock), state["step"], 0
            for name, (kind, sharded, parts) in slots.items():
                self.state.load(name, kind, sharded, parts)
            self.seed = state["seed"]
            self.units.scale, self.units.lrs = float(state["scale"]), dict(state["lrs"])
            self.meter.load_state_dict(state["traffic"], self.step)
            self.running.groups, self.running.buckets = groups, buckets
            self.aggregator, self.flushing = chosen, state["flushing"]
            self.running.run(method, self.step)
            self._changed()

        return restore

    def load_state_dict(self, state: dict[str, Any], aggregator: Aggregator | None = None) -> None:
        """Restore a state dict, or change nothing on error; see :meth:`prepare`."""
        restore = self.prepare(state, aggregator=aggregator)
        with self._lock:
            restore()
