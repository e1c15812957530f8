"""How the shares of tango_jax/planning/shares.py follow from configs/results/published.csv. Prints every measurement
beside what is predicted for it, as predicted_times.md in that folder has them.

PYTHONPATH=tests python -m support.published

A row's seconds are those of planning/time_model.py: the same FLOPs, bytes and parts of a decode step as in any plan.
Lengths are equal, or, where the row names the longest, exponentially distributed with its mean and cut there. What is
sent between devices is not counted: it is in the shares of several hosts.

Rows marked `fitted` give the shares, one for each generation of devices and kind of work, by least squares of
logarithms: the geometric mean of the shares that the rows have reached. Updates on several hosts of GPUs reach less, by
a power of the hosts' number that is fitted with them. Rows marked `held out` are predicted. A kind of work that nobody
has measured on a device takes the share of the nearest kind there, or else the mean of the other devices of its
platform.
"""

import csv
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from support.paths import ROOT
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import MicroBatchShape, num_parameters, prefill_flops, score_flops, update_flops
from tango_jax.planning.shares import GENERATIONS, Shares
from tango_jax.planning.targets import TARGETS, Target
from tango_jax.planning.time_model import TimeModel

ROWS_FILE = ROOT / "configs/results/published.csv"
# A GPU that others have measured on and that is no target of a plan; NVIDIA's data sheet. verl's log does not name it:
# by its own count it reaches 0.78 of a rate, which its seconds and tokens make 148 TFLOP/s.
H20 = dataclasses.replace(TARGETS["h100"], name="h20", flops=148e12, flops_float32=74e12, read=4.0e12)
# Vocabulary, width, layers, heads, key heads, MLP; head dim 128 and a head of its own in all of them.
MODELS = {
    "Llama-2-7B": (32000, 4096, 32, 32, 32, 11008),
    "Llama-2-13B": (32000, 5120, 40, 40, 40, 13824),
    "Llama-2-70B": (32000, 8192, 80, 64, 8, 28672),
    "Llama-3.1-8B": (128256, 4096, 32, 32, 8, 14336),
    "Llama-3.1-70B": (128256, 8192, 80, 64, 8, 28672),
    "Llama-3.1-405B": (128256, 16384, 126, 128, 8, 53248),
    "Mistral-7B": (32000, 4096, 32, 32, 8, 14336),
    "Qwen2.5-7B": (152064, 3584, 28, 28, 4, 18944),  # Qwen2-7B, too
    "Qwen2.5-72B": (152064, 8192, 80, 64, 8, 29568),
    "Qwen3-8B": (151936, 4096, 36, 32, 8, 12288),
    "Qwen3-14B": (151936, 5120, 40, 40, 8, 17408),
}
_QUANTILES = 16  # lengths that stand for a distribution in an update or a score


class Row(NamedTuple):
    """One published measurement: a line of published.csv."""

    use: str  # fitted or held out
    kind: str  # update, score, prefill, sample (prompts and responses), decode (one step), step (all three)
    device: str
    devices: int
    model: str
    tensor: int  # devices that share weights while sampling
    rows: int  # sequences of all devices
    slots: int  # of them, how many are sampled at a time; 0: all
    prompt: int  # tokens
    response: int  # tokens, on average
    longest: int  # tokens of the longest response; 0: all are equal
    passes: int  # of scores, over all rows
    remat: str
    measured: float
    unit: str  # s, ms, tokens/s of a device, or TFLOP/s of a device as MaxText counts them
    what: str
    source: str

    @property
    def target(self) -> Target:
        return H20 if self.device == H20.name else TARGETS[self.device]

    @property
    def hosts(self) -> int:
        return max(1, self.devices // self.target.per_host)

    @property
    def model_config(self) -> ModelConfig:
        return model_of(self.model, self.remat)

    @property
    def attention(self) -> str:
        return "splash" if self.target.platform == "tpu" else "cudnn"

    @property
    def groups(self) -> float:
        """Groups of devices that sample on their own."""
        return self.devices / self.tensor

    @property
    def seconds(self) -> float:
        """What was measured, in seconds of all the row's work."""
        return self._work / self.measured if self._work else self.measured * _TIMES[self.unit]

    def in_unit(self, seconds: float) -> float:
        """Such seconds, as the source would give them."""
        return self._work / seconds if self._work else seconds / _TIMES[self.unit]

    @property
    def _work(self) -> float:
        """What is divided by seconds to give the unit, if it is a rate."""
        if self.unit == "tokens/s":
            return self.rows * (self.response + (0 if self.kind == "sample" else self.prompt)) / self.devices
        if self.unit == "TFLOP/s":
            # Six a parameter and token, and attention between all pairs of a sequence, forwards and backwards.
            model, length = self.model_config, self.prompt + self.response
            weights = num_parameters(model) - model.vocab_size * model.width
            attention = 12 * model.num_layers * length * model.num_heads * model.head_dim
            return self.rows * length * (6 * weights + attention) / self.devices / 1e12
        return 0.0


_TIMES = {"s": 1.0, "ms": 1e-3}


@functools.cache
def model_of(name: str, remat: str = "none") -> ModelConfig:
    """All in 16 bits."""
    *sizes, mlp_width = MODELS[name]
    return ModelConfig(*sizes, 128, mlp_width, tied_head=False, compute_dtype="bfloat16", head_dtype="bfloat16",
                       remat=remat)


@functools.cache
def published_rows() -> tuple[Row, ...]:
    """All of published.csv, in its order."""
    with ROWS_FILE.open(encoding="utf-8", newline="") as file:
        kinds = Row.__annotations__
        return tuple(Row(**{name: kinds[name](text) for name, text in line.items()}) for line in csv.DictReader(file))


def predicted_seconds(row: Row, shares: Shares) -> float:
    """Of the row's work on its device, which reaches these shares of its rates."""
    times = TimeModel(row.target.with_shares(shares))
    return sum(part(row, times) for part in _PARTS[row.kind])


def _update_seconds(row: Row, times: TimeModel) -> float:
    return _training_seconds(row, times, "update")


def _score_seconds(row: Row, times: TimeModel) -> float:
    return row.passes * _training_seconds(row, times, "score")


def _training_seconds(row: Row, times: TimeModel, kind: str) -> float:
    """Products of all rows, shared evenly by the devices."""
    model, seconds, lengths = row.model_config, 0.0, response_lengths(row)
    for length in lengths:
        shape = (model, MicroBatchShape(1, row.prompt + round(length)), 1, row.attention)
        flops = update_flops(*shape, is_chunked=False) if kind == "update" else score_flops(*shape)
        seconds += times.matmul_seconds(flops, model, kind)
    return seconds * row.rows / len(lengths) / row.devices


def _prefill_seconds(row: Row, times: TimeModel) -> float:
    model = row.model_config
    flops = prefill_flops(model, row.rows / row.groups, row.prompt, row.tensor, row.attention)
    return times.matmul_seconds(flops, model, "prefill")


def _decode_seconds(row: Row, times: TimeModel) -> float:
    """One step, in the middle of the responses."""
    return _step_seconds(row, times, row.rows / row.groups, row.response / 2)


def _responses_seconds(row: Row, times: TimeModel) -> float:
    """All decode steps. Rows that have ended cost nothing: servers fill their places or shrink the batch."""
    rows = row.rows / row.groups
    if row.slots:
        steps = rows * row.response / (row.slots / row.groups)
        return steps * _step_seconds(row, times, row.slots / row.groups, row.response / 2)
    if not row.longest:
        return (row.response - 1) * _step_seconds(row, times, rows, row.response / 2)
    scale, seconds, begin = _scale(row), 0.0, 0.0
    # The longest of so many, on average (a sum of 1/k); all wait for it.
    end = min(row.longest, scale * (math.log(row.rows) + np.euler_gamma))
    for step in np.linspace(0.0, 1.0, 25)[1:] ** 2 * end:
        alive = rows * scale * (math.exp(-begin / scale) - math.exp(-step / scale)) / (step - begin)
        seconds += (step - begin) * _step_seconds(row, times, max(1.0, alive), (begin + step) / 2)
        begin = step
    return seconds


def _step_seconds(row: Row, times: TimeModel, rows: float, new: float) -> float:
    return times.step_seconds(row.model_config, rows, row.prompt, rows, new, row.tensor)


def response_lengths(row: Row) -> np.ndarray:
    """Tokens of responses that stand for the row's; their mean is about the row's."""
    if not row.longest:
        return np.array([float(row.response)])
    quantiles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return np.minimum(row.longest, -_scale(row) * np.log(1 - quantiles))


@functools.cache
def _scale(row: Row) -> float:
    """Of the exponential distribution whose mean, once it is cut at `longest`, is `response`."""
    scale = float(row.response)
    for _ in range(50):
        scale = row.response / (1 - math.exp(-row.longest / scale))
    return scale


_SAMPLE = (_prefill_seconds, _responses_seconds)
_PARTS = {
    "update": (_update_seconds,),
    "score": (_score_seconds,),
    "prefill": (_prefill_seconds,),
    "decode": (_decode_seconds,),
    "sample": _SAMPLE,
    "step": (*_SAMPLE, _score_seconds, _update_seconds),
}


# Which share a row of each kind tells; of sampling, what is left when its products are known.
TELLS = {"update": "update", "score": "score", "prefill": "prefill", "sample": "read", "decode": "read"}
_NEAREST = {"score": "update", "prefill": "score"}
FEW = 5  # with fewer rows of a kind on a device, those of other devices bound its times, too
LEAST_SHARE, MOST_SHARE = 1e-4, 4.0  # between which one is looked for


class Fit(NamedTuple):
    """Shares by generation and name, on one host, and the power of the number of hosts by which updates lose."""

    shares: dict[tuple[str, str], float]
    decline: float

    def of(self, target: Target, hosts: int) -> Shares:
        """What the target reaches on so many hosts."""
        found = {name: self.share(target, name) for name in Shares._fields}
        if target.platform == "gpu":
            found["update"] *= hosts**-self.decline
        return Shares(**found)

    def share(self, target: Target, name: str) -> float:
        """On one host: the target's own, or the mean of the others."""
        if own := self._known(generation(target.name), name):
            return own
        others = list(self.others(target, name).values())
        return math.exp(np.mean(np.log(others))) if others else getattr(Shares(), name)

    def others(self, target: Target, name: str) -> dict[str, float]:
        """{generation: share} of the targets of the same platform; for a CPU, of all."""
        like = {generation(one.name) for one in TARGETS.values() if target.platform in ("cpu", one.platform)}
        return {one: share for one in sorted(like) if (share := self._known(one, name))}

    def is_known(self, device: str, name: str) -> bool:
        """Whether the generation has been measured, in this kind of work or in the nearest."""
        return self._known(device, name) is not None

    def _known(self, device: str, name: str) -> float | None:
        """The share of a generation, or of its nearest kind of work."""
        while (device, name) not in self.shares and name in _NEAREST:
            name = _NEAREST[name]
        return self.shares.get((device, name))

    def is_measured(self, target: Target, name: str) -> bool:
        return (generation(target.name), name) in self.shares


def generation(device: str) -> str:
    """What a device shares its shares with."""
    return GENERATIONS.get(device, device)


def fit(rows: Iterable[Row]) -> Fit:
    """The shares that the fitted rows tell."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.use == "fitted":
            by_name.setdefault(TELLS[row.kind], []).append(row)
    shares, decline = _fit_updates(by_name.pop("update"))
    for name in ("score", "prefill", "read"):  # sampling's products are known when it is asked how memory is read
        found: dict[str, list[float]] = {}
        for row in by_name.get(name, []):
            device = generation(row.device)
            known = Fit(shares, decline)
            others = {other: known._known(device, other) or 1.0 for other in Shares._fields if other != name}
            found.setdefault(device, []).append(math.log(reached_share(row, Shares(**others), name)))
        shares = shares | {(device, name): math.exp(np.mean(logs)) for device, logs in found.items()}
    return Fit(shares, decline)


def _fit_updates(rows: list[Row]) -> tuple[dict[tuple[str, str], float], float]:
    """log share = that of the generation - decline x log(hosts) on GPUs, by least squares."""
    devices = sorted({generation(row.device) for row in rows})
    inputs = np.array([[*(generation(row.device) == device for device in devices),
                        -math.log(row.hosts) if row.target.platform == "gpu" else 0.0] for row in rows])
    logs = np.log([reached_share(row, Shares(), "update") for row in rows])
    *found, decline = np.linalg.lstsq(inputs, logs, rcond=None)[0]
    return {(device, "update"): math.exp(log) for device, log in zip(devices, found, strict=True)}, float(decline)


def reached_share(row: Row, shares: Shares, name: str) -> float:
    """The share of that name with which the row would be predicted exactly; the others are given."""
    return solved(lambda share: predicted_seconds(row, shares._replace(**{name: share})), row.seconds)


def solved(seconds_fn: Callable[[float], float], seconds: float) -> float:
    """The share at which `seconds_fn`, which falls with it, gives these seconds; at most MOST_SHARE and at least
    LEAST_SHARE."""
    low, high = math.log(LEAST_SHARE), math.log(MOST_SHARE)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds_fn(math.exp(middle)) > seconds else (low, middle)
    return math.exp((low + high) / 2)


@functools.cache
def published_fit() -> Fit:
    """That of published.csv."""
    return fit(published_rows())


def ratio(row: Row, found: Fit) -> float:
    """Predicted over measured."""
    return predicted_seconds(row, found.of(row.target, row.hosts)) / row.seconds


def interval(target: Target, hosts: int = 1) -> tuple[Shares, Shares, Shares]:
    """The slowest, the likely and the quickest shares of a target on so many hosts."""
    found = published_fit()
    likely, ends = found.of(target, hosts), {name: _ends(found, target, name) for name in Shares._fields}
    slow = Shares(**{name: getattr(likely, name) * low for name, (low, _) in ends.items()})
    quick = Shares(**{name: min(1.0, getattr(likely, name) * high) for name, (_, high) in ends.items()})
    return slow, likely, quick


def _ends(found: Fit, target: Target, name: str) -> tuple[float, float]:
    """By what a share must be multiplied to predict the slowest and the quickest of the rows that bear on it: those of
    this work on this generation; with fewer than FEW of them also those of the nearest work on it, then of this work on
    other devices of its platform, then on all. A share that is another work's is as uncertain as that one, at least."""
    own, like, quotients = generation(target.name), found.others(target, name), []
    if not found.is_measured(target, name) and name in _NEAREST:
        quotients.extend(_ends(found, target, _NEAREST[name]))
    # Where nothing is known, others count as if they had been given the share that this device is given.
    share = None if found.is_known(own, name) else found.share(target, name)
    rest = {generation(device) for device in TARGETS} - {own}
    for devices, kind in (({own}, name), ({own}, _NEAREST.get(name)), (rest & {*like}, name), (rest - {*like}, name)):
        if len(quotients) >= FEW:
            break
        for row in published_rows():
            device = generation(row.device)
            if TELLS.get(row.kind) == kind is not None and device in devices:
                quotients.append(ratio(row, found) * (like[device] / share if share and device in like else 1.0))
    return float(min(1.0, *quotients)), float(max(1.0, *quotients))


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table_rows() -> list[tuple]:
    """The rows as people read them."""
    found, rows = published_fit(), []
    for row in published_rows():
        quotient = ratio(row, found)
        rows.append((row.kind, row.what, f"{row.devices} {row.device}", row.model, f"{row.measured:,g} {row.unit}",
                     _digits(row.in_unit(row.seconds * quotient)), f"{quotient:.2f}", row.use))
    return rows

if __name__ == "__main__":
    for line in table_rows():
        print("| " + " | ".join(line) + " |")
    print(f"updates on GPUs reach hosts^-{published_fit().decline:.3f} of that on several hosts")
