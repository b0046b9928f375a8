"""The methods as their papers print them: plain loops over all workers, to read and to compare.

Nothing here imports the rest of torchcomp, which the tests compare with these forms. Symbols and
line numbers are the papers'.

A history is ``gradients[t][i][name]``: of step t, worker i and parameter. Functions of a history
return the means that all workers apply, ``means[t][name]``, and the state of the workers at the
end, ``state[i][name]``. Tensors keep the dtype of the gradients: float64 in most tests.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Named = dict[str, Tensor]
History = Sequence[Sequence[Mapping[str, Tensor]]]
Weights = list[Tensor]

Compress = Callable[[Tensor, int, str], Tensor]
"""A compressor C(x, t, name): what is sent of a tensor x in step t, with zeros elsewhere."""

# --- Compressed gradients -------------------------------------------------------------------------


def top(x: Tensor, k: int) -> Tensor:
    """TopK: the k largest magnitudes of `x`, of equal ones those with the lowest index."""
    flat = x.flatten()
    kept = flat.abs().sort(descending=True, stable=True).indices[:k]
    sent = torch.zeros_like(flat)
    sent[kept] = flat[kept]
    return sent.view_as(x)


def top_share(share: float) -> Compress:
    """TopK with k = share * n of n elements, rounded up; at least 1."""
    # Round first: 0.07 * 100 is slightly more than 7 in floating point.
    return lambda x, t, name: top(x, max(1, math.ceil(round(share * x.numel(), 9))))


def error_feedback(gradients: History, compress: Compress) -> tuple[list[Named], list[Named]]:
    """Error feedback: Seide, Fu, Droppo, Li, Yu, "1-bit stochastic gradient descent", 2014.

    Returns the means of all steps, and the residuals e_i of all workers at the end.
    """
    means = []
    e = _zeros(gradients)
    for t, step in enumerate(gradients):
        mean = {name: torch.zeros_like(g) for name, g in step[0].items()}
        for e_i, g_i in zip(e, step, strict=True):
            for name, g in g_i.items():
                sent = compress(g + e_i[name], t, name)
                e_i[name] = g + e_i[name] - sent
                mean[name] = mean[name] + sent
        means.append({name: total / len(step) for name, total in mean.items()})
    return means, e


def bidirectional(
    gradients: History, up: Compress, down: Compress
) -> tuple[list[Named], list[Named], Named]:
    """Bidirectional TopK with weights 1/N: Zou, MMath thesis, Waterloo 2022 (arXiv 2209.15203).

    Here, the learning rate is outside the residuals. Returns the downlink messages of all steps,
    and the residuals at the end: eps_q of all workers, and delta of the server.
    """
    uplinks, eps = error_feedback(gradients, up)
    delta = {name: torch.zeros_like(mean) for name, mean in uplinks[0].items()}
    means = []
    for t, uplink in enumerate(uplinks):
        s = {name: mean + delta[name] for name, mean in uplink.items()}
        means.append({name: down(s[name], t, name) for name in s})
        delta = {name: s[name] - means[-1][name] for name in s}
    return means, eps, delta


def ef21(gradients: History, compress: Compress) -> tuple[list[Named], list[Named]]:
    """EF21: Richtarik, Sokolov, Fatkhullin, NeurIPS 2021 (arXiv 2106.05203), Algorithm 2.

    Returns the means of all steps, and the estimates g_i of all workers, which start at 0.
    """
    estimates, means = _zeros(gradients), []
    for t, step in enumerate(gradients):
        for g_i, gradient in zip(estimates, step, strict=True):
            for name in gradient:
                g_i[name] = g_i[name] + compress(gradient[name] - g_i[name], t, name)
        means.append({name: _mean([g_i[name] for g_i in estimates]) for name in estimates[0]})
    return means, estimates


def dgc(
    gradients: History, compress: Compress, momentum: float, *, nesterov: bool = False
) -> tuple[list[Named], list[Named], list[Named]]:
    """Deep Gradient Compression: Lin, Han, Mao, Wang, Dally, ICLR 2018 (arXiv 1712.01887).

    `compress` has the warm-up. Returns the means of all steps, and the residuals v and velocities u
    of all workers at the end.
    """
    residuals, velocities, means = _zeros(gradients), _zeros(gradients), []
    for t, step in enumerate(gradients):
        mean = {name: torch.zeros_like(g) for name, g in step[0].items()}
        for v, u, g_i in zip(residuals, velocities, step, strict=True):
            for name, g in g_i.items():
                u[name] = momentum * u[name] + g
                v[name] = v[name] + (g + momentum * u[name] if nesterov else u[name])
                sent = compress(v[name], t, name)
                mean[name] += sent / len(step)
                v[name], u[name] = (torch.where(sent != 0, 0.0, x[name]) for x in (v, u))
        means.append(mean)
    return means, residuals, velocities


def powersgd(
    gradients: History, rank: int, start: Callable[[str, int, int], Tensor]
) -> tuple[list[Named], list[Named]]:
    """PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019 (arXiv 1905.13727), Algorithms 1 and 2.

    Without momentum. ``start(name, rows, columns)`` is the first Q. Returns the means of all steps,
    and the residuals of all workers at the end.
    """
    residuals, q, means = _zeros(gradients), Named(), []
    for step in gradients:
        mean = {}
        for name in step[0]:
            deltas = [g_i[name] + e_i[name] for g_i, e_i in zip(step, residuals, strict=True)]
            sent = deltas
            mean[name] = _mean(deltas)
            if compresses(deltas[0], rank):
                matrices = [delta.flatten(1) for delta in deltas]
                if name not in q:
                    q[name] = start(name, matrices[0].shape[1], min(rank, *matrices[0].shape))
                p = orthogonalised(_mean([m @ q[name] for m in matrices]))
                own = [m.T @ p for m in matrices]
                q[name] = _mean(own)
                mean[name] = (p @ q[name].T).view_as(deltas[0])
                sent = [(p @ message.T).view_as(deltas[0]) for message in own]
            for e_i, delta, message in zip(residuals, deltas, sent, strict=True):
                e_i[name] = delta - message
        means.append(mean)
    return means, residuals


def compresses(g: Tensor, rank: int) -> bool:
    """Whether P and Q of PowerSGD have fewer elements than the matrix."""
    if g.ndim < 2 or not g.numel():
        return False
    n, m = g.flatten(1).shape
    return (n + m) * min(rank, n, m) < n * m


def orthogonalised(matrix: Tensor) -> Tensor:
    """Gram-Schmidt, column by column; twice is enough for full precision."""
    columns: list[Tensor] = []
    for column in matrix.T:
        for done in columns * 2:
            column = column - (done @ column) * done
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


def _zeros(gradients: History) -> list[Named]:
    return [{name: torch.zeros_like(g) for name, g in own.items()} for own in gradients[0]]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors, torch.zeros_like(tensors[0])) / len(tensors)


# --- Local steps ----------------------------------------------------------------------------------


class Worker(Protocol):
    """One of the K copies: its weights x_k, which change in place, and its optimizer."""

    rank: int

    @property
    def weights(self) -> Weights: ...

    def step(self, t: int, lr: float) -> None: ...


Length = Callable[[int, float], int]
"""H of a round, from the number of steps before it and the learning rate of its first step."""

Synchronise = Callable[[Sequence[Worker], float], None]
"""Ends a round, from the workers and the mean learning rate of its steps."""


def qsr(alpha: float, h_base: int, warmup: int) -> Length:
    """The Quadratic Synchronization Rule: Gu et al., ICLR 2024 (arXiv 2310.14423), equation 2."""
    return lambda t, lr: h_base if t < warmup else max(h_base, math.floor((alpha / lr) ** 2))


def local_sgd(
    crew: Sequence[Worker],
    total: int,
    length: Length,
    lr: Callable[[int], float],
    synchronise: Synchronise,
    skipped: frozenset[tuple[int, int]] = frozenset(),
) -> Iterator[tuple[list[Weights], bool]]:
    """Algorithm 2 of the QSR paper: T = `total` steps with the learning rates ``lr(t)``.

    `synchronise` is :func:`average` in the paper. Workers skip the (rank, t) in `skipped`. Yields,
    after each step, the weights of all workers, and whether they were just averaged.
    """
    t = 0
    while t < total:
        start, end = t, t + min(length(t, lr(t)), total - t)
        while t < end:
            for worker in crew:
                if (worker.rank, t) not in skipped:
                    worker.step(t, lr(t))
            t += 1
            if t == end:
                synchronise(crew, sum(map(lr, range(start, end))) / (end - start))
            yield [[w.clone() for w in worker.weights] for worker in crew], t == end


def average(crew: Sequence[Worker], lr: float) -> None:
    """Give all workers the mean of their weights."""
    share(crew, means_of(crew))


def means_of(crew: Sequence[Worker]) -> Weights:
    """Return the mean of each tensor."""
    columns = zip(*(worker.weights for worker in crew), strict=True)
    return [torch.stack(copies).mean(0) for copies in columns]


def share(crew: Iterable[Worker], weights: Weights) -> None:
    """Give all workers these weights."""
    for worker in crew:
        for mine, w in zip(worker.weights, weights, strict=True):
            mine.copy_(w)


# --- JointSpar ------------------------------------------------------------------------------------

Vector = list[float]
Update = Callable[[Vector, Sequence[bool], Sequence[float]], Vector]
"""The next p, from p, the kept layers and their norms |g_d| before the division by p_d."""


def jointspar(
    gradients: Sequence[Sequence[Sequence[Tensor]]],
    coins: Sequence[Sequence[float]],
    p: Vector,
    update: Update | None,
) -> tuple[list[list[Tensor | None]], list[Vector]]:
    """JointSpar with one set for all workers: Liu, Mozafari, ICML 2022, Algorithms 1 and 2.

    ``gradients[t][i][d]`` are of step t, worker i and layer d; ``coins[t][d]`` are in [0, 1). `p`
    starts as S/D; the first step keeps all layers. `update` is Algorithm 1, :func:`literal` or
    :func:`baseline`, or None. Returns the means of all steps, None for dropped layers, and the p
    that each step was drawn with.
    """
    means, drawn = [], []
    for t, (step, u) in enumerate(zip(gradients, coins, strict=True)):
        q = p if t else [1.0] * len(p)
        kept = [u_d < q_d for u_d, q_d in zip(u, q, strict=True)]  # Z_d ~ Bernoulli(p_d)
        dense = [_mean(layer) for layer in zip(*step, strict=True)]
        means.append([g / q_d if z else None for g, q_d, z in zip(dense, q, kept, strict=True)])
        drawn.append(q)
        if t and update is not None:
            p = update(p, kept, [float(g.norm()) for g in dense])
    return means, drawn


def literal(alpha: float, s: float, p_min: float, bound: float = 0.0) -> Update:
    """Algorithm 1. L is `bound`, or the largest norm seen so far where that is larger."""
    largest = bound

    def update(p: Vector, kept: Sequence[bool], norms: Sequence[float]) -> Vector:
        nonlocal largest
        largest = max([largest, *(g for g, z in zip(norms, kept, strict=True) if z)])
        w = []
        for p_d, z, g in zip(p, kept, norms, strict=True):
            loss = -(g**2) / p_d**2 + largest**2 / p_min**2 if z else 0.0
            w.append(p_d * math.exp(-alpha * loss / p_d))
        return project(w, [1.0] * len(w), s, p_min)

    return update


def baseline(alpha: float, budget: float, p_min: float, costs: Sequence[float]) -> Update:
    """The default rule of torchcomp: lam, a running mean, in place of L^2 / p_min^2."""
    total, weight = 0.0, 0.0

    def update(p: Vector, kept: Sequence[bool], norms: Sequence[float]) -> Vector:
        nonlocal total, weight
        w, seen = [], 0.0
        for p_d, c, z, g in zip(p, costs, kept, norms, strict=True):
            lam = total / weight if weight else 0.0
            r = g**2 / (c * p_d**2 * lam) - 1 if z and lam else 0.0
            w.append(p_d * math.exp(min(1.0, max(-1.0, alpha * r / p_d))))
            seen += g**2 / p_d**2 / budget if z else 0.0
        total, weight = 0.95 * total + 0.05 * seen, 0.95 * weight + 0.05
        return project(w, costs, budget, p_min)

    return update


def project(w: Sequence[float], costs: Sequence[float], budget: float, p_min: float) -> Vector:
    """argmin_q sum c KL(q || w) with sum c q = budget: clip(factor w, p_min, 1), by bisection."""
    low, high = 1e-300, 1e300
    while low * (1 + 1e-15) < high:
        factor = math.sqrt(low) * math.sqrt(high)
        q = [min(1.0, max(p_min, factor * x)) for x in w]
        if factor in (low, high):
            break
        if sum(c * x for c, x in zip(costs, q, strict=True)) < budget:
            low = factor
        else:
            high = factor
    return q


def best_probabilities(
    norms: Sequence[float], budget: float, p_min: float, costs: Sequence[float]
) -> Vector:
    """The p of least variance sum |g_d|^2 / p_d: clip(const |g_d| / sqrt(c_d), p_min, 1)."""
    w = [g / math.sqrt(c) for g, c in zip(norms, costs, strict=True)]
    return project(w, costs, budget, p_min)


def lars(
    x: Tensor,
    v: Tensor,
    g: Tensor,
    options: tuple[float, float, float, float | None],
    p: float = 1.0,
    norm: float | None = None,
) -> tuple[Tensor, Tensor]:
    """LARS: You, Gitman, Ginsburg, 2017 (arXiv 1708.03888), Algorithm 1, on one tensor x.

    `options`: lr, momentum, weight decay, and eta, None for tensors without trust ratio and decay.
    JointSpar-LARS: g was divided by p, and `norm` is a running mean of |g| before. Returns x and v.
    """
    lr, momentum, weight_decay, eta = options
    wd = 0.0 if eta is None else weight_decay
    size, norm = float(x.norm()), float(g.norm()) if norm is None else norm
    ratio = size / (norm + wd * size) if size and norm else 1.0
    trust = 1.0 if eta is None else eta * ratio
    v = momentum * v + lr * trust * (g + wd / p * x)
    return x - v, v


# --- 2Direction -----------------------------------------------------------------------------------


class Theory(NamedTuple):
    """The constants of 2Direction's theory."""

    lbar: float
    mu: float
    p: float
    tau: float
    alpha: float
    beta: float


def learning_rates(gamma: float, theory: Theory) -> tuple[float, float, float]:
    """Gamma', gamma' and theta' of 2Direction's Algorithm 2, which overflows for a large Gamma."""
    lbar, mu, p, tau, alpha, beta = theory
    a, b, c = p * lbar * gamma, p * (lbar + gamma * mu), -(lbar + gamma * mu)
    theta_bar = (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)
    theta = min(theta_bar, 1 / 4 * min(1, alpha / p, tau / p, beta / p))
    step = p * theta * gamma / (1 - p * theta)
    return gamma + step, step, theta


def two_direction(
    gradient: Callable[[int, Tensor], Tensor],
    x: Tensor,
    n: int,
    up: Callable[[Tensor, int, int], Tensor],
    down: Callable[[Tensor, int], Tensor],
    coin: Callable[[int], bool],
    theory: Theory,
    gamma: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """2Direction: Tyurin, Richtarik, NeurIPS 2023 (arXiv 2305.12379), Algorithm 1.

    ``gradient(i, x)`` is that of f_i; ``up(vector, m, i)`` compresses message m of worker i, 2t for
    y of iteration t and 2t + 1 for z; ``down(vector, t)`` the downlink; ``coin(t)`` shows heads.
    Yields after each iteration all vectors by their names, h_i as one matrix, and Gamma.
    """
    lbar, mu, _, tau, _, beta = theory
    workers = range(n)
    h_i = [gradient(i, x) for i in workers]
    h = k = v = _mean(h_i)
    w = z = u = x
    t = 0
    while True:
        total, step, theta = learning_rates(gamma, theory)  # (1)

        def mirror(dual: Tensor, point: Tensor) -> Tensor:
            pulled = (lbar + gamma * mu) * point + mu * step * y - step * dual  # noqa: B023
            return pulled / (lbar + total * mu)  # noqa: B023

        y = theta * w + (1 - theta) * z  # (2)
        m_y = [up(gradient(i, y) - h_i[i], 2 * t, i) for i in workers]  # (3)
        g = h + _mean(m_y)  # (4)
        u = mirror(g, u)  # (5)
        q = mirror(k, w)  # (6)
        w = q + down(u - q, t)  # (7), (11)
        x = theta * u + (1 - theta) * z  # (8)
        if coin(t):  # (9)
            k, z = v, x  # (10)
        m_z = [up(gradient(i, z) - h_i[i], 2 * t + 1, i) for i in workers]  # (12)
        h_i = [h_i[i] + beta * m_z[i] for i in workers]  # (13)
        v = (1 - tau) * v + tau * (h + _mean(m_z))  # (14)
        h = h + beta * _mean(m_z)  # (15)
        gamma, t = total, t + 1
        vectors = {"x": x, "u": u, "v": v, "h": h, "w": w, "z": z, "k": k}
        yield {**vectors, "h_i": torch.stack(h_i), "gamma": gamma}
