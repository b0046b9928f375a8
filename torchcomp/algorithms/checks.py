"""What the methods ask of their compressors and constants."""

from torchcomp.checks import check_positive, is_number
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


def check_convexity(mu: float, smoothness: float, name: str) -> None:
    """Require 0 <= mu <= smoothness, where `name` says what the latter is called.

    Raises:
        SpecError: naming both.
    """
    if not is_number(mu) or not 0 <= mu <= smoothness:
        raise SpecError(
            f"mu must be at least 0 and at most {name} = {smoothness:g}, because no function is "
            f"more convex than smooth; not {mu!r}",
            "mu",
        )


def check_gamma0(gamma0: float) -> None:
    """Require a Gamma to start with whose square, as the learning rates take it, is a number.

    Raises:
        SpecError: naming it.
    """
    check_positive("gamma0", gamma0)
    if not 1e-100 <= gamma0 <= 1e100:
        raise SpecError(
            f"gamma0 must lie from 1e-100 to 1e100, because the learning rates square it; not "
            f"{gamma0!r}",
            "gamma0",
        )


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
