"""Spec strings: the constructor expression as text and back, and nothing else."""

import builtins
import string

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import torchcomp
from torchcomp.aggregators import AGGREGATORS, DGC, EF, EF21, Bidirectional, Mean, PowerSGD
from torchcomp.aggregators.one_way import COLLECTIVES
from torchcomp.compressors import COMPRESSORS, Cast, Identity, Quantize, RandK, TopK
from torchcomp.errors import SpecError
from torchcomp.outer_steps import OUTER_STEPS, Nesterov, SlowMo
from torchcomp.schedules import QSR, SCHEDULES, Every, PostLocal, Power, Swap
from torchcomp.spec import COMPONENTS, parse_aggregator, parse_outer_step, parse_schedule

fast = settings(deadline=None, derandomize=True, max_examples=200)


# --- Random specs ---------------------------------------------------------------------------------

ratios = st.floats(0, 1, exclude_min=True)
counts = st.integers(1, 10**12)
positive = st.one_of(st.floats(0, exclude_min=True, allow_infinity=False), counts)
amounts = st.one_of(
    ratios.map(lambda ratio: {"ratio": ratio}), counts.map(lambda count: {"k": count})
)
scopes = st.sampled_from(["bucket", "tensor", "model"])
topks = st.builds(
    lambda amount, scope, values: TopK(**amount, scope=scope, **values),
    amounts,
    scopes,
    st.sampled_from([{}, {"values": "bf16"}, {"values": "int4", "rounding": "stochastic"}]),
)
quantizes = st.builds(
    Quantize, st.sampled_from(["int8", "int4"]), st.sampled_from(["nearest", "stochastic"])
)
randks = st.builds(
    lambda amount, scope, unbiased: RandK(**amount, scope=scope, unbiased=unbiased),
    amounts,
    scopes,
    st.booleans(),
)
compressors = st.one_of(
    st.just(Identity()),
    topks,
    randks,
    quantizes,
    st.builds(Cast, st.sampled_from(["bf16", "fp16"])),
)
memory_dtypes = st.sampled_from([None, "fp32", "fp64", "bf16", "fp16"])


contractive = compressors.filter(lambda compressor: compressor.alpha(1) is not None)
bidirectionals = st.builds(
    Bidirectional, contractive, contractive, st.just("shard"), memory_dtypes
) | st.builds(Bidirectional, topks, topks, st.just("exact"))


def admits(compressor, exchange):
    if exchange == "allreduce":
        return compressor.summable
    return exchange != "sharded" or compressor.selects or compressor.elementwise


@st.composite
def one_way_aggregators(draw):
    compressor = draw(compressors)
    allowed = [name for name in COLLECTIVES if admits(compressor, name)]
    exchange = draw(st.sampled_from(allowed))
    if compressor.alpha(1) is not None and draw(st.booleans()):
        return EF(compressor, exchange, draw(memory_dtypes))
    return Mean(compressor, exchange)


def aggregators():
    powersgds = st.builds(PowerSGD, counts, positive, memory_dtypes)
    dgcs = st.builds(DGC, topks, st.just("auto"), shares, st.booleans(), st.just(0), memory_dtypes)
    return one_way_aggregators() | bidirectionals | powersgds | dgcs | st.builds(EF21, contractive)


caps = st.one_of(st.none(), st.integers(10**12, 10**15))
switches = st.integers(0, 10**12)
schedules = st.one_of(
    st.builds(Every, counts),
    st.builds(QSR, positive, counts, caps),
    st.builds(Power, positive, positive, counts, caps),
    st.builds(PostLocal, switches, counts),
    st.builds(Swap, switches),
)
shares = st.floats(0.0, 1.0, exclude_max=True)
outer_steps = st.builds(SlowMo, shares, positive) | st.builds(Nesterov, positive, shares)


def parse(text):
    """What a spec describes, whatever its place."""
    outer = text.startswith(tuple(step.name for step in OUTER_STEPS))
    return parse_outer_step(text) if outer else torchcomp.parse(text)


def in_keywords(component):
    """The same component with every option written out, in reverse order."""
    options = [
        f"{name}={in_keywords(value) if hasattr(value, 'kind') else repr(value)}"
        for name, value in vars(component).items()
    ]
    return f"{component.name}({', '.join(reversed(options))})"


@fast
@given(st.one_of(aggregators(), schedules, outer_steps))
def test_printing_is_the_inverse_of_parsing(component):
    assert parse(str(component)) == component
    assert str(parse(str(component))) == str(component)


@fast
@given(st.one_of(aggregators(), schedules, outer_steps))
def test_all_options_may_be_given_by_name_in_any_order(component):
    assert parse(in_keywords(component)) == component


@fast
@given(st.one_of(aggregators(), schedules), st.sampled_from([" ", "  ", "\n", "\t", "\r\n"]))
def test_whitespace_between_words_does_not_matter(component, space):
    text = str(component)
    for sign in "(),=":
        text = text.replace(sign, f"{space}{sign}{space}")
    assert torchcomp.parse(f"{space}{text}{space}") == component


@fast
@given(compressors)
def test_a_bare_compressor_means_its_mean(compressor):
    assert torchcomp.parse(str(compressor)) == torchcomp.parse(compressor) == Mean(compressor)


def test_random_specs_cover_the_registry():
    covered = {Identity, TopK, RandK, Cast, Quantize, Mean, EF, Bidirectional}
    covered |= {PowerSGD, EF21, DGC}
    covered |= {Every, QSR, Power, PostLocal, Swap}
    covered |= {SlowMo, Nesterov}
    known = [*COMPRESSORS, *AGGREGATORS, *SCHEDULES, *OUTER_STEPS]
    missing = {*known} - covered
    assert not missing, f"add strategies for {missing}"
    assert len(COMPONENTS) == len(known)


# --- Specs by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "component", "canonical"),
    [
        ("mean", Mean(Identity()), "mean"),
        ("mean()", Mean(Identity()), "mean"),
        ("identity", Mean(Identity()), "mean"),
        ("mean(topk(0.01))", Mean(TopK(0.01)), "mean(topk(0.01))"),
        ("topk(0.01)", Mean(TopK(0.01)), "mean(topk(0.01))"),
        ("topk(1e-2)", Mean(TopK(0.01)), "mean(topk(0.01))"),
        ("ef(topk(k=5))", EF(TopK(k=5)), "ef(topk(k=5))"),
        ("ef(topk(None, 5))", EF(TopK(k=5)), "ef(topk(k=5))"),
        ("ef(compressor=topk(0.5))", EF(TopK(0.5)), "ef(topk(0.5))"),
        ("ef(topk(.5), 'sharded')", EF(TopK(0.5), "sharded"), 'ef(topk(0.5), exchange="sharded")'),
        # The words of the release before.
        (
            "ef(topk(.5), 'gather')",
            EF(TopK(0.5), "allgather"),
            'ef(topk(0.5), exchange="allgather")',
        ),
        ("mean(exchange='sum')", Mean(exchange="allreduce"), 'mean(exchange="allreduce")'),
        (
            "bidirectional(topk(.5), topk(k=3))",
            Bidirectional(TopK(0.5), TopK(k=3), "shard"),
            "bidirectional(topk(0.5), topk(k=3))",
        ),
        (
            "bidirectional(topk(.5), identity, 'exact')",
            Bidirectional(TopK(0.5), Identity(), "exact"),
            'bidirectional(topk(0.5), identity, selection="exact")',
        ),
        ("ef(cast('bf16'))", EF(Cast("bf16")), 'ef(cast("bf16"))'),
        ("every(4)", Every(4), "every(4)"),
        ("every(h=4)", Every(4), "every(4)"),
        ("qsr(0.0175, 4)", QSR(0.0175, 4), "qsr(alpha=0.0175, h_base=4)"),
        ("qsr(h_base=4, alpha=1)", QSR(1, 4), "qsr(alpha=1, h_base=4)"),
    ],
)
def test_spec_is_read_and_printed(text, component, canonical):
    parsed = torchcomp.parse(text)
    assert (parsed, str(parsed)) == (component, canonical)


def test_a_component_is_returned_as_it_is():
    aggregator, schedule = EF(TopK(0.01)), Every(4)
    assert torchcomp.parse(aggregator) is aggregator
    assert parse_schedule(schedule) is schedule


def test_a_numpy_number_prints_as_a_number():
    assert str(TopK(np.float64(0.25))) == "topk(0.25)"


# --- Errors ---------------------------------------------------------------------------------------


def refusal(text, parse=torchcomp.parse):
    with pytest.raises(SpecError) as caught:
        parse(text)
    return str(caught.value)


# Each text has a ^ in front of what is at fault; without it, it is the spec.
@pytest.mark.parametrize(
    ("marked", "problem"),
    [
        # Unknown names.
        ("^topkk(0.1)", "unknown name 'topkk'; did you mean 'topk'?"),
        ("ef(^topp(0.1))", "unknown name 'topp'; did you mean 'topk'?"),
        (
            "^zzz",
            "unknown name 'zzz'; methods: bidirectional, cast, dgc, ef, ef21, identity, mean",
        ),
        ("ef(^zzz)", "unknown name 'zzz'; compressors: cast, identity, quantize, randk, topk"),
        ("ef(^power1)", "unknown name 'power1'; compressors: "),
        ("topk(0.1, ^scop='tensor')", "topk has no option 'scop'; did you mean 'scope'?"),
        ("ef(randk(0.1, ^unbiase=True))", "randk has no option 'unbiase'; did you mean 'unbiased'"),
        ("topk(0.1, ^unbiased=True)", "('unbiased' is an option of randk)"),
        ("qsr(^beta=1, h_base=2)", "qsr has no option 'beta'"),
        ("identity(^x=1)", "identity has no option 'x'; it takes no options"),
        # Too many, too few, twice.
        ("cast('bf16', ^'fp16')", "cast takes at most 1 options"),
        ("ef(identity(^5))", "identity takes at most 0 options"),
        ("topk(0.1, ^ratio=0.2)", "topk: 'ratio' is given twice"),
        ("^ef", "ef needs 'compressor'"),
        ("^every()", "every needs 'h'"),
        ("^qsr", "qsr needs 'alpha' and 'h_base'"),
        ("ef(^topk)", "a fraction, topk(0.01), or a count, topk(k=5), and here are neither"),
        (
            "ef(^randk(0.1, k=5))",
            "here are both",
        ),
        # Out of range and not finite.
        ("topk(^0.0)", "topk: ratio must be a fraction above 0 and at most 1, not 0.0"),
        ("ef(topk(^1.5))", "topk: ratio must be a fraction above 0 and at most 1, not 1.5"),
        ("topk(^-0.1)", "not -0.1"),
        ("topk(^nan)", "not nan"),
        ("topk(^-inf)", "not -inf"),
        ("topk(^1e999)", "not inf"),
        ("topk(k=^0)", "topk: k must be a whole number of at least 1, not 0"),
        ("every(^-3)", "every: h must be a whole number of at least 1, not -3"),
        ("qsr(alpha=^0, h_base=4)", "qsr: alpha must be a finite number above 0, not 0"),
        ("qsr(alpha=^inf, h_base=4)", "qsr: alpha must be a finite number above 0, not inf"),
        ("qsr(alpha=^nan, h_base=4)", "qsr: alpha must be a finite number above 0, not nan"),
        ("qsr(alpha=1, h_base=^0)", "qsr: h_base must be a whole number of at least 1, not 0"),
        # Of another kind.
        ("topk(^1)", "is 1 a fraction or a count? A fraction is written with a point, topk(0.01)"),
        ("topk(^True)", "not True"),
        ("topk(^'0.1')", "not '0.1'"),
        ("topk(^0.1j)", "not 0.1j"),
        ("topk(k=^5.0)", "topk: k must be a whole number of at least 1, not 5.0"),
        ("topk(k=^True)", "not True"),
        ("every(^4.0)", "not 4.0"),
        ("qsr(alpha=^True, h_base=4)", "not True"),
        ("randk(0.1, unbiased=^1)", "randk: unbiased must be True or False, not 1"),
        (
            "topk(0.1, scope=^'layer')",
            'scope must be one of "bucket", "tensor", "model", not \'layer\'',
        ),
        ("cast(^'fp8')", 'cast: dtype must be one of "bf16", "fp16", not \'fp8\''),
        ("cast(^None)", "not None"),
        ("cast(^bf16)", "cast: dtype is a text and needs quotes, 'bf16' (a shell takes"),
        ("ef(topk(0.1), memory_dtype=^fp16)", "memory_dtype is a text and needs quotes, 'fp16'"),
        (
            "mean(exchange=^'ring')",
            'mean: exchange must be one of "auto", "allreduce", "allgather", "sharded"',
        ),
        ("ef(topk(0.1), memory_dtype=^'fp8')", "ef: memory_dtype must be one of"),
        ("ef(^0.01)", "ef takes a compressor such as topk(0.01), not 0.01"),
        # Combinations that make no sense.
        (
            "mean(topk(0.1), exchange=^'allreduce')",
            "allreduce needs one support on all ranks; topk selects",
        ),
        ("ef(topk(k=5), exchange=^'allreduce')", 'topk selects per rank: use exchange="allgather"'),
        ("ef(topk(k=5), exchange=^'sum')", 'topk selects per rank: use exchange="allgather"'),
        ("mean(quantize('int8'), exchange=^'sharded')", "makes one for the whole bucket"),
        ("bidirectional(topk(k=5), ^quantize('int8'), 'exact')", 'with selection="shard" it works'),
        (
            "bidirectional(topk(k=5), topk(k=5), ^'whole')",
            'selection must be one of "exact", "shard"',
        ),
        ("ef(^randk(0.1, unbiased=True))", "contractive compressor, and randk(0.1, unbiased=True)"),
        ("ef(^ef(topk(0.1)))", "ef takes a compressor such as topk(0.01), not the aggregator 'ef("),
        (
            "mean(^every(4))",
            "mean takes a compressor such as topk(0.01), not the schedule",
        ),
        # Not of the language.
        ("topk(^*[0.1])", "only names, calls and literals"),
        ("topk(^+0.1)", "only names, calls and literals"),
        ("every(^~4)", "only names, calls and literals"),
        ("topk(^**{})", "** is not read here"),
        ("ef(^topk.encode)", "only names, calls and literals"),
        ("ef(topk(0.1), exchange=^['allgather'])", "only names, calls and literals"),
        ("every(^10**100)", "only names, calls and literals"),
        ("^topk(0.1)(2)", "a method's name is expected here"),
        # Columns are counted in characters, not in bytes.
        ("cast('é☃', ^foo=2)", "cast has no option 'foo'"),
    ],
)
def test_error_points_at_what_is_wrong_and_says_why(marked, problem):
    text = marked.replace("^", "", 1)
    message, shown, caret = refusal(text).split("\n")
    assert problem in message
    assert shown == f"  {text}"
    assert caret == f"  {' ' * marked.index('^')}^"


@pytest.mark.parametrize(
    "text",
    ["topk(0.1", "topk 0.1", "ef(topk(0.1)))", "topk(0.1,, 2)", "mean mean", "1topk", "'mean"],
)
def test_syntax_error_shows_the_spec_and_a_caret_within_it(text):
    message, shown, caret = refusal(text).split("\n")
    assert message.startswith("not a spec: ")
    assert shown == f"  {text}"
    assert caret.strip() == "^"
    assert len(caret) <= len(shown) + 1


def test_a_decimal_comma_is_answered_with_the_point():
    problem = "not a spec: a number begins with a surplus 0; the decimal point is '.', as in 0.01"
    assert refusal("ef(topk(0,01))").startswith(problem)


@pytest.mark.parametrize(
    ("text", "parse", "hint"),
    [
        ("qsrs(1)", torchcomp.parse, "did you mean 'qsr'?"),
        ("qsrs(1)", parse_aggregator, "methods: bidirectional, "),
        ("tpk(0.1)", parse_aggregator, "did you mean 'topk'?"),
        ("tpk(0.1)", parse_schedule, "schedules: every, "),
        ("tpk(0.1)", parse_outer_step, "outer steps: nesterov, slowmo"),
    ],
)
def test_only_names_that_fit_the_place_are_suggested(text, parse, hint):
    assert f"unknown name '{text.partition('(')[0]}'; {hint}" in refusal(text, parse)


def test_caret_counts_from_the_spec_without_its_surplus_whitespace():
    assert refusal("\n  ef(  topp(0.1)\t)").endswith("\n  ef( topp(0.1) )\n      ^")


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_empty_spec_is_answered_with_an_example(text):
    assert refusal(text) == "an empty spec; write for example 'mean' or 'ef(topk(0.01))'"


@pytest.mark.parametrize("value", [None, 5, 0.01, b"mean", ["mean"], TopK, TopK.name.encode()])
def test_what_is_neither_text_nor_component_is_refused(value):
    assert refusal(value).startswith("a spec is a string such as 'ef(topk(0.01))', not ")


@pytest.mark.parametrize("text", ["5", "'mean'", "None", "nan", "-1", "True"])
def test_a_literal_alone_is_refused(text):
    assert refusal(text).startswith("a spec is a string such as 'ef(topk(0.01))', not ")


@pytest.mark.parametrize("text", ["ef(topk(0.01))", "mean", "topk(0.01)"])
def test_a_method_is_refused_where_a_schedule_is_needed(text):
    assert "is a gradient method, and here a schedule such as 'every(4)'" in refusal(
        text, parse_schedule
    )
    assert parse_aggregator(text) == torchcomp.parse(text)


@pytest.mark.parametrize("text", ["every(4)", "qsr(alpha=0.1, h_base=2)"])
def test_a_schedule_is_refused_where_a_method_is_needed(text):
    message = refusal(text, parse_aggregator)
    assert f"'{text}' is a schedule, and here a gradient method such as 'ef(topk(0.01))'" in message
    assert parse_schedule(text) == torchcomp.parse(text)


# --- Nothing is evaluated -------------------------------------------------------------------------

INJECTIONS = [
    "__import__('os').system('true')",
    "__import__('os')",
    "().__class__.__base__.__subclasses__()",
    "topk.__init__.__globals__",
    "topk(0.1).encode",
    "topk(ratio=open('/etc/passwd'))",
    "exec('1')",
    "eval('mean')",
    "lambda: mean",
    "(lambda: mean)()",
    "[mean for mean in [1]]",
    "{mean: 1 for mean in [1]}",
    "mean if True else mean",
    "mean or mean",
    "f'{mean}'",
    "f\"{__import__('os')}\"",
    "topk(f'{0.1}')",
    "(x := mean)",
    "mean; mean",
    "import os",
    "mean[0]",
    "[mean][0]",
    "topk(0.05 + 0.05)",
    "topk(k=9**9**9)",
    "await mean",
    "yield mean",
    "print(mean)",
    "mean\0",
    "'\ud800'",
]
HUGE = [
    "(" * 500 + "mean" + ")" * 499,
    "ef(" * 300 + "topk(0.1)" + ")" * 300,
    "ef(" * 80 + "topk(0.1)" + ")" * 80,
    "-" * 990 + "1",
    "topk(" + "-" * 901 + "0.1)",
    "~" * 990 + "1",
    "a." * 490 + "b",
    "a" + "()" * 490,
    "topk(" + "0.1, " * 190 + ")",
    "mean" * 10**6,
    "9" * 990,
    "qsr(alpha=" + "9" * 900 + ", h_base=4)",
    "qsr(alpha=-" + "9" * 900 + ", h_base=4)",
    "topk(0x" + "f" * 900 + ")",
    "topk(k=-0x" + "f" * 900 + ")",
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_code_is_refused_and_never_run(text, monkeypatch):
    run = []
    for name in ("eval", "exec", "open", "__import__"):
        monkeypatch.setattr(builtins, name, lambda *args, name=name: run.append(name))
    with pytest.raises(SpecError):
        torchcomp.parse(text)
    monkeypatch.undo()
    assert not run


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
def test_huge_and_deeply_nested_text_is_a_spec_error(text):
    refusal(text)


def test_the_parser_reads_only_as_much_as_a_person_writes():
    assert torchcomp.parse("mean" + " " * 5000) == Mean()
    assert refusal("mean " * 250) == "a spec of 1249 characters; at most 1000 are read"


def spec_or_spec_error(text):
    try:
        parsed = torchcomp.parse(text)
    except SpecError:
        return
    assert torchcomp.parse(str(parsed)) == parsed


@settings(fast, max_examples=400)
@given(st.text(max_size=40))
@example("\ufefftopk(1)")
@example("\x0ctopk(0.1)")
@example("topk(0.1)\\")
@example("# coding: latin-1 é")
def test_any_text_is_a_spec_or_a_spec_error(text):
    spec_or_spec_error(text)


WORDS = [*COMPONENTS, *"()=,.-+*:[]{}'\"\\#@ \n", *string.digits, "0.1", "nan", "inf", "1j"]
WORDS += ["k", "ratio", "scope", "exchange", "True", "None", "lambda", "'bf16'", "**", "f'", "b'"]
WORDS += ["é", "\uff4b"]


@settings(fast, max_examples=600)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_any_words_of_the_language_are_a_spec_or_a_spec_error(text):
    spec_or_spec_error(text)


@settings(fast, max_examples=300)
@given(aggregators().map(str), st.data())
def test_a_spec_with_a_typo_is_a_spec_or_a_spec_error(text, data):
    place = data.draw(st.integers(0, len(text)))
    inserted = data.draw(st.sampled_from([*WORDS, ""]))
    removed = data.draw(st.integers(0, 3))
    spec_or_spec_error(text[:place] + inserted + text[place + removed :])
