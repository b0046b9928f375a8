"""The messages: their draws are independent, and workers need only the messages."""

import torch

from tests.support import codecs
from tests.support.codecs import decoded, fields_of, message_of
from tests.two_direction.quadratics import quadratics
from torchcomp.compressors import Identity, RandK, TopK
from torchcomp.keys import Key
from torchcomp.two_direction import Simulated, TwoDirectionMethod
from torchcomp.two_direction.parameter_server import DENSE
from torchcomp.two_direction.theory import learning_rates

F = quadratics(n=3, d=30)
UP, DOWN = RandK(k=4, unbiased=True), TopK(k=5)


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
    options = {"lbar": 4.0, "mu": F.mu, "coin": coin.__getitem__}
    method = TwoDirectionMethod(F.gradients, F.x0, server, UP, DOWN, **options)
    w = z = F.x0
    rho, k = 1.0, server.take(Identity(), 30)
    for t, heads in enumerate(coin):
        method.step()
        lr = learning_rates(rho, method.constants)
        y = lr.theta * w + (1 - lr.theta) * z
        w = lr.step(k, w, y) + server.take(DOWN, 30, t)
        if heads:
            k, z = server.take(Identity(), 30), server.take(Identity(), 30)
        rho = lr.rho
        for name, own in {"w": w, "z": z, "k": k}.items():
            assert torch.equal(own, getattr(method, name)), (name, t)
    assert not server.wires


def test_workers_draw_independently_of_each_other_and_of_other_messages():
    server = Simulated(3)
    ones = torch.ones(3, 30, dtype=torch.float64)
    supports = {
        tuple(row.nonzero().flatten().tolist())
        for call in (0, 1)
        for row in server.encode(ones, UP, call).decoded
    }
    assert len(supports) == 6


def test_the_mean_is_unbiased():
    server = Simulated(3)
    vectors = torch.randn(3, 30, dtype=torch.float64, generator=torch.manual_seed(0))
    means = [server.up(server.encode(vectors, UP, call))[0] for call in range(4000)]
    torch.testing.assert_close(torch.stack(means).mean(0), vectors.mean(0), rtol=0, atol=0.15)


def test_runs_repeat_and_seeds_differ():
    def end(seed):
        method = TwoDirectionMethod(
            F.gradients, F.x0, Simulated(F.n, seed), UP, DOWN, lbar=4.0, mu=F.mu
        )
        for _ in range(20):
            method.step()
        return method.solution

    assert torch.equal(end(1), end(1))
    assert not torch.equal(end(1), end(2))
