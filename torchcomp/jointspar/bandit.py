"""The bandit of JointSpar: learn from the gradient norms of kept layers how often to keep them.

Liu, Mozafari, ICML 2022, Algorithms 1 and 2. The costs and the rule `Baseline` are ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchcomp.checkpoints.checkpoint import count, list_of, number, record, require
from torchcomp.engine.keys import Key
from torchcomp.specs.checks import check_positive

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

_LEVEL_DECAY = 0.95  # weight of the old value in the moving average that is the baseline lam
_LARGEST_NORM = 1e100  # larger norms count as this one: |g|^2 / p^2 might not be finite in float64

# Ranks on different processors must compute equal probabilities. The last digit of NumPy's exp, log
# and @ depends on the processor's vector instructions, that of these three does not.
_exp, _log = (np.vectorize(function, otypes=[np.float64]) for function in (math.exp, math.log))


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum((a * b).tolist())


FORM = record(p=list_of(number), largest=number, average=number, updates=count)


@dataclass(frozen=True)
class Baseline:
    """The default update, which learns within runs of practical length.

    With Z = 1 for the layers kept, else 0, gradients g, costs c and budget C, one update is:

    1. r_d = Z_d (|g_d|^2 / (c_d p_d^2 lam) - 1)
    2. u = log p + clip(alpha r / p, -1, 1)
    3. p = kl_project(u, C, p_min, c)
    4. lam <- 0.95 lam + 0.05 (1/C) sum over the kept layers of |g_d|^2 / p_d^2

    The moving average lam, bias-corrected as in Adam, replaces the constant L^2 / p_min^2 of the
    paper's rule. At the optimum |g_d|^2 / (c_d p_d^2) equals lam for all layers, so r has mean 0.

    Args:
        alpha: step size, above 0. Start with 0.01; values from 0.003 to 0.03 work.
    """

    alpha: float = 0.01

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    def exponent(self, bandit: "Bandit", kept: Mask, norms: Vector) -> Vector:
        p, level = bandit.p, bandit.level
        if level == 0:
            return np.zeros(len(p))  # no step has had a norm above 0 yet
        # Line 1.
        reward = np.where(kept, norms**2 / (bandit.costs * p**2 * level) - 1, 0.0)
        # Line 2. The clip limits what one large norm at a small p can do to a factor of e.
        return np.asarray(np.clip(self.alpha * reward / p, -1.0, 1.0))


BASELINE = Baseline()  # the default rule


@dataclass(frozen=True)
class Literal:
    """Algorithm 1 as the paper states it. It counts layers: all costs are 1.

    1. l_d = -|g_d|^2 / p_d^2 + L^2 / p_min^2 for the layers kept, else 0
    2. w_d = p_d exp(-alpha_p l_d / p_d)
    3. p = argmin KL(q || w) over {sum q = S, p_min <= q_d <= 1}

    The constant L^2 / p_min^2 penalises every kept layer: p hardly learns in thousands of steps.

    Args:
        alpha: step size alpha_p, above 0, in units of 1 / |g|^2.
        bound: lower limit of L, above 0, in units of |g|. L is the largest |g_d| seen so far, or
            `bound` where that is larger. None sets no limit.
    """

    alpha: float
    bound: float | None = None

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        if self.bound is not None:
            check_positive("bound", self.bound)

    def exponent(self, bandit: "Bandit", kept: Mask, norms: Vector) -> Vector:
        p, bound = bandit.p, max(bandit.largest, min(self.bound or 0.0, _LARGEST_NORM))
        # Lines 1 and 2. Stay in the log domain, because the exponent can be huge.
        loss = np.where(kept, bound**2 / bandit.p_min**2 - norms**2 / p**2, 0.0)
        return np.asarray(-self.alpha * loss / p)


class Bandit:
    """Keep probabilities p, float64 (D,), updated by online mirror descent (Algorithm 1).

    All layers start at C / sum c, with costs c, (D,) and above 0, and a budget C, from p_min sum(c)
    to sum(c). p approaches clip(const |g_d| / sqrt(c_d), p_min, 1) with sum c p = C, which
    minimises the variance sum |g_d|^2 / p_d of the estimate g_d / p_d.
    """

    def __init__(
        self, costs: ArrayLike, budget: float, p_min: float, rule: Baseline | Literal | None = None
    ) -> None:
        self.costs = np.asarray(costs, dtype=np.float64)
        self.budget, self.p_min, self.rule = budget, p_min, rule or BASELINE
        self.p = np.full(len(self.costs), min(1.0, budget / float(self.costs.sum())))
        self.largest, self._average, self._updates = 0.0, 0.0, 0

    @property
    def level(self) -> float:
        """The bias-corrected baseline lam, or 0 before the first update."""
        return self._average / (1 - _LEVEL_DECAY**self._updates) if self._updates else 0.0

    def update(self, kept: Mask, norms: ArrayLike) -> None:
        """Update p from the layers that a step kept, (D,), and their |g_d| before 1 / p, (D,)."""
        # Gradients of dropped layers were not computed: their entries are ignored, and can be NaN.
        norms = np.where(kept, np.asarray(norms, dtype=np.float64), 0.0).clip(max=_LARGEST_NORM)
        self.largest = max(self.largest, float(norms.max()))
        exponent = self.rule.exponent(self, kept, norms)
        seen = math.fsum((norms**2 / self.p**2).tolist()) / self.budget
        self.p = kl_project(_log(self.p) + exponent, self.budget, self.p_min, self.costs)
        # After its use: within a step, lam must not depend on the layers that the step drew.
        self._average = _LEVEL_DECAY * self._average + (1 - _LEVEL_DECAY) * seen
        self._updates += 1

    def state_dict(self) -> dict[str, Any]:
        seen = {"largest": self.largest, "average": self._average, "updates": self._updates}
        return {"p": self.p.tolist(), **seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, or raise CheckpointError and change nothing."""
        FORM(state, "bandit")
        p = np.array(state["p"], dtype=np.float64)
        # kl_project meets the budget to float64 rounding, so 1e-6 rejects no valid state.
        fits = len(p) == len(self.p) and math.isclose(self.costs @ p, self.budget, rel_tol=1e-6)
        fits = fits and bool(((self.p_min * (1 - 1e-9) <= p) & (p <= 1 + 1e-9)).all())
        require(fits, "bandit.p", f"{len(self.p)} probabilities of this budget", state["p"])
        self.p, self.largest = p, state["largest"]
        self._average, self._updates = state["average"], state["updates"]


def sample(p: Vector, key: Key, *, shared: bool = True) -> Mask:
    """Draw the set S_t of Algorithm 2. It depends on the rank of `key` unless it is shared."""
    generator = key.shared() if shared else key.private()
    return np.asarray(generator.random(len(p)) < p)


def kl_project(u: ArrayLike, budget: float, p_min: float, costs: ArrayLike | None = None) -> Vector:
    """Project the weights exp(u) onto the set {sum c q = budget, p_min <= q <= 1}.

    It minimises the sum of c_d KL(q_d || exp(u_d)), with costs c of 1 as in Algorithm 1. The
    minimiser q = clip(exp(u + tau), p_min, 1), float64 (D,), with one tau for all entries, is
    exact, also at abs(u) = 1e5, and the same on all processors.
    """
    u = np.asarray(u, dtype=np.float64)
    costs = np.ones(len(u)) if costs is None else np.asarray(costs, dtype=np.float64)
    size, log_p_min = len(u), math.log(p_min)
    # 1. sum c q grows with tau. At 2 D break points it changes its formula: q_d leaves p_min at
    #    tau = log p_min - u_d and reaches 1 at tau = -u_d.
    order = np.argsort(np.concatenate([log_p_min - u, -u]), kind="stable")

    def log_q(position: int) -> Vector:
        reached, d = divmod(order[position], size)
        bound = 0.0 if reached else log_p_min
        # The difference first: added to a u of 1e5, the bound would be rounded away.
        return np.asarray(np.clip((u - u[d]) + bound, log_p_min, 0.0))

    # 2. Bisection finds the two neighbouring break points around tau. At the first one all entries
    #    are p_min, at the last one all are 1, so the budget lies between them.
    low, high = 0, 2 * size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if _dot(costs, _exp(log_q(middle))) <= budget:
            low = middle
        else:
            high = middle
    # 3. An entry that is at the same bound at both points is at it in between. The others are
    #    exp(u + tau), and share the remaining budget in proportion to exp(u): no tau is needed.
    q, free = _exp(log_q(low)), log_q(low) < log_q(high)
    if free.any():
        remaining = budget - _dot(costs[~free], q[~free])
        weights = _exp(u[free] - u[free].max())  # exp(u) itself would overflow at u = 1e5
        q[free] = remaining * weights / _dot(costs[free], weights)
    return np.asarray(np.clip(q, p_min, 1.0))  # rounding can put an entry just beyond its bound
