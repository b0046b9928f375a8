"""2Direction in one process: rates of the theory, messages and their counts, refusals."""

import math

import pytest
import torch

from recipes.two_direction.theory import lbar, priced_probabilities
from tests.support import codecs
from tests.support.codecs import decoded, fields_of, message_of
from tests.two_direction.quadratics import quadratics
from torchcomp.compressors import Identity, RandK, TopK
from torchcomp.engine.keys import Key
from torchcomp.routes import wire
from torchcomp.specs.errors import SpecError
from torchcomp.two_direction import Simulated, TwoDirectionMethod
from torchcomp.two_direction.parameter_server import DENSE
from torchcomp.two_direction.theory import learning_rates

UP, DOWN = RandK(k=3, unbiased=True), TopK(k=3)
F = quadratics()
D = F.b.shape[1]
OMEGA, ALPHA = D / 3 - 1, 3 / D


def two_direction(server=None, f=F, **changes):
    options = {"up": UP, "down": DOWN, "lbar": 4 * f.smoothness, "mu": f.mu, **changes}
    return TwoDirectionMethod(f.gradients, f.x0, server or Simulated(f.n), **options)


def run(method, iterations):
    for _ in range(iterations):
        method.step()
    return method


LONG = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("iterations", "dtype", "reached"),
    [
        (600, torch.float64, 1e-10),
        (600, torch.float32, 1e-10),
        pytest.param(200_000, torch.float64, 1e-25, marks=LONG),
        pytest.param(200_000, torch.float32, 1e-10, marks=LONG),
    ],
)
def test_it_converges_and_stays_there(iterations, dtype, reached):
    a, b, x0 = (tensor.to(dtype) for tensor in (F.a, F.b, F.x0))
    options = {"lbar": 4 * F.smoothness, "mu": F.mu}
    method = TwoDirectionMethod(lambda x: a @ x - b, x0, Simulated(F.n), UP, DOWN, **options)
    run(method, iterations)
    assert method.x.dtype == dtype
    assert F.gap(method.x.double()) < reached * F.gap(F.x0)


class Recorded(Simulated):
    """A simulation that records the bytes of downlink messages."""

    def __init__(self, n, seed=0):
        super().__init__(n, seed)
        self.wires = []

    def down(self, vector, compressor=DENSE, call=0):
        parts = fields_of(compressor, vector, Key(self.seed, call), "downlink")
        layout = compressor.layout(vector.numel(), vector.dtype)
        self.wires.append(message_of(parts, layout))
        return super().down(vector, compressor, call)

    def take(self, compressor, numel, call=0):
        layout = compressor.layout(numel, torch.float64)
        parts = codecs.received(self.wires.pop(0), layout)
        out = torch.empty(numel, dtype=torch.float64)
        return decoded(compressor, parts, out, Key(self.seed, call), "downlink")


def test_a_worker_rebuilds_w_z_and_k_from_messages_alone():
    server = Recorded(F.n)
    coin = [t % 3 == 1 for t in range(200)]
    method = two_direction(server, coin=coin.__getitem__)
    w = z = F.x0
    rho, k = 1.0, server.take(Identity(), D)
    for t, heads in enumerate(coin):
        method.step()
        lr = learning_rates(rho, method.constants)
        y = lr.theta * w + (1 - lr.theta) * z
        w = lr.step(k, w, y) + server.take(DOWN, D, t)
        if heads:
            k, z = server.take(Identity(), D), server.take(Identity(), D)
        rho = lr.rho
        for name, own in {"w": w, "z": z, "k": k}.items():
            assert torch.equal(own, getattr(method, name)), (name, t)
    assert not server.wires


def test_messages_are_unbiased_and_workers_draw_independently():
    server = Simulated(3)
    vectors = torch.randn(3, 30, dtype=torch.float64, generator=torch.manual_seed(0))
    up = RandK(k=4, unbiased=True)
    messages = [server.encode(vectors, up, call) for call in range(4000)]
    drawn = {tuple(row.nonzero().flatten().tolist()) for m in messages[:2] for row in m.decoded}
    assert len(drawn) == 6
    means = torch.stack([server.up(message)[0] for message in messages])
    torch.testing.assert_close(means.mean(0), vectors.mean(0), rtol=0, atol=0.15)


def test_counts():
    method = run(two_direction(Simulated(F.n, 3), p=0.25), 400)
    traffic = method.server.traffic
    # Dense messages show how often the coin was heads.
    tossed, rest = divmod(traffic.down_coordinates - D - 3 * 400, 2 * D)
    assert rest == 0
    assert abs(tossed / 400 - 0.25) < 0.1
    # The last iteration's second uplink message is not sent yet: the next iteration would send it.
    assert traffic.up_coordinates == D + 2 * 3 * 400 - 3
    assert traffic.round_trips == 401
    method.finish_iteration()
    method.finish_iteration()  # the second call does nothing
    assert traffic.up_coordinates == D + 2 * 3 * 400
    # Gradients at z are computed once after z has moved, and then cached.
    assert method.evaluations == 1 + 400 + tossed
    dense, both, single = (wire.framed(8 * count) for count in (D, 2 * 3, 3))
    assert traffic.up_bytes == dense + 399 * both + 2 * single
    kept = wire.framed(wire.nbytes(DOWN.layout(D, torch.float64)))
    assert traffic.down_bytes == 400 * kept + (1 + 2 * tossed) * dense


def test_probabilities():
    # mu_r = 0.5 * 650 / 65 = 5 < omega + 1, so p = 1 / (omega + 1).
    even = priced_probabilities(9.0, d=650, k_up=65, k_down=65, r=0.5)
    assert (even.p, even.tau) == pytest.approx((0.1, 0.1 ** (1 / 3) / 10 ** (2 / 3)))
    # mu_r = 0.9 * 6500 / (0.1 * 650 + 0.9 * 65) = 47.4 > omega + 1, so p = 1 / mu_r.
    dear = priced_probabilities(9.0, d=6500, k_up=650, k_down=65, r=0.9)
    assert dear.p == pytest.approx((65 + 58.5) / 5850)


# In each case another term is the maximum: L/a; L p/(a tau); both square roots; both Lmax.
TERMS = [
    ((0.0, 0.5, 0.1, 1.0), 2.0 / 0.5),
    ((0.0, 0.5, 1.0, 0.1), 2.0 / (0.5 * 0.1)),
    ((3.0, 0.1, 1.0, 1.0), math.sqrt(10 * 3) / (0.1 * 0.25 * 2)),
    ((30.0, 0.1, 0.01, 1.0), math.sqrt(10 * 0.01 * 30) / (0.1 * math.sqrt(4 / 31))),
    ((30.0, 1.0, 1.0, 0.1), 5.0 * 30 * 31**2 / 4),
    ((30.0, 1.0, 0.001, 0.001), 5.0 * 30 / 4),
]


@pytest.mark.parametrize(("case", "expected"), TERMS)
def test_lbar_is_the_largest_of_its_terms(case, expected):
    options = dict(zip(("omega", "alpha", "p", "tau"), case, strict=True))
    assert lbar(2.0, 5.0, n=4, **options) == pytest.approx(660508 * expected)


REFUSED = [
    ({"mu": 40.0}, "mu"),
    ({"lbar": math.inf}, "lbar"),
    ({"p": 1.5}, "p"),
    ({"tau": "much"}, "tau"),
    ({"gamma0": 1e-300}, "gamma0"),
    ({"up": TopK(k=3)}, "up"),
    ({"up": "randk"}, "up"),
    ({"down": UP}, "down"),
    ({"down": TopK(k=3, scope="tensor")}, "down"),
    ({"down": TopK(k=13)}, "down"),
]
CALLS = [
    *((lambda changes=changes: two_direction(**changes), field) for changes, field in REFUSED),
    *((lambda n=n: Simulated(n), "n") for n in (0, 2.0)),
    *(
        (lambda x0=x0: TwoDirectionMethod(F.gradients, x0, Simulated(4), UP, DOWN), "x0")
        for x0 in (torch.zeros(2, 3), torch.zeros(3).int(), torch.zeros(0), [0.0], F.x0 / 0)
    ),
    *(
        (lambda g=g: TwoDirectionMethod(g, F.x0, Simulated(4), UP, DOWN, lbar=4.0, mu=0.0), None)
        for g in (lambda x: None, lambda x: x, lambda x: F.a[:, 0].float())
    ),
]


@pytest.mark.parametrize(("call", "field"), CALLS)
def test_refusals(call, field):
    with pytest.raises(SpecError) as caught:
        call()
    assert caught.value.field == field
