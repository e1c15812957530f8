"""The common style of the report's charts: plotly traces and panels from curves."""

from typing import NamedTuple

import numpy as np

from tango_jax.tracking.curves import Series, score_range, smooth
from tango_jax.tracking.intervals import wilson

DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
FEW = 20  # cases; a rate of fewer is drawn small and pale


class Rates(NamedTuple):
    """Points of a curve of rates, x ascending: each with its 95 % interval and the number of cases."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def panel(title: str, caption: str, traces: list[dict], x: str, y: str = "", score: bool = False, **layout) -> dict:
    """`score`: the values are shares, and the y axis is limited to 0 and 1."""
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    values = [value for trace in traces for value in _extent(trace)]
    if score:
        axes["yaxis"]["range"] = list(score_range(min(values), max(values), 0.05)) if values else [-0.02, 1.02]
    elif values and min(values) == max(values):  # plotly would add 1 above and below, and draw 1e-5 as 0
        axes["yaxis"]["rangemode"] = "tozero"
    return {"title": title, "caption": caption, "traces": traces, "layout": axes | layout}


def with_content(panels: list[dict]) -> list[dict]:
    return [item for item in panels if item["traces"]]


def line(name: str, curve: Series, colour: str, style: str = "-", symbol: str = "circle") -> list[dict]:
    """A curve with a marker at every point; [] without points."""
    return [_trace(name, curve, colour, style) | {"mode": "lines+markers", "marker": {"symbol": symbol, "size": 7}}
            ] if len(curve.x) else []


def rated(name: str, rates: Rates, colour: str, style: str = "-", symbol: str = "circle") -> list[dict]:
    """A curve of rates with error bars; small pale markers where there are few cases."""
    found = line(name, Series(rates.x, rates.y), colour, style, symbol)
    for trace in found:
        is_few = rates.n < FEW
        trace["marker"] |= {"size": np.where(is_few, 4, 7).tolist(), "opacity": np.where(is_few, 0.45, 1.0).tolist()}
        trace["error_y"] = {"type": "data", "symmetric": False, "array": _short(rates.high - rates.y),
                            "arrayminus": _short(rates.y - rates.low), "thickness": 1, "width": 0,
                            "color": f"rgba({_rgb(colour)},0.45)"}
        trace |= _told(rates)
    return found


def share(name: str, curve: Series, count: int, colour: str, style: str = "-", symbol: str = "circle") -> list[dict]:
    bounds = np.array([wilson(value, count) for value in curve.y.tolist()]).reshape(-1, 2).T
    return rated(name, Rates(*curve, *bounds, np.full(len(curve.x), count)), colour, style, symbol)


def noisy(name: str, curve: Series, colour: str, style: str = "-") -> list[dict]:
    """A metric of every turn: the raw values faintly, and their running mean."""
    if not len(curve.x):
        return []
    faint = _trace(name, curve, colour, "-") | {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip"}
    faint["line"] = faint["line"] | {"width": 1}
    mean = _trace(name, Series(curve.x, smooth(curve.y)), colour, style)
    if len(curve.x) == 1:
        mean |= {"mode": "lines+markers", "marker": {"symbol": "circle", "size": 7}}
    return [faint, mean]


def band(low: Series, high: Series, colour: str) -> list[dict]:
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    return [
        edge | _xy(low),
        edge | _xy(high) | {"fill": "tonexty", "fillcolor": f"rgba({_rgb(colour)},0.15)"},
    ]


def bars(name: str, curve: Series | Rates, colour: str, pattern: str = "") -> list[dict]:
    if not len(curve.x):
        return []
    lines = {"shape": pattern, "size": 6, "solidity": 0.25, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.75)"}
    marker = {"color": colour, "pattern": lines}
    told = _told(curve) | {"textposition": "none"} if isinstance(curve, Rates) else {}
    return [{"type": "bar", "name": name, "marker": marker} | _xy(curve) | told]


def _trace(name: str, curve: Series, colour: str, style: str) -> dict:
    look = {"line": {"color": colour, "dash": DASHES[style], "width": 2}}
    return {"type": "scatter", "mode": "lines", "name": name} | look | _xy(curve)


def _told(rates: Rates) -> dict:
    columns = zip(rates.y, rates.low, rates.high, rates.n, strict=True)
    return {"text": [f"{y:.3f} [{low:.2f}, {high:.2f}], n = {n:,.0f}" for y, low, high, n in columns],
            "hovertemplate": "%{text}"}


def _rgb(colour: str) -> str:
    return ",".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


def _xy(curve: Series | Rates) -> dict:
    return {"x": _short(curve.x), "y": _short(curve.y)}


def _short(values: np.ndarray) -> list[float]:
    # More digits than a chart shows only enlarge the page.
    return [float(f"{value:.5g}") for value in np.asarray(values).tolist()]


def _extent(trace: dict) -> list[float]:
    values = [value for value in trace["y"] if value is not None]
    if "error_y" not in trace:
        return values
    ends = zip(values, trace["error_y"]["array"], trace["error_y"]["arrayminus"], strict=True)
    return [end for value, above, below in ends for end in (value + above, value - below)]
