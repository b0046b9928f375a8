"""EF21: error feedback with compressed gradient differences. Downlink messages are dense.

Richtarik, Sokolov, Fatkhullin: "EF21: A New, Simpler, Theoretically Better, and Practically Faster
Error Feedback", NeurIPS 2021 (arXiv 2106.05203), Algorithm 2.
"""

from recipes.two_direction.methods.compressed import CompressedMethod


class EF21(CompressedMethod):
    """EF21. Worker i keeps an estimate g_i of its gradient, and the server keeps their mean g."""

    def _start(self) -> None:
        self.g_i = self._zero_rows()
        self.g = self.g_i[0]  # the mean of the g_i: zeros

    def _iterate(self, t: int) -> None:
        # c_i = C(grad f_i(x) - g_i)
        c, mean_c = self.server.uplink(self.gradients_at(self.x) - self.g_i, self.up, t)
        self.g_i = self.g_i + c  # on worker i
        self.g = self.g + mean_c  # on the server: stays the mean of the g_i
        self.x = self.server.down(self.x - self.gamma * self.g)
