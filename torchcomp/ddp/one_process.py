"""OfOneProcess: what the hooks of a model refer to, and what cannot leave its process."""

from typing import Any, NoReturn


class OfOneProcess:
    """Base of objects that belong to a process group.

    A copy of a model lists the hooks of the model as well, so all copies share these objects.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "OfOneProcess":
        return self

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a handle cannot be pickled, because it belongs to its process and process group. Save "
            "handle.state_dict() instead, and model.module.state_dict() for the model"
        )
