"""Measured shares of devices' data sheet rates in this kind of work.

tests/support/published.py fits the numbers to configs/results/published.csv; predicted_times.md compares them.
"""

from typing import NamedTuple


class Shares(NamedTuple):
    update: float = 0.5  # of the products' rate, in a forward and backward pass
    score: float = 0.5  # in a forward pass over whole sequences
    prefill: float = 0.5  # in sampling: of prompts, and of a decode step's products
    read: float = 0.7  # of the memory's rate: weights and cache of a decode step, an optimizer's state


class Reached(NamedTuple):
    likely: Shares = Shares()
    quick: Shares = Shares()
    slow: Shares = Shares()
    basis: str = "shares are assumed, not measured"


GENERATIONS = {"a100-80gb": "a100", "a100-40gb": "a100", "h100": "h100", "h200": "h100", "tpu-v5p": "tpu-v5p",
               "tpu-v5e": "tpu-v5e", "tpu-v6e": "tpu-v6e", "cpu": "cpu"}
OTHER_GPUS = "other GPUs"  # not measured: the mean of the two that are known, and both of their intervals
# On one host: (slowest, most likely, quickest) of each kind of work.
MEASURED = {
    "a100": {"update": (0.40, 0.60, 0.76), "score": (0.40, 0.60, 0.76), "prefill": (0.37, 0.67, 0.68),
             "read": (0.48, 0.86, 0.92)},
    "h100": {"update": (0.28, 0.43, 0.50), "score": (0.27, 0.41, 0.47), "prefill": (0.33, 0.59, 0.60),
             "read": (0.45, 0.63, 0.79)},
    OTHER_GPUS: {"update": (0.28, 0.51, 0.76), "score": (0.28, 0.49, 0.74), "prefill": (0.33, 0.63, 0.94),
                 "read": (0.45, 0.73, 0.92)},
    "tpu-v5p": {"update": (0.78, 0.86, 0.93), "score": (0.78, 0.86, 0.93), "prefill": (0.24, 0.86, 0.93),
                "read": (0.39, 0.79, 0.99)},
    "tpu-v5e": {"update": (0.63, 0.69, 0.74), "score": (0.63, 0.69, 0.74), "prefill": (0.19, 0.69, 0.74),
                "read": (0.39, 0.79, 0.99)},
    "tpu-v6e": {"update": (0.50, 0.51, 0.55), "score": (0.50, 0.51, 0.55), "prefill": (0.14, 0.51, 0.55),
                "read": (0.39, 0.79, 0.99)},
    "cpu": {"update": (0.28, 0.60, 0.86), "score": (0.28, 0.59, 0.85), "prefill": (0.14, 0.65, 0.93),
            "read": (0.39, 0.75, 0.92)},
}
# Updates on several hosts of GPUs reach less: hosts to this power.
LOST_BY_HOSTS = -0.067


def reached(name: str, hosts: int) -> Reached:
    generation = GENERATIONS.get(name, OTHER_GPUS)
    measured = MEASURED[generation]
    lost = 1.0 if generation.startswith(("tpu", "cpu")) else hosts**LOST_BY_HOSTS
    slow, likely, quick = (
        Shares(**{kind: ends[place] * (lost if kind == "update" else 1.0) for kind, ends in measured.items()})
        for place in range(3)
    )
    basis = ", ".join(f"{kind} {at:.0%} ({low:.0%} to {high:.0%})"
                      for kind, low, at, high in zip(Shares._fields, slow, likely, quick, strict=True))
    return Reached(likely, quick, slow, basis if generation in name else f"{basis}, as {generation} were measured")
