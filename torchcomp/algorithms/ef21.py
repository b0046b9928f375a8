"""EF21: error feedback by compressed differences of gradients; dense on the way down.

Richtarik, Sokolov, Fatkhullin: "EF21: A New, Simpler, Theoretically Better, and Practically Faster
Error Feedback", NeurIPS 2021 (arXiv 2106.05203), Algorithm 2.
"""

from torchcomp.algorithms.method import CompressedMethod


class EF21(CompressedMethod):
    """EF21; the g_i start at 0, so that the first messages are compressed gradients."""

    def _start(self, declared: float) -> None:
        self.g_i = self._zero_rows()
        self.g = self.g_i[0]

    def _iterate(self, t: int) -> None:
        c, mean_c = self.server.uplink(self.gradients_at(self.x) - self.g_i, self.up, t)
        self.g_i = self.g_i + c
        self.g = self.g + mean_c
        self.x = self.server.down(self.x - self.gamma * self.g)
