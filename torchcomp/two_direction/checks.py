"""Checks of compressors and of the symbols of the theory, which all methods and papers share.

smoothness L of f, lmax of all f_i; mu: strong convexity; d coordinates, n workers; omega: variance
of the workers' compressor; alpha: contraction of the server's; gamma: step size, lbar its inverse;
p: probability of the coin; tau, beta: momenta.
"""

from collections.abc import Callable

from torchcomp.compressors import Compressor
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.specs.checks import (
    check_at_least_0,
    check_count,
    check_fraction,
    check_positive,
    is_number,
)
from torchcomp.specs.errors import SpecError

# Symbol -> the check of its range. mu is missing, because its range depends on the smoothness.
_RANGES: dict[str, Callable[[str, object], None]] = {
    **dict.fromkeys(("smoothness", "lmax", "gamma0", "lbar", "constant"), check_positive),
    **dict.fromkeys(("alpha", "beta", "p", "tau"), check_fraction),
    **dict.fromkeys(("d", "n"), check_count),
    "omega": check_at_least_0,
}


def check_symbols(**values: float) -> None:
    """Require symbols of the theory to be in their ranges. For mu, see :func:`check_convexity`."""
    for name, value in values.items():
        _RANGES[name](name, value)


def check_convexity(mu: float, smoothness: float, name: str) -> None:
    """Require 0 <= mu <= smoothness. `name` is the name of the upper bound in the error."""
    if not is_number(mu) or not 0 <= mu <= smoothness:
        raise SpecError(
            f"mu must be at least 0 and at most {name} = {smoothness:g}, because the strong "
            f"convexity of a function cannot exceed its smoothness; got {mu!r}",
            "mu",
        )


# Kind of a compressor -> the method that returns its constant, and advice for the error.
_KINDS = {
    "unbiased": (
        "omega",
        "the expectation of this message must be the vector itself, because no residual corrects "
        "it later. Use, for example, randk(0.1, unbiased=True)",
    ),
    "contractive": (
        "alpha",
        "later messages send what this one leaves out, and that converges only if "
        "|C(x) - x| < |x|. Use, for example, topk(0.1)",
    ),
}


def require(kind: str, compressor: Compressor, d: int, role: str) -> float:
    """Return the constant that a compressor of this kind declares for vectors of `d` elements.

    `kind` is "unbiased" (omega) or "contractive" (alpha), `role` the argument's name in the error.
    """
    if not isinstance(compressor, Compressor):
        raise SpecError(f"{role} must be a compressor such as TopK(k=65), not {compressor!r}", role)
    constant, advice = _KINDS[kind]
    declared: float | None = getattr(compressor, constant)(d)
    if len(compressor.stages) > 1:
        problem = (
            "changes during a run, and the theory is for one compressor; leave out warmup(...)"
        )
    elif compressor.per_tensor:
        problem = (
            "compresses each parameter separately, but here all parameters are one vector; remove "
            'scope="tensor"'
        )
    elif isinstance(compressor, Sparsifier) and compressor.k is not None and compressor.k > d:
        problem = f"keeps {compressor.k} entries, and there are only {d} coordinates"
    elif declared is None:
        problem = f"is not {kind} (it declares no {constant}); {advice}"
    else:
        return declared
    raise SpecError(f"{role}: '{compressor}' {problem}", role)
