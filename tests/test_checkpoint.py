"""Checkpoints: slots in their parameters' shapes, refused states, other numbers of ranks."""

import math
import re
import warnings
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from torchcomp import CheckpointError, redistribute
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.checkpoint import (
    VERSION,
    count,
    dict_of,
    flag,
    list_of,
    number,
    optional,
    record,
    tensor,
    text,
)
from torchcomp.checkpoints.resume import load_slots, save_slots
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.state import Kind, Slot

SPEC = "ef(topk(0.01))"


def exchange(rank=0, world_size=2):
    """The attributes of an Exchange that checkpoints use."""
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


def loaded(slot, state, parameters):
    """The flat values of a slot, where it is the only one of a state."""
    only = {name: each for name, each in state["slots"].items() if name == slot.name}
    return load_slots([slot], state | {"slots": only}, parameters, SPEC)[slot.name][2]


def state_of(rank=0, world_size=2, slots=None, **changes):
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
        "slots": {"error": slot_of(tensors), **(slots or {})},
    }
    return state | changes


def slot_of(tensors, kind="debt", sharded=False):
    return {"kind": kind, "sharded": sharded, "tensors": tensors}


# --- Forms ----------------------------------------------------------------------------------------


class One(IntEnum):
    ONE = 1


def unusual_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of both
        yield torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        yield torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


ZEROS, INTEGERS = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
COUNTS = [-1, 2**63, 1.0, True, "1", None, math.nan, torch.tensor(1), np.int8(1), One.ONE]
COUNTS += [nested(10**5), 10**5000, "x" * 10_000]
NUMBERS = [math.nan, math.inf, True, "1", None, 10**400, 1j, torch.tensor(1.0), np.float64(1)]
TENSORS = [None, [0.0], ZEROS.to("meta"), torch.zeros(2, 2).to_sparse(), ZEROS.to(torch.complex64)]
TENSORS += [ZEROS.to(torch.float8_e4m3fn), torch.tensor([0.0, math.nan]), torch.tensor([-math.inf])]
TENSORS += [torch.zeros(1).expand(2**50), *unusual_tensors()]
FORMS = {
    "count": (count, [0, 5, 2**63 - 1], COUNTS),
    "number": (number, [0, -1.5, 1e300], NUMBERS),
    "text": (text, ["", "x"], [None, b"x", 1, np.str_("x")]),
    "flag": (flag, [True, False], [0, 1, None, "True"]),
    "optional": (optional(count), [None, 3], [-1, "x"]),
    "list": (list_of(count), [[], (1, 2), [1]], [None, "ab", {}, [1, -1], {1}]),
    "list of two": (list_of(count, 2), [[1, 2]], [[1], [1, 2, 3], [1, "x"]]),
    "dict": (dict_of(count), [{}, {"a": 1}], [None, [], {1: 1}, {"a": -1}]),
    "dict of a": (dict_of(count, ("a",)), [{"a": 2}], [{}, {"a": 1, "c": 1}, {"a": None}]),
    "record": (record(a=count), [{"a": 1, "more": None}], [None, {}, {"b": 1}, {"a": -1}]),
    "tensor": (tensor(), [ZEROS, INTEGERS, torch.zeros(0).half()], TENSORS),
    "shape": (tensor((2, 3)), [torch.zeros(3, 2).t()], [torch.zeros(6), torch.zeros(3, 2)]),
    "dtype": (tensor(dtype=torch.int64), [INTEGERS], [ZEROS]),
    "size": (tensor(numel=4), [torch.zeros(2, 2)], [torch.zeros(3), torch.zeros(())]),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_value_of_the_form_passes_and_others_raise_with_their_path(name):
    form, good, bad = FORMS[name]
    for value in good:
        form(value, "here.there")
    for value in bad:
        with pytest.raises(CheckpointError, match=r"here\.there") as caught:
            form(value, "here.there")
        assert len(str(caught.value)) < 250


def test_the_path_leads_to_a_nested_value():
    form = record(slots=dict_of(record(list=list_of(optional(count)))))
    with pytest.raises(CheckpointError, match=r"state\.slots\['a'\]\.list\[1\] .* -5"):
        form({"slots": {"a": {"list": [None, -5]}}}, "state")


# --- Shapes ---------------------------------------------------------------------------------------


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
    parameters = model_parameters()

    def init(name, out):
        out.fill_(len(name))

    shaped = saved({"tied": torch.zeros(15)}, parameters, init=init)
    assert (shaped["linear"] == 6.0).all()
    assert not shaped["tied"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("contiguous", [False, True])
def test_loading_is_the_inverse_of_saving_in_any_dtype_and_memory_format(contiguous, dtype):
    parameters, state = model_parameters(), state_of()
    if contiguous:
        parameters = {n: nn.Parameter(p.detach().contiguous()) for n, p in parameters.items()}
    flats = loaded(error_slot(parameters, dtype), state, parameters)
    assert {flat.dtype for flat in flats.values()} == {dtype}
    again = saved(flats, parameters, dtype=dtype)
    for name, part in state["slots"]["error"]["tensors"].items():
        assert torch.equal(again[name], part.to(dtype))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"linear": torch.ones(5, 3)}, r"\['linear'\].* \(3, 5\), .*\(5, 3\)"),
        ({"conv": torch.ones(48)}, r"\['conv'\].* \(4, 3, 2, 2\), .*\(48,\)"),
        ({"scale": torch.ones((), dtype=torch.int64)}, r"\['scale'\].*float32.*int64"),
        ({"scale": torch.tensor(1e300, dtype=torch.float64)}, r"\['scale'\].*float32.* NaN"),
        ({"linear": None}, r"slots\['error'\] .*'linear'"),
        ({"kind": "estimate"}, r"slots\['error'\].*'estimate', False"),
        ({"sharded": True}, r"slots\['error'\].*'debt', True"),
        (None, r"slots\['error'\][^.]*$"),
    ],
)
def test_another_slot_is_refused(changes, problem):
    parameters, state = model_parameters(), state_of()
    slot = state["slots"]["error"]
    for name, value in (changes or {}).items():
        (slot if name in slot else slot["tensors"])[name] = value
        if value is None:
            del slot["tensors"][name]
    if changes is None:
        del state["slots"]["error"]
    with pytest.raises(CheckpointError, match=problem):
        loaded(error_slot(parameters), state, parameters)


def layout(**shapes):
    return {
        name: {"shape": list(shape), "stride": [1] * len(shape)} for name, shape in shapes.items()
    }


def test_check_engine_names_every_difference():
    parameters = {"linear": torch.zeros(3, 5), "new": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_engine(state_of(parameters=layout(linear=[5, 3], gone=[1])), parameters)
    gone, new, linear = str(caught.value).split("; ")
    assert re.search(r"'gone'.*\bmodel\b", gone)
    assert re.search(r"'new'.*\bcheckpoint\b", new)
    assert re.search(r"'linear'.*\[5, 3\].*\bcheckpoint\b.*\[3, 5\].*\bmodel\b", linear)

    foreign = layout(**{f"p{i}": [1] for i in range(8)})
    with pytest.raises(CheckpointError, match=r"'p4' [^;]*; .*\b3\b") as caught:
        checkpoint.check_engine(state_of(parameters=foreign), {})
    assert "'p5'" not in str(caught.value)
    # The order does not matter.
    reordered = reversed(model_parameters().items())
    checkpoint.check_engine(state_of(), dict(reordered))


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([["linear"]], "'conv'"),
        ([[*model_parameters(), "linear"]], "'linear'"),
        ([[*model_parameters(), "foreign"]], "'foreign'"),
        ([list(model_parameters()), []], r"\[\]"),
    ],
)
@pytest.mark.parametrize("division", ["groups", "buckets"])
def test_groups_must_hold_every_parameter_once(division, groups, problem):
    with pytest.raises(CheckpointError, match=rf"\b{division}\b.*{problem}"):
        checkpoint.check_engine(state_of(**{division: groups}), model_parameters())


def test_a_group_of_two_dtypes_is_refused():
    parameters = model_parameters()
    parameters["linear"] = parameters["linear"].detach().half()
    # The group has every parameter once, so only the dtypes are wrong.
    with pytest.raises(CheckpointError, match=r"groups .*dtype.*'linear'"):
        checkpoint.check_engine(state_of(), parameters)


# --- Headers --------------------------------------------------------------------------------------


ADVICE = {"spec": "advice on spec", "world_size": "advice on world_size"}


def check_header(state, spec=SPEC, rank=0, world_size=2):
    checkpoint.check_header(state, spec, exchange(rank, world_size), ADVICE)


def test_header_of_the_same_run_and_rank_is_accepted():
    check_header(state_of(rank=1), rank=1)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (state_of(spec="mean"), r"\bspec 'mean'.* 'ef\(topk\(0\.01\)\)': advice on spec$"),
        (state_of(rank=1), r"\brank 1\b.* 0\b"),
        (state_of(world_size=4), r"\bworld_size 4\b.* 2: advice on world_size$"),
        (state_of(version=99), rf"\bversion 99\b.* {VERSION}\b"),
        (state_of(version=2), rf"\bversion 2\b.* {VERSION}\b"),
        ({}, r"'version', 'spec', 'rank'.*\b1\b"),
        ({"model": 1, "version": VERSION, "spec": SPEC}, "'rank', 'world_size'$"),
        (state_of() | {"rank": False}, r"\.rank .* False"),
        (state_of(world_size=torch.tensor(2)), r"\.world_size .* tensor"),
        (None, "NoneType"),
        ([1], r"\blist$"),
    ],
    ids=range(11),
)
def test_header_of_another_run_is_refused_with_both_values_and_advice(state, problem):
    with pytest.raises(CheckpointError, match=problem):
        check_header(state)


# --- Another number of ranks, in whole runs: see test_redistribution.py ---------------------------


@pytest.mark.parametrize(
    ("dtype", "values", "mean"),
    [
        (torch.float16, (60_000.0, 50_016.0), 55_008.0),
        (torch.float32, (1e8, 1.5, -1e8), 0.5),
    ],
)
def test_redistributing_keeps_the_dtype_and_sums_in_float64(dtype, values, mean):
    states = [
        state_of(
            rank, len(values), {"error": slot_of({"scale": torch.tensor([value], dtype=dtype)})}
        )
        for rank, value in enumerate(values)
    ]
    (after,) = (state["slots"]["error"]["tensors"] for state in redistribute(states, 1))
    assert after["scale"].dtype == dtype
    assert after["scale"].item() == mean


TWO = [state_of(0), state_of(1)]


def lacking(state, *path):
    """The state without the entry at a path."""
    key, *rest = path
    kept = {name: value for name, value in state.items() if name != key}
    return kept | ({key: lacking(state[key], *rest)} if rest else {})


LINEAR = ("slots", "error", "tensors", "linear")
REFUSED = [
    ([], 2, r"^states\b"),
    (5, 2, r"^states\b"),
    (TWO[:1], 2, r"\b2 ranks.* \[0\]"),
    ([TWO[0], TWO[0]], 2, r"\b2 ranks.* \[0, 0\]"),
    ([*TWO, TWO[1]], 2, r"\b2 ranks.* \[0, 1, 1\]"),
    ([TWO[0], state_of(1, step=11)], 2, r": step\b"),
    ([TWO[0], state_of(1, spec="mean")], 2, r": spec\b"),
    ([TWO[0], state_of(1, scale=2.0)], 2, r": scale\b"),
    ([TWO[0], state_of(1, parameters={})], 2, r": parameters\b"),
    ([state_of(0, world_size=2**62), TWO[1]], 2, rf"\b{2**62} ranks.* \[0, 1\]"),
    (TWO, 0, r"world_size .* 0$"),
    (TWO, -1, r"world_size .* -1$"),
    (TWO, True, r"world_size .* True$"),
    ([{}, {}], 2, r"states\[0\]"),
    ([None, None], 2, r"states\[0\]"),
    ([lacking(TWO[0], "rank"), TWO[1]], 2, "'rank'"),
    ([TWO[0], lacking(TWO[1], "slots")], 2, "'slots'"),
    ([TWO[0], TWO[1] | {"slots": {}}], 2, "slots"),
    ([TWO[0], lacking(TWO[1], *LINEAR)], 2, "slots"),
    ([lacking(TWO[0], *LINEAR), TWO[1]], 2, "slots"),
    ([state | {"buckets": [["foreign"]]} for state in TWO], 2, "'foreign'"),
    ([state_of(rank, 2, {"q": slot_of({"new": torch.zeros(1)})}) for rank in (0, 1)], 3, "'new'"),
]


@pytest.mark.parametrize(("states", "world_size", "problem"), REFUSED, ids=range(len(REFUSED)))
def test_redistribute_refuses_states_that_are_not_all_ranks_of_one_run(states, world_size, problem):
    with pytest.raises(CheckpointError, match=problem):
        redistribute(states, world_size)


# --- The server residual --------------------------------------------------------------------------


def shards_of(parameters, world_size):
    return BucketShape.of(parameters, parameters).shards(world_size)


def owners(world_size, whole):
    """Return one state for each rank, with its shard of the server residual `whole`."""
    states = []
    for rank, shard in enumerate(shards_of(model_parameters(), world_size)):
        extents = zip(shard.names, shard.offsets, shard.sizes, strict=True)
        parts = {name: whole[name][at : at + size].clone() for name, at, size in extents}
        server = {"server_error": slot_of(parts, sharded=True)}
        states.append(state_of(rank, world_size, server))
    return states


def server(state):
    return state["slots"]["server_error"]["tensors"]


def test_shards_of_a_wrong_size_are_refused():
    states = owners(2, residuals(model_parameters()))
    name = next(iter(server(states[0])))
    server(states[0])[name] = server(states[0])[name][:-1]
    with pytest.raises(CheckpointError, match="rank 0"):
        redistribute(states, 3)


def server_slot(parameters, rank, world_size):
    shard = shards_of(parameters, world_size)[rank]
    return Slot("server_error", Kind.DEBT, shard.names, shard.sizes, torch.float32, True)


def test_server_residual_of_another_world_size_or_memory_order_is_refused():
    parameters = model_parameters()
    state, alone = (owners(ranks, residuals(parameters))[0] for ranks in (2, 1))
    loaded(server_slot(parameters, 0, 2), state, parameters)
    with pytest.raises(CheckpointError, match=r"\d+ elements .*torchcomp\.redistribute"):
        loaded(server_slot(parameters, 0, 3), state, parameters)
    parameters["conv"] = nn.Parameter(parameters["conv"].detach().contiguous())
    with pytest.raises(CheckpointError, match=r"'conv' .*\[12, 1, 6, 3\].* \[12, 4, 2, 1\]"):
        loaded(server_slot(parameters, 0, 1), alone, parameters)
