"""EF14: the classical error feedback; dense on the way down.

Seide, Fu, Droppo, Li, Yu: "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014.
"""

from torchcomp.algorithms.method import CompressedMethod


class EF14(CompressedMethod):
    """Error feedback: what a message leaves out of a step is added to the next one."""

    def _start(self, declared: float) -> None:
        self.e_i = self._zero_rows()

    def _iterate(self, t: int) -> None:
        wanted = self.e_i + self.gamma * self.gradients_at(self.x)
        c, mean_c = self.server.uplink(wanted, self.up, t)
        self.e_i = wanted - c
        self.x = self.server.down(self.x - mean_c)
