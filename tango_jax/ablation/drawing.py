"""What the figures of an experiment have in common: families of settings, and the style of a panel."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tango_jax.arms import GREY
from tango_jax.tracking.learning_curve import Arms
from tango_jax.tracking.plots import DPI

WIDTH, HEIGHT = 8.0, 3.3  # inches
Settings = dict[tuple[str, str], Arms]  # (task, setting) -> arms


def pairs_of(setting: str) -> dict[str, str]:
    """The axes of the grid in a setting's name: {"words": "16", "verifier": "strong"} for words=16,verifier=strong."""
    return dict(part.split("=", 1) for part in setting.split(",") if "=" in part)


def families(settings: Settings, is_varied: Callable[[str], bool]) -> dict[tuple[str, str], dict[str, str]]:
    """Settings that are alike but for some axes: {(task, what they have in common): {setting: what differs}}.

    Only those are returned that differ in something.
    """
    found = {}
    for task, setting in settings:
        pairs = pairs_of(setting)
        common = ",".join(f"{axis}={label}" for axis, label in pairs.items() if not is_varied(axis))
        own = ",".join(f"{axis}={label}" for axis, label in pairs.items() if is_varied(axis))
        found.setdefault((task, common), {})[setting] = own or "as configured"
    return {key: members for key, members in found.items() if len(members) > 1}


def make_figure(width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10, fontweight="bold")
    return figure


def style(axes: Axes) -> None:
    axes.tick_params(labelsize=8, length=3, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def add_legend(figure: Figure, lines: Sequence, labels: Sequence[str]) -> None:
    figure.legend(lines, labels, fontsize=8, loc="outside lower center", ncols=min(len(labels), 3), frameon=False,
                  handlelength=3.4)  # fmt: skip


def title_of(task: str, setting: str) -> str:
    return ", ".join(filter(None, [task, setting.replace(",", ", ")]))
