"""What the methods ask of their numbers and compressors."""

import math
from numbers import Real

from torchcomp.compressors import Compressor
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.errors import SpecError


def require_unbiased(compressor: Compressor, d: int, role: str) -> float:
    """The omega that a compressor declares for vectors of `d` elements.

    Raises:
        SpecError: if it is not unbiased, keeps more than `d` entries, or does not work on the
            whole vector.
    """
    _require_usable(compressor, d, role)
    omega = compressor.omega(d)
    if omega is None:
        raise SpecError(
            f"{role}: '{compressor}' is not unbiased (it declares no omega); this message must be "
            "right in expectation, because nothing corrects it later. Take for example "
            "randk(0.1, unbiased=True)",
            role,
        )
    return omega


def require_contractive(compressor: Compressor, d: int, role: str) -> float:
    """The alpha that a compressor declares for vectors of `d` elements.

    Raises:
        SpecError: if it is not contractive, keeps more than `d` entries, or does not work on the
            whole vector.
    """
    _require_usable(compressor, d, role)
    alpha = compressor.alpha(d)
    if alpha is None:
        raise SpecError(
            f"{role}: '{compressor}' is not contractive (it declares no alpha); what this message "
            "leaves out is sent later, which converges only if |C(x) - x| < |x|. Take for example "
            "topk(0.1)",
            role,
        )
    return alpha


def check_positive(name: str, value: float) -> None:
    """Require a finite number above zero.

    Raises:
        SpecError: naming it and its value.
    """
    if not _number(value) or not 0 < value < math.inf:
        raise SpecError(f"{name} must be a finite number above 0, not {value!r}", name)


def check_at_least_0(name: str, value: float) -> None:
    """Require a finite number that is not negative.

    Raises:
        SpecError: naming it and its value.
    """
    if not _number(value) or not 0 <= value < math.inf:
        raise SpecError(f"{name} must be a finite number of at least 0, not {value!r}", name)


def check_count(name: str, value: int, most: float = math.inf) -> None:
    """Require a whole number from 1 to `most`.

    Raises:
        SpecError: naming it and its value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        least = "of at least 1" if most == math.inf else f"from 1 to {most:g}"
        raise SpecError(f"{name} must be a whole number {least}, not {value!r}", name)


def check_fraction(name: str, value: float) -> None:
    """Require a number above 0 and at most 1.

    Raises:
        SpecError: naming it and its value.
    """
    if not _number(value) or not 0 < value <= 1:
        raise SpecError(f"{name} must be above 0 and at most 1, not {value!r}", name)


def check_convexity(mu: float, smoothness: float, name: str) -> None:
    """Require 0 <= mu <= smoothness, where `name` says what the latter is called.

    Raises:
        SpecError: naming both.
    """
    if not _number(mu) or not 0 <= mu <= smoothness:
        raise SpecError(
            f"mu must be at least 0 and at most {name} = {smoothness:g}, because no function is "
            f"more convex than smooth; not {mu!r}",
            "mu",
        )


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _require_usable(compressor: Compressor, d: int, role: str) -> None:
    if not isinstance(compressor, Compressor):
        raise SpecError(f"{role} must be a compressor such as topk(k=65), not {compressor!r}", role)
    if compressor.per_tensor:
        raise SpecError(
            f"{role}: '{compressor}' works on each parameter by itself, and here all of them are "
            'one vector; leave scope="tensor" out',
            role,
        )
    if isinstance(compressor, Sparsifier) and compressor.k is not None and compressor.k > d:
        raise SpecError(
            f"{role}: '{compressor}' keeps {compressor.k} entries, and there are only {d} "
            "coordinates",
            role,
        )
