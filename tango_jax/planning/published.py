"""What others have measured: seconds of published runs, and what this package's arithmetic predicts for them.

In: the rows of published.csv, each one measurement with its settings and its source. Out: a `Row` for each, and its
predicted seconds for any shares of its device's rates. Stage: `plan`, before times are predicted; fitted.py makes
shares of the rows.

A row's seconds are those of times.py: the same FLOPs, bytes and parts of a decode step as in any plan. Lengths are
equal, or, where the row names the longest, exponentially distributed with its mean and cut there. What is sent between
devices is not counted: it is in the shares of several hosts.
"""

import csv
import dataclasses
import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import MicroBatchShape, num_parameters, prefill_flops, score_flops, update_flops
from tango_jax.planning.targets import TARGETS, Shares, Target
from tango_jax.planning.times import TimeModel

ROWS_FILE = Path(__file__).with_name("published.csv")
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
                       remat=remat)  # fmt: skip


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
