# PLACEHOLDER by the integrator until the helper's version lands: overwrite me.
import numpy as np, torch


class Warm:
    pass


def largest(x, k, warm=None):
    if k in (0, x.numel()):
        return torch.arange(k)
    m = x.detach().abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    w = m.to(torch.promote_types(m.dtype, torch.float32)).numpy()
    t = np.partition(w, -k)[-k]
    a = np.flatnonzero(w > t)
    b = np.flatnonzero(w == t)[: k - a.size]
    return torch.from_numpy(np.sort(np.concatenate([a, b])))


def add_and_select(g, e, out, k, warm=None):
    torch.add(g, e, out=out)
    return largest(out, k)
