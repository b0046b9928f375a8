"""EF14: classical error feedback. Downlink messages are dense.

Seide, Fu, Droppo, Li, Yu: "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014.
"""

from recipes.two_direction.methods.compressed import CompressedMethod


class EF14(CompressedMethod):
    """Error feedback: the residual e_i of a message is added to the worker's next message."""

    def _start(self) -> None:
        self.e_i = self._zero_rows()

    def _iterate(self, t: int) -> None:
        wanted = self.e_i + self.gamma * self.gradients_at(self.x)
        c, mean_c = self.server.uplink(wanted, self.up, t)  # c_i = C(e_i + gamma grad f_i(x))
        self.e_i = wanted - c  # e_i + gamma grad f_i(x) - c_i
        self.x = self.server.down(self.x - mean_c)
