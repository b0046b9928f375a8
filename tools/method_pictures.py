"""Draw the pictures of docs/methods: each method on three ranks, as it really ran.

Run it from the root of the repository, after a change of a method or a new one:

    python -m tools.method_pictures

Every number drawn comes from a run of torchcomp in one process, on random gradients with
fixed seeds: a common part that shrinks from entry to entry, plus noise for each rank.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchcomp
from torchcomp.specs.learning_rates import decaying

RANKS, ENTRIES, STEPS = 3, 18, 4
RESNET50 = 25_557_032  # parameters
WIDTH, COLUMN, GAP = 480, 148, 10
GREY, BLUE, ORANGE, INK = "#b4bcc6", "#2457c5", "#d2691e", "#333333"


# --- Runs -----------------------------------------------------------------------------------------


@dataclass
class Step:
    """The last step of one rank: its gradient, the mean, and the slots before and after it."""

    g: Tensor
    mean: Tensor
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def last_step(spec: str, shape: tuple[int, ...] = (ENTRIES,)) -> list[Step]:
    """Run some steps of a method and return the last one of every rank."""
    common = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    common *= torch.linspace(1.4, 0.4, shape[0]).view(-1, *[1] * (len(shape) - 1))

    def body(exchange: torchcomp.InProcessExchange) -> Step:
        averager = torchcomp.Averager(spec, exchange, {"w": torch.zeros(shape)})
        noise = torch.Generator().manual_seed(10 + exchange.rank)
        after: dict[str, Tensor] = {}
        for _ in range(STEPS):
            before, g = after, common + 0.5 * torch.randn(shape, generator=noise)
            mean = g.clone()
            averager.average_all({"w": mean})
            slots = averager.state_dict()["slots"]
            after = {name: slot["tensors"]["w"].clone() for name, slot in slots.items()}
        return Step(g, mean, before, after)

    return torchcomp.run_in_process(RANKS, body)


# --- Drawing --------------------------------------------------------------------------------------


@dataclass
class Picture:
    """Rows of three columns, one per rank, from the top down."""

    title: str
    parts: list[str] = field(default_factory=list)
    y: float = 0.0

    def text(self, x: float, text: str, *, size: int = 13, fill: str = INK, **more: str) -> None:
        attributes = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        start = f'<text x="{x:g}" y="{self.y:g}" font-size="{size}" fill="{fill}"{attributes}>'
        self.parts.append(f"{start}{text}</text>")

    def rect(self, x: float, y: float, w: float, h: float, fill: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}"/>'
        )

    def heading(self, text: str) -> None:
        self.y += 26
        self.text(GAP, text)

    def band(self, text: str) -> None:
        """Draw a collective: a bar across all ranks."""
        self.y += 14
        self.rect(GAP, self.y, WIDTH - 2 * GAP, 26, "#e3ebfb")
        self.y += 18
        self.text(WIDTH / 2, text, text_anchor="middle", font_weight="bold")
        self.y += 8

    def columns(self) -> None:
        self.y += 20
        for rank in range(RANKS):
            self.text(
                left(rank) + COLUMN / 2, f"rank {rank}", text_anchor="middle", font_weight="bold"
            )

    def bars(
        self,
        heading: str,
        rows: Sequence[Tensor],
        colour: str = GREY,
        *,
        marks: Sequence[Tensor] | None = None,
        scale: float,
    ) -> None:
        """Draw one vector per rank. Entries that are not 0 in `marks` are blue."""
        self.heading(heading)
        self.y += 34
        for rank, vector in enumerate(rows):
            step = COLUMN / len(vector)
            self.rect(left(rank), self.y, COLUMN, 0.6, "#777777")
            for i, value in enumerate(vector.tolist()):
                height = 26 * value / scale
                fill = BLUE if marks is not None and marks[rank][i] else colour
                top = self.y - max(height, 0)
                self.rect(left(rank) + i * step + 0.5, top, step - 1.5, abs(height), fill)
        self.y += 28

    def matrices(self, heading: str, rows: Sequence[Tensor], scale: float) -> None:
        """Draw one matrix per rank: blue is positive, orange is negative."""
        self.heading(heading)
        self.y += 8
        for rank, matrix in enumerate(rows):
            cell = COLUMN / matrix.shape[1]
            for i, row in enumerate(matrix.tolist()):
                for j, value in enumerate(row):
                    x, y = left(rank) + j * cell, self.y + i * cell
                    self.rect(x, y, cell - 0.5, cell - 0.5, shade(value / scale))
        self.y += cell * rows[0].shape[0] + 2

    def svg(self) -> str:
        height = self.y + 14
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
                f'width="{WIDTH}" height="{height:g}" font-family="Helvetica, Arial, sans-serif">',
                f"<title>{self.title}</title>",
                f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def left(rank: int) -> float:
    return GAP + rank * (COLUMN + (WIDTH - 2 * GAP - RANKS * COLUMN) / (RANKS - 1))


def shade(value: float) -> str:
    """Return white for 0, blue for 1, orange for -1, and mixtures between them."""
    end = (0x24, 0x57, 0xC5) if value > 0 else (0xD2, 0x69, 0x1E)
    weight = min(abs(value), 1.0)
    return "#" + "".join(f"{round(255 + (c - 255) * weight):02x}" for c in end)


def largest(*rows: Sequence[Tensor]) -> float:
    return max(float(x.abs().max()) for row in rows for x in row)


# --- The methods ----------------------------------------------------------------------------------


def error_feedback(spec: str, collective: str, sent: str, exact: bool = True) -> Picture:
    """Draw ``ef(C)``: g + e, what of it is sent, the new residual, and the mean."""
    steps = last_step(spec)
    x = [s.g + s.before["error"] for s in steps]
    message = [a - s.after["error"] for a, s in zip(x, steps, strict=True)]
    scale = largest(x)
    picture = Picture(f"One step of {spec} on three ranks")
    picture.columns()
    if exact:
        picture.bars(
            f"x = g + e; blue: {sent}", x, marks=[m.abs() > 1e-6 for m in message], scale=scale
        )
    else:
        picture.bars("x = g + e", x, scale=scale)
        picture.bars(f"message: {sent}", message, BLUE, scale=scale)
    picture.bars(
        "new residual e: what was not sent", [s.after["error"] for s in steps], ORANGE, scale=scale
    )
    picture.band(collective)
    picture.bars(
        "g: the mean of the messages, for the optimizer", [s.mean for s in steps], BLUE, scale=scale
    )
    return picture


def ef_topk() -> Picture:
    return error_feedback(
        "ef(topk(k=4))", "all-gather: every rank receives all messages", "the 4 largest, sent"
    )


def randk() -> Picture:
    return error_feedback(
        "ef(randk(k=4))",
        "all-reduce: the messages are added on the way",
        "4 random ones, the same on all ranks",
    )


def quantize() -> Picture:
    return error_feedback(
        'ef(quantize("int4"))',
        "all-gather: every rank receives all messages",
        "15 levels, one scale",
        False,
    )


def bidirectional() -> Picture:
    steps = last_step("bidirectional(topk(k=2), topk(k=2))")
    x = [s.g + s.before["error"] for s in steps]
    message = [a - s.after["error"] for a, s in zip(x, steps, strict=True)]
    shards = torch.arange(ENTRIES).tensor_split(RANKS)
    owned, rest = [], []
    for shard, step in zip(shards, steps, strict=True):
        rest.append(torch.zeros(ENTRIES).index_copy(0, shard, step.after["server_error"]))
        owned.append(rest[-1] + torch.zeros(ENTRIES).index_copy(0, shard, step.mean[shard]))
    sent = [(a - b).abs() > 1e-6 for a, b in zip(owned, rest, strict=True)]
    scale = largest(x, owned)
    picture = Picture("One step of bidirectional(topk(k=2), topk(k=2)) on three ranks")
    picture.columns()
    marks = [m.abs() > 1e-6 for m in message]
    picture.bars(
        "worker: x = g + e; blue: the 2 largest of each shard, sent", x, marks=marks, scale=scale
    )
    picture.bars("residual e of the worker", [s.after["error"] for s in steps], ORANGE, scale=scale)
    picture.band("all-to-all: entries go to the owner of their shard")
    picture.bars(
        "owner: s = mean of the messages + d; blue: the 2 largest, sent",
        owned,
        marks=sent,
        scale=scale,
    )
    picture.bars("server residual d of the owner", rest, ORANGE, scale=scale)
    picture.band("all-gather: every rank receives all downlink messages")
    picture.bars(
        "g: the downlink messages, for the optimizer", [s.mean for s in steps], BLUE, scale=scale
    )
    return picture


def powersgd() -> Picture:
    steps = last_step("powersgd(rank=2)", (9, 14))
    m = [s.g + s.before["error"] for s in steps]
    scale = largest(m)
    picture = Picture("One step of powersgd(rank=2) on three ranks")
    picture.columns()
    picture.matrices("M = g + e, 9 x 14", m, scale)
    picture.band("all-reduce of M Q, then of R: (9 + 14) x 2 numbers")
    picture.matrices(
        "g: P Q transposed, of rank 2, for the optimizer", [s.mean for s in steps], scale
    )
    picture.matrices(
        "new residual e = M - P R transposed", [s.after["error"] for s in steps], scale
    )
    return picture


def ef21() -> Picture:
    steps = last_step("ef21(topk(k=4))")
    before, after = (
        [s_["estimate"] for s_ in when]
        for when in zip(*[(s.before, s.after) for s in steps], strict=True)
    )
    difference = [s.g - b for s, b in zip(steps, before, strict=True)]
    marks = [(a - b).abs() > 1e-6 for a, b in zip(after, before, strict=True)]
    scale = largest(difference, [s.g for s in steps])
    picture = Picture("One step of ef21(topk(k=4)) on three ranks")
    picture.columns()
    picture.bars("gradient g", [s.g for s in steps], scale=scale)
    picture.bars("estimate s of it, from the step before", before, ORANGE, scale=scale)
    picture.bars(
        "difference g - s; blue: the 4 largest, sent", difference, marks=marks, scale=scale
    )
    picture.bars("new estimate s", after, ORANGE, scale=scale)
    picture.band("all-gather: every rank receives all messages")
    picture.bars(
        "g: the mean of all estimates, for the optimizer",
        [s.mean for s in steps],
        BLUE,
        scale=scale,
    )
    return picture


def dgc() -> Picture:
    spec = "dgc(topk(k=4), momentum=0.9)"
    steps = last_step(spec)
    velocity = [0.9 * s.before["momentum"] + s.g for s in steps]
    total = [s.before["error"] + u for s, u in zip(steps, velocity, strict=True)]
    marks = [(v - s.after["error"]).abs() > 1e-6 for v, s in zip(total, steps, strict=True)]
    scale = largest(velocity, total)
    picture = Picture(f"One step of {spec} on three ranks")
    picture.columns()
    picture.bars("velocity u = 0.9 u + g", velocity, scale=scale)
    picture.bars("v = v + u; blue: the 4 largest, sent", total, marks=marks, scale=scale)
    picture.bars("new residual v", [s.after["error"] for s in steps], ORANGE, scale=scale)
    picture.bars(
        "new velocity u: 0 where an entry was sent",
        [s.after["momentum"] for s in steps],
        ORANGE,
        scale=scale,
    )
    picture.band("all-gather: every rank receives all messages")
    picture.bars("g: the mean of the messages, for SGD", [s.mean for s in steps], BLUE, scale=scale)
    return picture


# --- Plots ----------------------------------------------------------------------------------------


def local_sgd() -> Picture:
    """Draw a tick for every synchronisation of five schedules."""
    run: dict[str, Any] = {"total_steps": 300, "warmup_steps": 20}
    lr = decaying("cosine", peak=0.1, final=1e-6, **run)
    specs = ("every(8)", "qsr(alpha=0.2, h_base=4)", "power(coef=0.2, exponent=3, h_base=4)")
    specs += ("post_local(switch=100, h=8)", "swap(switch=225)")
    picture = Picture("When five schedules average the weights, over 300 steps")
    picture.heading("learning rate: 20 steps of warm-up, then cosine")
    picture.y += 46
    wide = (WIDTH - 2 * GAP) / run["total_steps"]
    points = " ".join(
        f"{GAP + t * wide:.1f},{picture.y - 380 * lr(t):.1f}" for t in range(0, 300, 4)
    )
    picture.parts.append(
        f'<polyline points="{points}" fill="none" stroke="{INK}" stroke-width="1.5"/>'
    )
    for spec in specs:
        steps = torchcomp.sync_steps(spec, lr=lr, **run)
        picture.heading(f"{spec}: {len(steps)} averages")
        picture.y += 8
        picture.rect(GAP, picture.y + 22, WIDTH - 2 * GAP, 0.6, "#777777")
        for step in steps:
            picture.rect(GAP + step * wide - 0.9, picture.y, 0.9, 22, BLUE)
        picture.y += 22
    picture.y += 16
    picture.text(GAP, "step 0", size=12)
    picture.text(WIDTH - GAP, "step 300", size=12, text_anchor="end")
    return picture


def traffic() -> Picture:
    """Draw megabytes per step against ranks, both on logarithmic axes."""
    curves = {
        "mean": "#333333",
        'quantize("int8")': "#8a5a00",
        'cast("bf16")': "#6b7280",
        "ef(topk(0.01))": "#2457c5",
        'ef(topk(0.01, values="int8"))': "#0f766e",
        "bidirectional(topk(0.01), topk(0.01))": "#b42318",
    }
    worlds = (2, 4, 8, 16, 32, 64, 128, 256)
    low, high, top, height = 0.1, 10_000.0, 36, 300
    picture = Picture("Megabytes that a rank sends per step against the number of ranks, ResNet-50")
    picture.y = 20
    picture.text(GAP, "MB that a rank sends per step, ResNet-50")

    def x(ranks: float) -> float:
        return 56 + (math.log2(ranks) - 1) / 7 * (WIDTH - 80)

    def y(megabytes: float) -> float:
        return top + height * math.log(high / megabytes) / math.log(high / low)

    for megabytes in (0.1, 1, 10, 100, 1000, 10_000):
        picture.rect(56, y(megabytes), WIDTH - 80, 0.6, "#dddddd")
        picture.y = y(megabytes) + 4
        picture.text(50, f"{megabytes:,g}", size=12, text_anchor="end")
    for ranks in worlds:
        picture.y = top + height + 18
        picture.text(x(ranks), str(ranks), size=12, text_anchor="middle")
    picture.y += 18
    picture.text(WIDTH / 2, "ranks", size=12, text_anchor="middle")
    for spec, colour in curves.items():
        sent = [
            torchcomp.explain(spec, numel=RESNET50, world_size=n).bytes_sent / 1e6 for n in worlds
        ]
        points = " ".join(f"{x(n):.1f},{y(mb):.1f}" for n, mb in zip(worlds, sent, strict=True))
        picture.parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        picture.y += 20
        picture.rect(56, picture.y - 5, 22, 3, colour)
        picture.text(86, spec.replace('"', "&quot;"), size=13)
    return picture


PICTURES = {
    "ef-topk": ef_topk,
    "bidirectional": bidirectional,
    "randk": randk,
    "quantize-cast": quantize,
    "powersgd": powersgd,
    "ef21": ef21,
    "dgc": dgc,
    "local-sgd": local_sgd,
    "traffic": traffic,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/methods"), help="folder of the pictures"
    )
    out = parser.parse_args().out
    for name, draw in PICTURES.items():
        (out / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
