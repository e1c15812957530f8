"""Data behind the figures: curves from metrics rows, running means, and curves of several seeds."""

import itertools
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from tango_jax.method.arms import GREY, SKY, Look
from tango_jax.tracking.known_arms import record_of

MARKERS = {
    "circle": "o", "square": "s", "triangle-up": "^", "triangle-down": "v", "diamond": "D", "cross": "P", "x": "X",
}
SCORES = {"Generator: accuracy": "generator/accuracy", "Verifier: step F1": "verifier/pool/step_f1",
          "Verifier: outcome F1": "verifier/pool/outcome_f1"}
SPARE_LOOKS = (Look(SKY, ":", "x"), Look(GREY, "--", "x"), Look("#000000", ":", "x"))
SMOOTHING_SHARE = 12  # the smoothing window is one twelfth of a curve's points
LEAST_SPAN = 0.2  # minimum range of a score's axis: a flat curve looks flat


def label_of(arm: str) -> str:
    record = record_of(arm)
    return record.label if record else arm


def looks_of(arms: Iterable[str]) -> dict[str, Look]:
    spare = itertools.cycle(SPARE_LOOKS)
    return {arm: record.look if (record := record_of(arm)) else next(spare) for arm in arms}


class Series(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def series(rows: Iterable[dict], phases: Collection[str], x_name: str, y_name: str) -> Series:
    """Points that have both values, by x; of two rows with one x, the later counts. A verifier that does not write has
    no length of responses."""
    role, _, figure = y_name.rpartition("/")
    written = [row for row in rows if figure != "length_mean" or row.get(f"{role}/tokens_sampled") != 0]
    points = {row[x_name]: row[y_name] for row in written
              if row.get("phase") in phases and row.get(x_name) is not None and row.get(y_name) is not None}
    x = sorted(points)
    return Series(np.array(x, float), np.array([points[key] for key in x], float))


def smooth(y: np.ndarray) -> np.ndarray:
    """Centred running mean whose window shrinks towards the ends."""
    half = len(y) // SMOOTHING_SHARE // 2
    sums = np.concatenate([[0.0], np.cumsum(y)])
    middle = np.arange(len(y))
    reach = np.minimum(half, np.minimum(middle, len(y) - 1 - middle))
    return (sums[middle + reach + 1] - sums[middle - reach]) / (2 * reach + 1)


def score_range(low: float, high: float, least_margin: float = 0.0) -> tuple[float, float]:
    """Axis range for scores: within 0 and 1, and never so narrow that noise looks like progress."""
    spare = max(LEAST_SPAN - (high - low), least_margin) / 2
    return max(min(low - spare, 1.02 - LEAST_SPAN), -0.02), min(max(high + spare, LEAST_SPAN - 0.02), 1.02)


def over_seeds(seeds: Iterable[list[dict]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The x values common to all seeds that have the metric, and the values [seed, point] there."""
    seeds = [[row for row in rows if row.get("phase") == "eval" and row.get("generator_step") is not None]
             for rows in seeds]
    # A run in its warm-up does not show the warm-up's length.
    warmup = max((row["step"] for rows in seeds for row in rows if row["generator_step"] == 0), default=0)
    # Turns before the first one of the generator have negative numbers.
    counted = ([row | {"x": row["generator_step"] or row["step"] - warmup} for row in rows] for rows in seeds)
    return at_common_x(series(rows, {"eval"}, "x", name) for rows in counted)


def at_common_x(curves: Iterable[Series]) -> tuple[np.ndarray, np.ndarray]:
    """The x values common to all curves with points, and their values [curve, point] there."""
    curves = [curve for curve in curves if curve.x.size]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    x = curves[0].x
    for curve in curves[1:]:
        x = np.intersect1d(x, curve.x)
    return x, np.array([curve.y[np.isin(curve.x, x)] for curve in curves])
