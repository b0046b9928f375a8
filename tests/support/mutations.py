"""State dicts with one change, and what a load makes of them."""

import copy
import math
import warnings
from io import BytesIO

import torch

from tests.support.outcomes import same
from torchcomp import CheckpointError

GIANT = 2**70


class Foreign: ...


def of_any(value):
    yield from (None, True, -1, 7, 2.5, math.nan, math.inf, GIANT, 1e-300, "text", 1j, Foreign())
    yield from ([], {}, (1,), {"text": 1}, torch.zeros(()), torch.zeros(3))


def of_dict(value):
    for key in value:
        yield {k: v for k, v in value.items() if k != key}
    yield {**value, "extra": copy.copy(next(iter(value.values()), 1))}
    yield {**value, 5: 1}


def of_list(value):
    yield from (value[:-1], [*value, *value[-1:]], [*value, 1], [*value, []], value[::-1])


def of_tensor(value):
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float16, torch.float8_e4m3fn):
        yield value.to(dtype)
    yield from (value - 2**40, value + 2**62)
    for odd in (math.nan, math.inf, -math.inf, 1e300, -1.0):
        yield torch.full_like(value, odd, dtype=torch.float64)
    yield torch.cat([value.reshape(-1), value.new_ones(1)])
    yield from (value.reshape(-1)[1:], value.unsqueeze(0), value.reshape(-1))
    # The last one takes a few bytes, and would be read as terabytes.
    yield from (value.to("meta"), value.to_sparse(), torch.zeros(1).expand(2**50))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of both
        yield torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        yield torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)
    if value.is_floating_point():
        yield value.clone().requires_grad_()


def of_text(value):
    yield from (value[:-1], value + "0", value[1:], value.replace("0", "9"), value.upper())
    yield from ("{}", "[]", "null", "NaN", "[" * 10**5, '{"torchcomp.tensor": [0]}', "\0")


def of_number(value):
    yield from (value + 1, float(value) + 0.5, -value - 1, str(value), torch.tensor(value))


def changes(value, thorough):
    """Yield the changes of one entry of a state dict; all of them if `thorough`."""
    kinds = {dict: of_dict, list: of_list, torch.Tensor: of_tensor, int: of_number}
    own = (kinds | {float: of_number, str: of_text}).get(type(value))
    if isinstance(value, bool):
        yield not value
    if thorough or not isinstance(value, torch.Tensor):
        yield from of_any(value)
    yield from own(value) if own else ()


def paths(value, path=()):
    """Yield the paths of all entries of a state dict."""
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from paths(value[key], (*path, key))


def at(state, path):
    for key in path:
        state = state[key]
    return state


def replaced(state, path, value):
    """Return a copy of `state` with another value at `path`."""
    if not path:
        return value
    key, *rest = path
    changed = copy.copy(state)
    changed[key] = replaced(state[key], rest, value)
    return changed


def mutated(state, parts=None):
    """Yield path, number and state dict of every change; `parts` limits the first key."""
    for path in paths(state):
        if parts is None or (path and path[0] in parts):
            for number, value in enumerate(changes(at(state, path), parts is None)):
                yield path, number, replaced(state, path, value)


def outcome(averager, before, changed):
    """Load `changed`. Return None if it is refused, "legal" if it is loaded, or a problem."""
    try:
        averager.load_state_dict(changed)
    except CheckpointError:
        return None if same(averager.state_dict(), before) else "refused, but changed"
    except Exception as error:
        return repr(error)
    after = averager.state_dict()
    averager.load_state_dict(before)
    return "legal" if equivalent(after, changed) else "loaded with other values"


def equivalent(state, wanted):
    """Whether `state` has the values of `wanted`, converted to its own dtypes."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state.reshape(-1), wanted.to(state.dtype).reshape(-1))
    if isinstance(state, dict):
        # Strides are not restored. A cache, thresholds, can be missing. The names of a fragment
        # follow its groups. The next step compares the checksum of weights with that of the model.
        kept = state.keys() - {"parameters", "names", "weights"}
        kept -= {"thresholds"} - wanted.keys()
        return all(equivalent(state[key], wanted[key]) for key in kept)
    if isinstance(state, bytes):  # a file of torch.save: equal values can take other bytes
        return equivalent(*(torch.load(BytesIO(each)) for each in (state, wanted)))
    if isinstance(state, list):
        return len(state) == len(wanted) and all(map(equivalent, state, wanted))
    return state == wanted
