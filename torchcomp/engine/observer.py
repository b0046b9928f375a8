"""Observer: what may watch the steps of an averager. The averager does not know what it is."""

from collections.abc import Collection, Mapping

from torchcomp.aggregators.base import Aggregator
from torchcomp.engine.bucket import Bucket


class Observer:
    """An object that an averager tells about its steps, if it is one of its ``observers``.

    All ranks have the same observers. They can therefore use the collectives of the averager's
    exchange in `begin`, `finishing` and `finished`.
    """

    def begin(self, ratios: Mapping[str, float]) -> None:
        """A step begins. `ratios`: by parameter, what the residual was multiplied by since."""

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        """Read a bucket that `method` is about to average."""

    def after(self, bucket: Bucket, method: Aggregator) -> None:
        """Read a bucket that `method` has averaged."""

    def finishing(self) -> None:
        """All buckets are averaged. An error that is raised here fails the step on all ranks."""

    def finished(self, counts: bool, unchanged: Collection[str]) -> None:
        """The step has ended. It left the state of the parameters `unchanged` as it was."""

    def changed(self) -> None:
        """The next step does not continue the last one: the state or the ranks have changed."""

    def settle(self) -> None:
        """Wait for what is on its way, and judge it. Here, and only here, tell the user."""
