"""Checkpoints: slots in their parameters' shapes, and states that are refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchcomp import CheckpointError
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.checkpoint import VERSION
from torchcomp.checkpoints.resume import load_slots, save_slots
from torchcomp.engine.state import Kind, Slot

SPEC = "ef(topk(0.01))"


def exchange(rank=0, world_size=2):
    return SimpleNamespace(rank=rank, world_size=world_size)


def model_parameters():
    conv = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    tensors = {"conv": conv, "linear": torch.zeros(3, 5), "tied": torch.zeros(5, 3).t()}
    tensors |= {"scale": torch.zeros(()), "empty": torch.zeros(0, 3)}
    return {name: nn.Parameter(tensor) for name, tensor in tensors.items()}


def residuals(parameters, seed=0):
    """Return a flat residual for each parameter."""
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.numel(), generator=noise) for name, p in parameters.items()}


def error_slot(parameters, dtype=torch.float32, **options):
    sizes = tuple(parameter.numel() for parameter in parameters.values())
    return Slot("error", Kind.DEBT, tuple(parameters), sizes, dtype, **options)


def saved(values, parameters, **options):
    slot, state = error_slot(parameters, **options), SimpleNamespace(items=lambda _: values.items())
    return save_slots([slot], state, parameters)["error"]["tensors"]


def state_of(rank=0, world_size=2, **changes):
    """Return a state dict as an Averager's, with this rank's residual."""
    parameters = model_parameters()
    tensors = saved(residuals(parameters, seed=rank), parameters)
    state = {
        **checkpoint.header(SPEC, exchange(rank, world_size)),
        "step": 10,
        "seed": 0,
        "scale": 1.0,
        "lrs": {},
        "flushing": False,
        "groups": [list(parameters)],
        "buckets": [list(parameters)],
        "parameters": checkpoint.layout_of(parameters),
        "traffic": {"sent": 1, "received": 2, "dense": 3, "control": 4, "inside": 5},
        "slots": {"error": {"kind": "debt", "sharded": False, "tensors": tensors}},
    }
    return state | changes


def test_saved_residuals_are_contiguous_copies_with_each_element_at_its_coordinates():
    parameters, flat = model_parameters(), residuals(model_parameters())
    flat |= {"tied": torch.arange(15.0), "conv": torch.arange(48.0)}
    shaped = saved(flat, parameters)
    for name, part in shaped.items():
        assert part.shape == parameters[name].shape
        assert part.is_contiguous()
        flat[name].fill_(7.5)
    assert torch.equal(shaped["tied"], torch.arange(15.0).view(5, 3).t())
    assert torch.equal(shaped["conv"], torch.arange(48.0).view(4, 2, 2, 3).permute(0, 3, 1, 2))
    assert not any((part == 7.5).any() for part in shaped.values())


def test_a_slot_that_was_never_opened_is_saved_with_its_initial_values():
    init = lambda name, out: out.fill_(len(name))  # noqa: E731
    shaped = saved({"tied": torch.zeros(15)}, model_parameters(), init=init)
    assert (shaped["linear"] == 6.0).all()
    assert not shaped["tied"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("contiguous", [False, True])
def test_loading_is_the_inverse_of_saving_in_any_dtype_and_memory_format(contiguous, dtype):
    parameters, state = model_parameters(), state_of()
    if contiguous:
        parameters = {n: nn.Parameter(p.detach().contiguous()) for n, p in parameters.items()}
    flats = load_slots([error_slot(parameters, dtype)], state, parameters, SPEC)["error"][2]
    assert {flat.dtype for flat in flats.values()} == {dtype}
    again = saved(flats, parameters, dtype=dtype)
    for name, part in state["slots"]["error"]["tensors"].items():
        assert torch.equal(again[name], part.to(dtype))


def test_check_engine_names_every_difference():
    parameters = {"linear": torch.zeros(3, 5), "new": torch.zeros(1)}
    layout = {"shape": [5, 3], "stride": [3, 1]}
    other = state_of(parameters={"linear": layout, "gone": layout})
    with pytest.raises(CheckpointError, match=r"'linear', 'gone', 'new'.*\[5, 3\].*\[3, 5\]"):
        checkpoint.check_engine(other, parameters)
    # The order does not matter.
    reordered = reversed(model_parameters().items())
    checkpoint.check_engine(state_of(), dict(reordered))


@pytest.mark.parametrize("division", ["groups", "buckets"])
def test_groups_must_hold_every_parameter_once(division):
    parameters = model_parameters()
    for groups, problem in (
        ([["linear"]], "'conv'"),
        ([[*parameters, "linear"]], "'linear'"),
        ([[*parameters, "foreign"]], "'foreign'"),
        ([list(parameters), []], r"\[\]"),
    ):
        with pytest.raises(CheckpointError, match=rf"\b{division}\b.*{problem}"):
            checkpoint.check_engine(state_of(**{division: groups}), parameters)
    # Each group has one dtype.
    parameters["linear"] = parameters["linear"].detach().half()
    with pytest.raises(CheckpointError, match=r"groups .*dtype.*'linear'"):
        checkpoint.check_engine(state_of(), parameters)


def check_header(state, rank=0):
    advice = {"spec": "advice on spec", "world_size": "advice on world_size"}
    checkpoint.check_header(state, SPEC, exchange(rank), advice)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (state_of(spec="mean"), r"\bspec 'mean'.* 'ef\(topk\(0\.01\)\)': advice on spec$"),
        (state_of(rank=1), r"\brank 1\b.* 0\b"),
        (state_of(world_size=4), r"\bworld_size 4\b.* 2: advice on world_size$"),
        (state_of(version=99), rf"\bversion 99\b.* {VERSION}\b"),
        ({}, r"'version', 'spec', 'rank'.*\b1\b"),
        (state_of() | {"rank": False}, r"\.rank .* False"),
        (None, "NoneType"),
    ],
    ids=range(7),
)
def test_header_of_another_run_is_refused_with_both_values_and_advice(state, problem):
    check_header(state_of(rank=1), rank=1)
    with pytest.raises(CheckpointError, match=problem):
        check_header(state)
