"""Answers to names that people know from papers and other libraries.

They are not names of components, so that every method has one name. Errors say what to write.
"""

_ERROR_FEEDBACK = "ef(topk(0.01))"
_LOCAL_STEPS = "every(8)"
_DILOCO = 'every(500) with outer="nesterov(lr=0.7, momentum=0.9)"'

# Keys as returned by `plain`. Values are specs, a schedule with the outer step that goes with it,
# or, for what has no spec, a Python call.
SAME = {
    "int8": 'quantize("int8")',
    "8bit": 'quantize("int8")',
    "int4": 'quantize("int4")',
    "4bit": 'quantize("int4")',
    "bf16": 'cast("bf16")',
    "bfloat16": 'cast("bf16")',
    "fp16": 'cast("fp16")',
    "float16": 'cast("fp16")',
    "half": 'cast("fp16")',
    "none": "mean",
    "dense": "mean",
    "ddp": "mean",
    "allreduce": "mean",
    "errorfeedback": _ERROR_FEEDBACK,
    "memsgd": _ERROR_FEEDBACK,
    "randomk": "randk(0.01)",
    "lowrank": "powersgd(rank=2)",
    "localsgd": _LOCAL_STEPS,
    "fedavg": _LOCAL_STEPS,
    "diloco": _DILOCO,
    "jointspar": "JointSpar(model, budget=0.5)",
}
NEAREST = {
    "1bit": 'ef(quantize("int4"))',
    "1bitadam": 'ef(quantize("int4"))',
    "onebit": 'ef(quantize("int4"))',
    "onebitadam": 'ef(quantize("int4"))',
    "sign": 'ef(quantize("int4"))',
    "signsgd": 'ef(quantize("int4"))',
    "signum": 'ef(quantize("int4"))',
    "efsignsgd": 'ef(quantize("int4"))',
    "terngrad": 'quantize("int4", rounding="stochastic")',
    "qsgd": 'quantize("int8", rounding="stochastic")',
    "fp8": 'quantize("int8")',
    "adacomp": _ERROR_FEEDBACK,
    "threshold": _ERROR_FEEDBACK,
    "doublesqueeze": 'bidirectional(quantize("int4"), quantize("int4"))',
}


def answer(word: str, inside: bool = False) -> str | None:
    """Return what to write instead of `word`, or None if the tables do not have it.

    Args:
        word: the name.
        inside: whether a compressor is needed, as inside of ``ef(...)``.
    """
    name = plain(word)
    table = SAME if name in SAME else NEAREST
    text = table.get(name)
    if inside and text is not None:
        if text.startswith(("every", "JointSpar", "bidirectional", "powersgd")):
            return None
        text = "identity" if text == "mean" else text
        text = text.removeprefix("ef(").removesuffix(")") if text.startswith("ef(") else text
    if text is None:
        return None
    verb = "is written" if table is SAME else "is not available; the nearest is"
    remark = ": a schedule, for LocalSGD" if text.startswith("every") else ""
    return f"'{word}' {verb} {text}{remark}"


def plain(word: str) -> str:
    """Return a name without what spellings differ in: capitals, and signs between words."""
    return word.lower().replace("_", "").replace("-", "")
