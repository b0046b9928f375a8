"""Checkpoints: memories in their parameters' shapes, for another number of ranks, or refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchcomp import CheckpointError, checkpoint, redistribute
from torchcomp.bucket import shards

SPEC = "ef(topk(0.01))"


def exchange(rank=0, world_size=2):
    """As much of an Exchange as a checkpoint asks for."""
    return SimpleNamespace(rank=rank, world_size=world_size)


def model_parameters():
    conv = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    tensors = {
        "conv": conv,
        "linear": torch.zeros(3, 5),
        "tied": torch.zeros(5, 3).t(),
        "scale": torch.zeros(()),
        "empty": torch.zeros(0, 3),
    }
    return {name: nn.Parameter(tensor) for name, tensor in tensors.items()}


def memories(parameters, seed=0):
    """A flat memory for each parameter."""
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.numel(), generator=noise) for name, p in parameters.items()}


def handle_state(rank=0, world_size=2, **changes):
    """What a handle's state_dict holds, with this rank's memory."""
    parameters = model_parameters()
    state = {
        **checkpoint.header(SPEC, exchange(rank, world_size)),
        "step": 10,
        "seed": 0,
        "scale": 1.0,
        "delivering": False,
        "groups": [list(parameters)],
        "traffic": {"sent": 1, "received": 2, "dense": 3},
        "shapes": {name: list(parameter.shape) for name, parameter in parameters.items()},
        "strides": checkpoint.strides(parameters),
        "error": checkpoint.shaped(memories(parameters, seed=rank).items(), parameters),
        "buckets": [list(parameters)],
        "owner": {},
    }
    return state | changes


def total_memory(states):
    """The mean memory of all ranks, in float64."""
    return {
        name: torch.stack([state["error"][name].double() for state in states]).mean(0)
        for name in states[0]["error"]
    }


# --- Shapes ---------------------------------------------------------------------------------------


def test_shaped_memories_have_their_parameters_shapes_and_are_contiguous():
    parameters = model_parameters()
    for name, memory in checkpoint.shaped(memories(parameters).items(), parameters).items():
        assert memory.shape == parameters[name].shape
        assert memory.is_contiguous()


def test_shaped_memory_puts_each_element_at_its_own_place():
    parameters = model_parameters()
    tied = {"tied": torch.arange(15.0)}
    shaped = checkpoint.shaped(tied.items(), parameters)
    assert torch.equal(shaped["tied"], torch.arange(15.0).view(5, 3).t())
    conv = {"conv": torch.arange(48.0)}
    shaped = checkpoint.shaped(conv.items(), parameters)
    assert torch.equal(shaped["conv"], torch.arange(48.0).view(4, 2, 2, 3).permute(0, 3, 1, 2))


def test_shaped_memories_are_copies():
    parameters = model_parameters()
    flat = memories(parameters)
    shaped = checkpoint.shaped(flat.items(), parameters)
    for memory in flat.values():
        memory.fill_(7.0)
    assert not any((memory == 7.0).any() for memory in shaped.values())


def test_flat_is_the_inverse_of_shaped():
    parameters = model_parameters()
    before = memories(parameters)
    after = checkpoint.flat(checkpoint.shaped(before.items(), parameters), parameters)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_memories_move_between_memory_formats_by_their_coordinates():
    ours = model_parameters()
    theirs = {name: nn.Parameter(p.detach().contiguous()) for name, p in ours.items()}
    shaped = checkpoint.shaped(memories(ours).items(), ours)
    moved = checkpoint.shaped(checkpoint.flat(shaped, theirs).items(), theirs)
    assert all(torch.equal(moved[name], shaped[name]) for name in shaped)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_flat_keeps_the_dtype_of_the_memory(dtype):
    parameters = model_parameters()
    flat = checkpoint.flat({"linear": torch.ones(3, 5, dtype=dtype)}, parameters)
    assert flat["linear"].dtype == dtype


@pytest.mark.parametrize(
    ("memory", "problem"),
    [
        ({"linear": torch.ones(5, 3)}, "'linear' has shape .5, 3. in the checkpoint and .3, 5."),
        ({"conv": torch.ones(48)}, "'conv' has shape .48. in the checkpoint and .4, 3, 2, 2."),
        ({"other": torch.ones(1)}, "'other' is not in the model"),
    ],
)
def test_memory_of_another_shape_or_name_is_refused(memory, problem):
    with pytest.raises(CheckpointError, match=problem):
        checkpoint.flat(memory, model_parameters())


def test_check_shapes_names_every_difference():
    saved = {"linear": [5, 3], "gone": [1]}
    parameters = {"linear": torch.zeros(3, 5), "new": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_shapes(saved, parameters)
    assert str(caught.value) == (
        "the checkpoint is another model's: 'gone' is not in the model; "
        "'new' is not in the checkpoint; "
        "'linear' has shape [5, 3] in the checkpoint and [3, 5] in the model"
    )


def test_check_shapes_names_five_differences_and_counts_the_rest():
    with pytest.raises(CheckpointError, match=r"'p4' is not in the model; and 3 more$") as caught:
        checkpoint.check_shapes({f"p{place}": [1] for place in range(8)}, {})
    assert "'p5'" not in str(caught.value)


def test_check_shapes_accepts_the_same_model_in_another_order():
    parameters = model_parameters()
    checkpoint.check_shapes(
        {n: list(parameters[n].shape) for n in reversed(parameters)}, parameters
    )


# --- Headers --------------------------------------------------------------------------------------


ADVICE = {"spec": "swap it", "world_size": "re-divide it"}


def check(state, spec=SPEC, rank=0, world_size=2):
    checkpoint.check_header(state, spec, exchange(rank, world_size), ("step", "error"), ADVICE)


def test_header_of_the_same_run_and_rank_is_accepted():
    check(handle_state(rank=1), rank=1)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (handle_state(spec="mean"), "has spec 'mean', and this run has 'ef.topk.0.01..': swap it"),
        (handle_state(rank=1), "has rank 1, and this run has 0: every rank loads what it saved"),
        (
            handle_state(world_size=4),
            "has world_size 4, and this run has 2: re-divide it",
        ),
        (handle_state(version=99), "has version 99, and this run has 2: save it again"),
        ({}, "lacks version, spec, rank, world_size, step, error$"),
        ({"model": 1, **checkpoint.header(SPEC, exchange())}, "lacks step, error$"),
    ],
    ids=["spec", "rank", "world_size", "version", "empty", "foreign"],
)
def test_header_of_another_run_is_refused_with_both_values(state, problem):
    with pytest.raises(CheckpointError, match=problem):
        check(state)


# --- Another number of ranks ----------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(1, 3), (2, 2), (4, 2), (3, 5), (2, 1)])
def test_redistributing_keeps_the_mean_memory(old, new):
    before = [handle_state(rank, old) for rank in range(old)]
    after = redistribute(before, new)
    for name, mean in total_memory(before).items():
        torch.testing.assert_close(total_memory(after)[name], mean, rtol=0, atol=1e-7)


def test_redistributed_states_are_one_for_each_rank_in_order_and_of_the_same_run():
    before = [handle_state(rank, 2) for rank in (1, 0)]
    after = redistribute(before, 3)
    for rank, state in enumerate(after):
        checkpoint.check_header(state, SPEC, exchange(rank, 3), before[0], ADVICE)
        assert (state["step"], state["shapes"]) == (10, before[0]["shapes"])


def test_redistributed_memories_are_not_shared():
    before = [handle_state(rank, 2) for rank in range(2)]
    kept = total_memory(before)
    first, second = redistribute(before, 2)
    first["error"]["linear"].fill_(7.0)
    assert not (second["error"]["linear"] == 7.0).any()
    assert torch.equal(total_memory(before)["linear"], kept["linear"])


@pytest.mark.parametrize(
    ("dtype", "values", "mean"),
    [
        (torch.float16, (60_000.0, 50_016.0), 55_008.0),
        (torch.float32, (1e8, 1.5, -1e8), 0.5),
    ],
)
def test_redistributing_keeps_the_dtype_and_sums_in_float64(dtype, values, mean):
    states = [
        handle_state(rank, len(values), error={"a": torch.tensor([value], dtype=dtype)})
        for rank, value in enumerate(values)
    ]
    (after,) = redistribute(states, 1)
    assert after["error"]["a"].dtype == dtype
    assert after["error"]["a"].item() == mean


TWO = [handle_state(0), handle_state(1)]


@pytest.mark.parametrize(
    ("states", "world_size", "problem"),
    [
        ([], 2, "no states: give the state dicts of all ranks"),
        (TWO[:1], 2, "need one state of each of the ranks .0, 1., and got .0."),
        ([TWO[0], TWO[0]], 2, "and got .0, 0."),
        ([*TWO, TWO[1]], 2, "and got .0, 1, 1."),
        ([TWO[0], handle_state(1, step=11)], 2, "their step differ"),
        ([TWO[0], handle_state(1, spec="mean")], 2, "their spec differ"),
        ([TWO[0], handle_state(1, shapes={})], 2, "their shapes differ"),
        (TWO, 0, "world_size must be at least 1, not 0"),
        (TWO, -1, "world_size must be at least 1, not -1"),
    ],
    ids=range(9),
)
def test_redistribute_refuses_what_is_not_all_ranks_of_one_run(states, world_size, problem):
    with pytest.raises(CheckpointError, match=problem):
        redistribute(states, world_size)


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


@pytest.mark.parametrize(
    "states",
    [
        [{}, {}],
        [without(TWO[0], "rank"), TWO[1]],
        [TWO[0], without(TWO[1], "error")],
        # What LocalSGD.state_dict() returns has a header, but no memory.
        [without(state, "error") for state in TWO],
        [TWO[0], TWO[1] | {"error": without(TWO[1]["error"], "linear")}],
        [TWO[0] | {"error": without(TWO[0]["error"], "linear")}, TWO[1]],
    ],
    ids=["empty", "no rank", "one without memory", "local steps", "name missing", "name too many"],
)
def test_redistribute_refuses_states_without_a_whole_memory(states):
    with pytest.raises(CheckpointError):
        redistribute(states, 2)


# --- What owners owe ------------------------------------------------------------------------------


def owners(world_size, debts):
    """One state for each rank, that owes its shard of `debts`."""
    names, sizes = tuple(debts), tuple(part.numel() for part in debts.values())
    states = []
    for rank, shard in enumerate(shards(names, sizes, world_size)):
        places = zip(shard.names, shard.offsets, shard.sizes, strict=True)
        owner = {name: debts[name][at : at + size].clone() for name, at, size in places}
        states.append(handle_state(rank, world_size, owner=owner))
    return states


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 3), (3, 5), (2, 40), (7, 1)])
def test_owners_debts_are_divided_anew(before, after):
    debts = memories(model_parameters())
    states = redistribute(owners(before, debts)[::-1], after)
    expected = owners(after, debts)
    for state, wanted in zip(states, expected, strict=True):
        assert state["owner"].keys() == wanted["owner"].keys()
        for name, part in wanted["owner"].items():
            assert torch.equal(state["owner"][name], part)


def owned(rank, world_size):
    parameters = model_parameters()
    sizes = tuple(parameter.numel() for parameter in parameters.values())
    return [shards(tuple(parameters), sizes, world_size)[rank]]


def test_debts_of_another_division_are_refused():
    state = owners(2, memories(model_parameters()))[0]
    checkpoint.check_owner(state, owned(0, 2), model_parameters())
    with pytest.raises(CheckpointError, match=r"owes \d+ elements of .*redistribute"):
        checkpoint.check_owner(state, owned(0, 3), model_parameters())


def test_debts_in_another_memory_order_are_refused():
    state = owners(1, memories(model_parameters()))[0]
    parameters = model_parameters()
    parameters["conv"] = nn.Parameter(parameters["conv"].detach().contiguous())
    with pytest.raises(CheckpointError, match=r"'conv' has strides .* memory format"):
        checkpoint.check_owner(state, owned(0, 1), parameters)
