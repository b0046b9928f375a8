"""What the methods require of their compressors, and of the numbers of their theory.

Symbols of the theory, the same in all methods and papers here:

- smoothness is L of f; lmax the largest smoothness of an f_i; mu the strong convexity of f
- d coordinates, n workers
- omega: relative variance of the compressor up; alpha: contraction constant of that down
- gamma: step size; lbar: its inverse; p: probability of a coin; tau, beta: momenta
"""

from collections.abc import Callable

from torchcomp.checks import (
    check_at_least_0,
    check_count,
    check_fraction,
    check_positive,
    is_number,
)
from torchcomp.compressors import Compressor
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.errors import SpecError

_RANGES: dict[str, Callable[[str, object], None]] = {
    **dict.fromkeys(("smoothness", "lmax", "gamma", "gamma0", "lbar", "constant"), check_positive),
    **dict.fromkeys(("alpha", "beta", "p", "tau"), check_fraction),
    **dict.fromkeys(("d", "n"), check_count),
    "omega": check_at_least_0,
}


def check_symbols(**values: float) -> None:
    """Require symbols of the theory to lie in their ranges; mu has :func:`check_convexity`."""
    for name, value in values.items():
        _RANGES[name](name, value)


def check_convexity(mu: float, smoothness: float, name: str) -> None:
    """Require 0 <= mu <= smoothness, where `name` says what the latter is called."""
    if not is_number(mu) or not 0 <= mu <= smoothness:
        raise SpecError(
            f"mu must be at least 0 and at most {name} = {smoothness:g}, because no function is "
            f"more convex than smooth; not {mu!r}",
            "mu",
        )


_KINDS = {
    "unbiased": (
        "omega",
        "this message must be right in expectation, because nothing corrects it later. Take for "
        "example randk(0.1, unbiased=True)",
    ),
    "contractive": (
        "alpha",
        "what this message leaves out is sent later, which converges only if |C(x) - x| < |x|. "
        "Take for example topk(0.1)",
    ),
}


def require(kind: str, compressor: Compressor, d: int, role: str) -> float:
    """What an unbiased (omega) or contractive (alpha) compressor of `d` elements declares."""
    if not isinstance(compressor, Compressor):
        raise SpecError(f"{role} must be a compressor such as topk(k=65), not {compressor!r}", role)
    constant, advice = _KINDS[kind]
    declared: float | None = getattr(compressor, constant)(d)
    if compressor.per_tensor:
        problem = (
            "works on each parameter by itself, and here all of them are one vector; leave "
            'scope="tensor" out'
        )
    elif isinstance(compressor, Sparsifier) and compressor.k is not None and compressor.k > d:
        problem = f"keeps {compressor.k} entries, and there are only {d} coordinates"
    elif declared is None:
        problem = f"is not {kind} (it declares no {constant}); {advice}"
    else:
        return declared
    raise SpecError(f"{role}: '{compressor}' {problem}", role)
