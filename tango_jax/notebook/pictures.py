"""Figures of the data in the loop: tokens as coloured boxes, packed rows as grids, bar charts by parameter."""

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import PIL.Image
from IPython.display import Image
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tango_jax.method.arms import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.tracking.plots import make_figure, png_of

WIDTH_INCHES, DPI = 10.0, 100
COLUMNS = 128  # characters per line of tokens
FONT, FONT_SIZE, NOTE_SIZE = "DejaVu Sans Mono", 8.5, 6.0
TITLE, LABEL, BOX, NOTE, GAP = 2.1, 1.7, 1.5, 0.95, 0.35  # heights in lines of text
LINE_INCHES = 0.135
SIGNED = LinearSegmentedColormap.from_list("signed", [VERMILION, "#FFFFFF", BLUE])
LIGHT = {"blue": "#BFDDF0", "orange": "#F7DDA6", "green": "#A9DCC9", "red": "#F3BF9C", "grey": "#E4E4E4"}
SIGNS = str.maketrans({"\n": "↵", "\t": "→", "$": r"\$"})  # an unescaped "$" would start a formula
KNOWN_LETTERS = 0x530  # the font covers Latin, Greek and Cyrillic below this code point, and KNOWN_SIGNS
KNOWN_SIGNS = "↵→∅"


class Strip(NamedTuple):
    label: str
    texts: Sequence[str]
    colours: Sequence | None = None  # one per piece; None: all grey
    notes: Sequence[str] | None = None  # small text below each piece
    marked: Sequence[int] = ()  # indices of pieces with a thick border


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return texts_between(*tokenizer.decode_with_ends(ids))


def texts_between(text: str, token_ends: Sequence[int]) -> list[str]:
    """A text's pieces by token; ∅ marks tokens without text (special tokens, parts of a character)."""
    return [text[start:end] or "∅" for start, end in pairwise((0, *token_ends))]


def piece_of_tokens(token_ends: Sequence[int], spans: Sequence[Sequence[int]]) -> list[int | None]:
    """Index of the character span in which each token ends, or None."""
    return [next((k for k, (start, end) in enumerate(spans) if start < last <= end), None) for last in token_ends]


def signed_colours(values: Sequence[float], limit: float = 0.0) -> list:
    """Blue above 0, vermilion below, white at 0; saturated at +-limit or at the largest magnitude."""
    limit = max(limit, np.abs(values).max(initial=0.0), 1e-12)
    return [SIGNED(0.5 + 0.35 * value / limit) for value in values]


def share_colours(values: Sequence[float]) -> list:
    """White at 1, orange at 0."""
    pale = LinearSegmentedColormap.from_list("share", [ORANGE, "#FFFFFF"])
    return [pale(float(value)) for value in values]


def token_figure(title: str, strips: Sequence[Strip], legend: Mapping[str, str] = {}) -> Figure:  # noqa: B006
    """Strips below each other, wrapped at the page width. `legend`: {colour: meaning}."""
    places, height = [], TITLE + (LABEL if legend else 0.0)
    for strip in strips:
        height += LABEL
        line, column = height, 0.0
        step = BOX + GAP + (NOTE if strip.notes else 0.0)
        for index, text in enumerate(strip.texts):
            note = strip.notes[index] if strip.notes else ""
            width = max(len(text), NOTE_SIZE / FONT_SIZE * len(note)) + 0.5
            if column and column + width > COLUMNS:
                line, column = line + step, 0.0
            places.append((strip, index, column, line, width))
            column += width + 0.2
        height = line + step
    figure, axes = _page(title, height)
    if legend:
        _draw_legend(axes, TITLE, legend)
    for strip, index, x, top, width in places:
        if index == 0:
            axes.text(0, top - 0.35, _printable(strip.label), fontsize=FONT_SIZE, fontweight="bold", va="bottom")
        _draw_piece(axes, strip, index, x, top, width)
    return figure


def _draw_piece(axes: Axes, strip: Strip, index: int, x: float, top: float, width: float) -> None:
    colour = strip.colours[index] if strip.colours is not None else LIGHT["grey"]
    is_marked = index in strip.marked
    box = Rectangle((x, top), width, BOX, facecolor=colour, edgecolor="black" if is_marked else "#AAAAAA",
                    linewidth=1.8 if is_marked else 0.5, zorder=3 if is_marked else 2)
    axes.add_patch(box)
    middle = x + width / 2
    axes.text(middle, top + BOX / 2, _with_blanks(strip.texts[index]), family=FONT, fontsize=FONT_SIZE, ha="center",
              va="center_baseline", zorder=4)
    if strip.notes:
        axes.text(middle, top + BOX + NOTE / 2, strip.notes[index], family=FONT, fontsize=NOTE_SIZE, ha="center",
                  va="center", color="#444444")


def _draw_legend(axes: Axes, top: float, legend: Mapping[str, str]) -> None:
    x = 0.0
    for colour, text in legend.items():
        axes.add_patch(Rectangle((x, top), 2.0, 1.0, facecolor=colour, edgecolor="#AAAAAA", linewidth=0.5))
        axes.text(x + 2.6, top + 0.5, text, fontsize=FONT_SIZE - 1, va="center")
        x += 4.5 + 0.95 * len(text)


def rollout_figure(rows: Sequence[dict]) -> Figure:
    """Rollouts of a dump (rollout_dump.read_rollouts): judgement and reward by step, advantage of its last token."""
    strips = []
    for row in rows:
        verification = (row["verifications"] or [{"judgements": [], "verdict": "none", "is_aligned": False}])[0]
        # Other judgements than steps: which belongs to which step is not known.
        judgements = dict(enumerate(verification["judgements"] if verification["is_aligned"] else ()))
        texts, colours, notes = [], [], []
        for start, end, step in _pieces(row["solution"]):
            judgement = judgements.get(step)
            text = row["solution"]["text"][start:end]
            chunks = [text[at : at + COLUMNS - 4] for at in range(0, len(text), COLUMNS - 4)]
            texts += chunks
            colours += [LIGHT[{True: "green", False: "red", None: "grey"}[judgement]]] * len(chunks)
            notes += [""] * (len(chunks) - 1) + [_step_note(row, step, judgement, end)]
        answer = "right" if row["solution"]["is_correct"] else "wrong"
        label = f"sample {row['sample']}: answer {answer}, verdict {verification['verdict']}"
        strips.append(Strip(f"{label}, reward {row['reward']['total']:.2f}", texts, colours, notes))
    problem = rows[0]["problem"]
    title = f"{problem['question'][:90]}   gold answer {problem['answer']}   (turn {rows[0]['turn']})"
    return token_figure(title, strips, {LIGHT["green"]: "judged CORRECT", LIGHT["red"]: "judged INCORRECT"})


def _pieces(solution: dict) -> list[tuple[int, int, int | None]]:
    """(start, end, step or None): steps, and the text between them."""
    pieces, position = [], 0
    for step, (start, end) in enumerate(solution["steps"]):
        pieces += [(position, start, None), (start, end, step)]
        position = end
    pieces.append((position, len(solution["text"]), None))
    return [(start, end, step) for start, end, step in pieces if solution["text"][start:end].strip()]


def _step_note(row: dict, step: int | None, judgement: bool | None, end: int) -> str:
    advantage = next((value for _, value, last in row["advantage"]["total"] if last >= end), 0.0)
    if step is None or row["role"] == "verifier":
        return f"advantage {advantage:+.2f}" if step is None and row["role"] == "generator" else ""
    rewards = (row["step_rewards"] or [None])[0]
    reward = "" if rewards is None or rewards[step] is None else f" {rewards[step]:+.2f}"  # None: not judged
    judged = {True: "CORRECT", False: "INCORRECT", None: "not judged"}[judgement]
    mark = judged if row["verifications"] else "label" * bool(reward)
    return ", ".join(filter(None, [mark + reward, f"advantage {advantage:+.2f}"]))


def grid_figure(title: str, panels: Sequence[tuple[str, np.ndarray, str]]) -> Figure:
    """Packed rows as one image per panel (heading, values_RT, kind), rows down and tokens across.

    `kind`: "segments" (0 is padding, others have colours) or "signed" (blue above 0, vermilion below).
    """
    rows = panels[0][1].shape[0]
    figure = make_figure(_printable(title), WIDTH_INCHES, 0.5 + len(panels) * (0.55 + 0.16 * rows), DPI)
    for axes, (heading, values_RT, kind) in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels,
                                                strict=True):
        axes.set_title(heading, fontsize=9, loc="left")
        if kind == "segments":
            colours = ["#F4F4F4", SKY, ORANGE, GREEN, GREY]
            shown = np.where(values_RT > 0, 1 + (values_RT - 1) % 4, 0)
            axes.imshow(shown, cmap=ListedColormap(colours), vmin=0, vmax=4, aspect="auto", interpolation="nearest")
        else:
            limit = max(float(np.abs(values_RT).max()), 1e-12)
            image = axes.imshow(values_RT, cmap=SIGNED, norm=Normalize(-limit, limit), aspect="auto",
                                interpolation="nearest")
            figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03).ax.tick_params(labelsize=7)
        axes.set_ylabel("row", fontsize=8)
        axes.tick_params(labelsize=7)
    axes.set_xlabel("token in the row", fontsize=8)
    return figure


def bars_figure(title: str, values: Mapping[str, float], label: str) -> Figure:
    figure = make_figure("", WIDTH_INCHES, 0.9 + 0.2 * len(values), DPI)
    axes = figure.subplots()
    axes.set_title(_printable(title), fontsize=10, fontweight="bold", loc="left")
    bars = axes.barh(list(values), list(values.values()), color=BLUE, height=0.7)
    axes.bar_label(bars, fmt="%.2g", fontsize=7, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def loss_figure(losses: Mapping[str, Sequence[dict]], title: str) -> Figure:
    figure = make_figure("", WIDTH_INCHES, 2.6, DPI)
    axes = figure.subplots()
    axes.set_title(_printable(title), fontsize=10, fontweight="bold")
    for (role, rows), colour, style in zip(losses.items(), (VERMILION, BLUE), ("-", "--"), strict=False):
        points = [(row["step"], row[f"{role}/sft_heldout_loss"]) for row in rows if row["phase"] == "sft"]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=3.5, label=role)
    axes.set_yscale("log")
    axes.set_xlabel("stage 1 step", fontsize=8)
    axes.set_ylabel("held-out loss, nats per token", fontsize=8)
    axes.tick_params(labelsize=8, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def show(figure: Figure) -> Image:
    """A figure as a cell's output, with a colour palette: a third of the bytes."""
    saved = io.BytesIO()
    # MAXCOVERAGE keeps the values of a colour bar apart.
    method, dither = PIL.Image.Quantize.MAXCOVERAGE, PIL.Image.Dither.NONE
    drawn = PIL.Image.open(io.BytesIO(png_of(figure))).convert("RGB")
    drawn.quantize(256, method=method, kmeans=1, dither=dither).save(saved, "png", optimize=True)
    return Image(data=saved.getvalue(), format="png")


def _page(title: str, height: float) -> tuple[Figure, Axes]:
    """An empty page, in characters across and lines down."""
    figure = make_figure("", WIDTH_INCHES, LINE_INCHES * (height + 0.4), DPI, layout="none")
    axes = figure.add_axes((0.01, 0, 0.98, 1))
    axes.set_xlim(0, COLUMNS + 1)
    axes.set_ylim(height + 0.4, 0)
    axes.axis("off")
    axes.text(0, 0.3, _printable(title), fontsize=10, fontweight="bold", va="top")
    return figure, axes


def _with_blanks(text: str) -> str:
    inner = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    return _printable("·" * before + inner + "·" * (len(text) - before - len(inner)))


def _printable(text: str) -> str:
    shown = text.translate(SIGNS)
    return "".join(c if c in KNOWN_SIGNS or (c.isprintable() and ord(c) < KNOWN_LETTERS) else "?" for c in shown)
