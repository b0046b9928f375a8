"""Spec strings: parsing, printing, and errors that point at what is wrong."""

import builtins
import re
import string
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import torchcomp
from tests.support.models import METHODS
from torchcomp.aggregators import EF, Bidirectional, Mean, PowerSGD
from torchcomp.compressors import Cast, Identity, TopK
from torchcomp.local_sgd.outer_steps import OUTER_STEPS
from torchcomp.local_sgd.schedules import QSR, SCHEDULES, Every
from torchcomp.specs.auto import Auto
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError
from torchcomp.specs.spec import (
    COMPONENTS,
    parse_aggregator,
    parse_any,
    parse_local,
    parse_outer_step,
    parse_schedule,
)

fast = settings(deadline=None, derandomize=True, max_examples=200)
SPECS = [
    *METHODS,
    *("dgc(topk(0.05), nesterov=True)", "powersgd(4, min_ratio=2.0)"),
    'ef(quantize("int4", rounding="stochastic"), memory_dtype="fp64")',
    "mean(warmup(randk(0.1, unbiased=True), steps=5, start=0.5))",
    *(component.example for component in (*SCHEDULES, *OUTER_STEPS)),
    *("qsr(alpha=0.0175, h_base=4, cap=16)", "slowmo(beta=0.7, alpha=0.5)"),
]


def parse(text):
    """Parse a spec of any kind: a method, a schedule or an outer step."""
    outer = text.startswith(tuple(step.name for step in OUTER_STEPS))
    return parse_outer_step(text) if outer else torchcomp.parse(text)


def in_keywords(component):
    """The same component with every option written out, in reverse order."""
    options = [
        f"{name}={in_keywords(value) if hasattr(value, 'kind') else repr(value)}"
        for name, value in vars(component).items()
    ]
    return f"{component.name}({', '.join(reversed(options))})"


@pytest.mark.parametrize("space", [" ", "\r\n\t"])
@pytest.mark.parametrize("spec", SPECS)
def test_names_of_options_quotes_of_choices_and_whitespace_do_not_matter(spec, space):
    component = parse(spec)
    assert parse(str(component)) == parse(in_keywords(component)) == component
    text = str(component).replace('"', "")
    for sign in "(),=":
        text = text.replace(sign, f"{space}{sign}{space}")
    assert parse(f"{text}{space}") == component


@fast
@given(st.floats(0, 1, exclude_min=True), st.integers(1, 10**15))
def test_printing_of_numbers_is_the_inverse_of_parsing(ratio, count):
    for component in (Mean(TopK(ratio)), Mean(TopK(k=count)), PowerSGD(count, ratio), Every(count)):
        assert torchcomp.parse(str(component)) == component


def parts(component):
    yield type(component)
    for value in vars(component).values():
        yield from parts(value) if isinstance(value, Component) else ()


def test_the_specs_have_every_component():
    covered = {part for spec in SPECS for part in parts(parse(spec))} | {Auto}  # in tests/auto
    assert covered == set(COMPONENTS.values())


EXACT = 'bidirectional(topk(0.5, values="int8"), identity, selection="exact")'
BY_HAND = [
    ("mean", Mean(Identity()), "mean"),
    ("mean" + " " * 5000, Mean(Identity()), "mean"),
    ("ef(topk(None, 5))", EF(TopK(k=5)), "ef(topk(k=5))"),
    ("ef(topk(.5), 'sharded')", EF(TopK(0.5), "sharded"), 'ef(topk(0.5), exchange="sharded")'),
    # Names of an earlier release.
    ("mean(exchange='sum')", Mean(exchange="allreduce"), 'mean(exchange="allreduce")'),
    ("mean(topk(.5), gather)", Mean(TopK(0.5), "allgather"), None),
    ("ef(cast(bf16))", EF(Cast("bf16")), 'ef(cast("bf16"))'),
    (
        "bidirectional(topk(.5, values=int8), identity, exact)",
        Bidirectional(TopK(0.5, values="int8"), Identity(), "exact"),
        EXACT,
    ),
    ("qsr(0.0175, 4)", QSR(0.0175, 4), "qsr(alpha=0.0175, h_base=4)"),
    ("topk(np)", Mean(TopK(np.float64(0.25))), "mean(topk(0.25))"),
]


@pytest.mark.parametrize(("text", "component", "canonical"), BY_HAND)
def test_spec_is_read_and_printed(text, component, canonical):
    parsed = component if text == "topk(np)" else torchcomp.parse(text)
    assert parsed == component
    assert str(parsed) == (canonical or str(component))
    assert torchcomp.parse(parsed) is parsed


# --- Errors ---------------------------------------------------------------------------------------


def refusal(text, parse=torchcomp.parse):
    with pytest.raises(SpecError) as caught:
        parse(text)
    return str(caught.value)


# Without the ^, each text is a spec. The caret of the error must be where the ^ is. The error must
# match the words.
@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("^topkk(0.1)", "'topkk'.*'topk'"),
        ("^zzz", "'zzz'.*methods: bidirectional, .*mean"),
        ("topk(0.1, ^scop='tensor')", "^topk: 'scop' .*'scope'"),
        ("identity(^x=1)", "^identity: 'x'.*no options"),
        ("topk(0.1, ^ratio=0.2)", "^topk: 'ratio' .*twice"),
        ("topk(0.1, ^**{})", "^topk: "),
        ("^qsr", "^qsr .*'alpha'.*'h_base'"),
        ("ef(^topk)", r"topk\(0\.01\).*topk\(k=5\).*neither"),
        ("topk(^0.0)", r"^topk: ratio .*0\.0$"),
        ("topk(^1)", r"^topk: ratio=1\b.*topk\(0\.01\).*topk\(k=1\)"),
        ("every(^4.0)", r"^every: h .*4\.0$"),
        ("topk(0.1, scope=^'layer')", "^topk: scope .*bucket.*tensor.*model.*'layer'$"),
        ("cast(^'fp8')", "^cast: dtype .*bf16.*fp16.*'fp8'$"),
        ("cast(^bf1)", "^cast: dtype .*fp16.*'bf1'"),
        ("bidirectional(topk(0.1), ^exact)", "'exact'.*compressors: "),
        ("ef(^BF16)", r"'BF16'.*docs/methods/README\.md#"),
        ("^Power_SGD(4)", "'Power_SGD'.*'powersgd'"),
        ("ef(^powersdg)", "'powersdg'; compressors: cast, identity, "),
        ("ef(^0.01)", r"^ef .*compressor.* 0\.01$"),
        ("mean(topk(0.1), exchange=^'allreduce')", "allreduce.*topk"),
        ("bidirectional(topk(k=5), ^quantize('int8'), 'exact')", "quantize.*selection=.shard"),
        ("ef(^ef(topk(0.1)))", r"^ef .*compressor.*aggregator 'ef\(topk\(0\.1\)\)'"),
        ("powersgd(min_ratio=^0)", "^powersgd: min_ratio "),
        ("ef21(^randk(0.1, unbiased=True))", "^ef21 .*contractive"),
        ("dgc(^randk(0.1))", "^dgc .*randk"),
        ("dgc(topk(0.1), momentum=^1.0)", "^dgc: momentum "),
        ("dgc(^warmup(topk(0.1), 5))", "^dgc .*start"),
        ("ef(^warmup(randk(0.1, unbiased=True), steps=5))", "contractive"),
        ("warmup(^topk(k=5), steps=10)", "^warmup .*ratio"),
        ("warmup(^mean, steps=10)", "^warmup .*mean"),
        ("warmup(topk(0.1), steps=10, start=^0.1)", "^warmup: start"),
        ("topk(^*[0.1])", "name.*call.*literal"),
        ("^topk(0.1)(2)", "name"),
        # Columns are counted in characters, not in bytes.
        ("cast('é☃', ^foo=2)", "^cast: 'foo'"),
    ],
)
def test_error_points_at_what_is_wrong_and_says_why(marked, words):
    text = marked.replace("^", "", 1)
    message, shown, caret = refusal(text).split("\n")
    assert re.search(words, message)
    assert shown == f"  {text}"
    assert caret == f"  {' ' * marked.index('^')}^"


@pytest.mark.parametrize("text", ["topk(0.1", "topk 0.1", "ef(topk(0,01))", "ef(topk(1%))"])
def test_syntax_error_shows_the_spec_and_a_caret_within_it(text):
    message, shown, caret = refusal(text).split("\n")
    assert "0.01" in message or not {",", "%"} & set(text)
    assert (shown, caret.strip()) == (f"  {text}", "^")
    assert len(caret) <= len(shown) + 1


@pytest.mark.parametrize(
    ("text", "parse", "words"),
    [
        ("PowerSGD(4)", parse_schedule, ["schedules: ", "every, post_local, power, "]),
        ("qsrs(1)", parse_aggregator, ["methods: bidirectional, "]),
        ("tpk(0.1)", parse_aggregator, ["'topk'"]),
        ("aut", parse_any, ["'auto'"]),
        ("tpk(0.1)", parse_outer_step, ["outer steps: nesterov, slowmo"]),
        ("mean", parse_local, ["'mean'", "'every(4)'", "torchcomp.register"]),
        ("every(4)", parse_aggregator, ["'every(4)'", "'ef(topk(0.01))'", "torchcomp.LocalSGD"]),
        ("\n  ef(  topp(0.1)\t)", torchcomp.parse, ["\n  ef( topp(0.1) )\n      ^"]),
        ("diloco", torchcomp.parse, ["docs/methods/README.md#other-names"]),
        *((value, torchcomp.parse, ["'ef(topk(0.01))'"]) for value in ("", " \n", "5", "'mean'")),
        *((value, torchcomp.parse, ["'ef(topk(0.01))'"]) for value in ("-1", None, b"mean", TopK)),
    ],
    ids=range(17),
)
def test_an_error_says_what_is_expected(text, parse, words):
    message = refusal(text, parse)
    assert all(word in message for word in words), message


def test_the_names_of_other_projects_are_specs():
    text = (Path(torchcomp.__file__).parents[1] / "docs/methods/README.md").read_text()
    section = text.partition("## Other names\n")[2].partition("\n## ")[0]
    cells = [row.split("|")[2] for row in section.splitlines()[6:] if row]
    written = [spec for cell in cells for spec in re.findall("`([^`]*)`", cell)]
    specs = [each for each in written if each != "LocalSGD" and not each.startswith("outer=")]
    assert len(specs) > 10
    for each in specs:
        parse(each)


INJECTIONS = [
    "__import__('os').system('true')",
    "().__class__.__base__.__subclasses__()",
    "topk.__init__.__globals__",
    "lambda: mean",
    "[mean for mean in [1]]",
    "mean; mean",
    "topk(k=9**9**9)",
    "mean\0",
    "'\ud800'",
    "ef(" * 300 + "topk(0.1)" + ")" * 300,
    "-" * 990 + "1",
    "mean" * 10**6,
    "qsr(alpha=" + "9" * 900 + ", h_base=4)",
]


@pytest.mark.parametrize("text", INJECTIONS, ids=range(len(INJECTIONS)))
def test_code_is_refused_and_never_run(text, monkeypatch):
    run = []
    for name in ("eval", "exec", "open", "__import__"):
        monkeypatch.setattr(builtins, name, lambda *args, name=name: run.append(name))
    refusal(text)
    monkeypatch.undo()
    assert not run


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
@example("# coding: latin-1 é")
@example("1if")
@example("'\\d'")
def test_any_text_is_a_spec_or_a_spec_error(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python warns of some texts before it refuses them
        spec_or_spec_error(text)


WORDS = [*COMPONENTS, *"()=,.-+*:[]{}'\"\\#@ \n", *string.digits, "0.1", "nan", "inf", "1j"]
WORDS += ["k", "ratio", "scope", "exchange", "True", "None", "lambda", "'bf16'", "**", "f'", "b'"]
WORDS += ["é", "\uff4b"]


@settings(fast, max_examples=300)
@given(st.sampled_from(SPECS), st.data())
def test_a_spec_with_a_typo_is_a_spec_or_a_spec_error(text, data):
    position = data.draw(st.integers(0, len(text)))
    inserted = data.draw(st.sampled_from([*WORDS, ""]))
    removed = data.draw(st.integers(0, 3))
    spec_or_spec_error(text[:position] + inserted + text[position + removed :])
