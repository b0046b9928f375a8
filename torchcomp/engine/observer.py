"""Observer: what may watch the steps of an averager. The averager does not know what it is."""

from collections.abc import Collection, Mapping

from torchcomp.aggregators.base import Aggregator
from torchcomp.engine.bucket import Bucket


class Observer:
    """An object that an averager tells about its steps, if it is its ``observer``.

    A subclass overrides what it wants to know.

    All ranks have the same observer. It can therefore use the collectives of the averager's
    exchange in `begin`, `finishing` and `finished`.
    """

    def begin(self, ratios: Mapping[str, float]) -> None:
        """A step begins. The last one is settled.

        Args:
            ratios: by parameter name, what the residual was multiplied by since the last step.
        """

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        """Read a bucket that `method` is about to average."""

    def after(self, bucket: Bucket, method: Aggregator) -> None:
        """Read a bucket that `method` has averaged."""

    def finishing(self) -> None:
        """All buckets are averaged. An error that is raised here fails the step on all ranks."""

    def finished(self, counts: bool, unchanged: Collection[str]) -> None:
        """The step has ended.

        Args:
            counts: whether it counts, as far as that is known.
            unchanged: names of the parameters whose state stays as it was before the step.
        """

    def changed(self) -> None:
        """The next step does not continue the last one: the state or the ranks have changed."""

    def settle(self) -> None:
        """Wait for what is on its way, and judge it. Not called inside a step.

        Here, and only here, the user may be told, within
        :meth:`~torchcomp.engine.settlement.Steps.tell`.
        """


class Both(Observer):
    """Two observers of one averager: `first` is told before `second`."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._each = first, second

    def begin(self, ratios: Mapping[str, float]) -> None:
        for each in self._each:
            each.begin(ratios)

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        for each in self._each:
            each.before(bucket, method)

    def after(self, bucket: Bucket, method: Aggregator) -> None:
        for each in self._each:
            each.after(bucket, method)

    def finishing(self) -> None:
        for each in self._each:
            each.finishing()

    def finished(self, counts: bool, unchanged: Collection[str]) -> None:
        for each in self._each:
            each.finished(counts, unchanged)

    def changed(self) -> None:
        for each in self._each:
            each.changed()

    def settle(self) -> None:
        for each in self._each:
            each.settle()
