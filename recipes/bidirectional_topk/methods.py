"""The compared methods: TopK on the uplink, on the downlink, on both, or on neither."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """Which directions are compressed.

    Attributes:
        up: whether each worker sends the K largest entries of its gradient plus its residual.
        down: whether the server sends the K largest entries of the mean plus its residual.
    """

    up: bool
    down: bool

    def spec(self, ratio: float, selection: str = "exact") -> str:
        """Return the method as torchcomp's spec string, for K = ``ratio`` times d."""
        topk = f'topk({ratio:g}, scope="model")'
        if self.down:
            return (
                f'bidirectional({topk if self.up else "identity"}, {topk}, selection="{selection}")'
            )
        # Both routes of error feedback give the same result. The all-gather is faster to simulate.
        return f'ef({topk}, exchange="allgather")' if self.up else "mean"


METHODS = {
    "dense": Method(up=False, down=False),
    "unidirectional": Method(up=True, down=False),
    "bidirectional": Method(up=True, down=True),
    "downlink only": Method(up=False, down=True),
}
