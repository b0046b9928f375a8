"""What the methods require of their compressors."""

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
    """The alpha that a compressor declares for vectors of `d` elements; raises as for unbiased."""
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


def _require_usable(compressor: Compressor, d: int, role: str) -> None:
    problem = ""
    if not isinstance(compressor, Compressor):
        raise SpecError(f"{role} must be a compressor such as topk(k=65), not {compressor!r}", role)
    if compressor.per_tensor:
        problem = (
            "works on each parameter by itself, and here all of them are one vector; leave "
            'scope="tensor" out'
        )
    elif isinstance(compressor, Sparsifier) and compressor.k is not None and compressor.k > d:
        problem = f"keeps {compressor.k} entries, and there are only {d} coordinates"
    if problem:
        raise SpecError(f"{role}: '{compressor}' {problem}", role)
