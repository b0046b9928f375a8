"""PowerSGD, EF21 and DGC written from their papers: serial loops in float64 over all ranks.

Each function takes the gradients of all ranks, ``gradients[step][rank][name]``. It returns the
means that every step applies, ``means[step][name]``, and the state of the ranks at the end.
"""

import numpy as np
import torch
from torch import Tensor

from torchcomp.keys import Key

Named = dict[str, Tensor]
History = list[list[Named]]


def powersgd(
    gradients: History, rank: int, residual: str = "own"
) -> tuple[list[Named], list[Named]]:
    """Vogels, Karimireddy, Jaggi 2019: Algorithm 1 inside Algorithm 2, without momentum.

    Args:
        gradients: of every step, rank and parameter.
        rank: columns of P and Q.
        residual: the low-rank matrix that a rank subtracts from its matrix to get its residual,
            its "own" or the "mean".

    Returns:
        The means of every step, and the residuals of every rank at the end.
    """
    workers = range(len(gradients[0]))
    residuals = [{name: torch.zeros_like(g) for name, g in own.items()} for own in gradients[0]]
    basis: Named = {}
    means: list[Named] = []
    for step in gradients:
        applied = {}
        for name in step[0]:
            delta = [step[w][name] + residuals[w][name] for w in workers]
            if not compresses(delta[0], rank):
                applied[name] = sum(delta) / len(workers)
                for w in workers:
                    residuals[w][name] = torch.zeros_like(delta[w])
                continue
            matrices = [d.reshape(d.shape[0], -1) for d in delta]
            if name not in basis:
                numbers = Key(0).of_tensor(name).shared().standard_normal
                columns, rows = min(rank, *matrices[0].shape), matrices[0].shape[1]
                basis[name] = torch.from_numpy(numbers((columns, rows))).T
            p = orthogonalized(sum(m @ basis[name] for m in matrices) / len(workers))
            own = [m.T @ p for m in matrices]
            basis[name] = sum(own) / len(workers)
            applied[name] = (p @ basis[name].T).view(delta[0].shape)
            for w in workers:
                message = own[w] if residual == "own" else basis[name]
                residuals[w][name] = delta[w] - (p @ message.T).view(delta[w].shape)
        means.append(applied)
    return means, residuals


def compresses(g: Tensor, rank: int) -> bool:
    """Whether P and Q have fewer elements than the matrix."""
    if g.ndim < 2 or not g.numel():
        return False
    n, m = g.shape[0], g[0].numel()
    return (n + m) * min(rank, n, m) < n * m


def orthogonalized(matrix: Tensor) -> Tensor:
    """Gram-Schmidt, column by column."""
    columns: list[Tensor] = []
    for column in matrix.T:
        for _ in range(2):  # twice is enough for full precision
            for done in columns:
                column = column - (done @ column) * done
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


def ef21(gradients: History, ratio: float) -> tuple[list[Named], list[Named]]:
    """Richtárik, Sokolov, Fatkhullin 2021: Algorithm 2. The estimates start at 0.

    Returns:
        The means of every step, and the estimates of every rank at the end.
    """
    estimates = [{name: torch.zeros_like(g) for name, g in own.items()} for own in gradients[0]]
    means: list[Named] = []
    for step in gradients:
        for s, g in zip(estimates, step, strict=True):
            for name in g:
                s[name] = s[name] + top(g[name] - s[name], ratio)
        means.append(
            {name: sum(s[name] for s in estimates) / len(estimates) for name in estimates[0]}
        )
    return means, estimates


def dgc(
    gradients: History,
    ratio: float,
    momentum: float,
    nesterov: bool = False,
    shares: tuple[float, ...] = (),
) -> tuple[list[Named], list[Named], list[Named]]:
    """Lin, Han, Mao, Wang, Dally 2018: momentum correction and momentum factor masking.

    Args:
        gradients: of every step, rank and parameter.
        ratio: share of the entries that are sent.
        momentum: of the velocity.
        nesterov: as in torch.optim.SGD.
        shares: ratios of the first steps, during the warm-up, one per step.

    Returns:
        The means of every step, and the residuals and velocities of every rank at the end.
    """
    residuals = [{name: torch.zeros_like(g) for name, g in own.items()} for own in gradients[0]]
    velocities = [{name: torch.zeros_like(g) for name, g in own.items()} for own in gradients[0]]
    means: list[Named] = []
    for number, step in enumerate(gradients):
        share = shares[number] if number < len(shares) else ratio
        applied = {name: torch.zeros_like(g) for name, g in step[0].items()}
        for v, u, g in zip(residuals, velocities, step, strict=True):
            for name in g:
                u[name] = momentum * u[name] + g[name]
                v[name] = v[name] + (g[name] + momentum * u[name] if nesterov else u[name])
                sent = top(v[name], share)
                applied[name] += sent / len(step)
                mask = sent != 0
                v[name] = torch.where(mask, 0.0, v[name])
                u[name] = torch.where(mask, 0.0, u[name])
        means.append(applied)
    return means, residuals, velocities


def top(x: Tensor, ratio: float) -> Tensor:
    """Keep the share `ratio` of the largest entries of `x`, at least one, and zero the others."""
    flat = x.flatten().numpy()
    # Round first: 0.07 * 100 is slightly more than 7 in floating point.
    kept = int(np.ceil(round(ratio * flat.size, 9)))
    order = np.argsort(-np.abs(flat), kind="stable")[:kept]
    sent = np.zeros_like(flat)
    sent[order] = flat[order]
    return torch.from_numpy(sent).view(x.shape)
