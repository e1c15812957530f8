"""The range of every number in the configuration, in one table, and the ranges of the commands' own options.

A key that is added to defaults.py needs a row here: `test_ranges.py` finds numeric keys that the table lacks. What two
keys must have in common is checked in validation.py and task_validation.py.
"""

import fnmatch
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tango_jax.data.teacher_rows import MAX_SAMPLES
from tango_jax.runtime.checks import Mistakes, shortened
from tango_jax.runtime.rng import MAX_SEED

LARGEST_INT = 2**31 - 1  # counters on devices are int32
LARGEST_FLOAT = float(np.finfo(np.float32).max)
SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)  # XLA flushes what is smaller to zero


class Range(NamedTuple):
    """Which numbers are allowed. Floats must be in the range both as they are written and rounded to float32."""

    low: float
    high: float  # LARGEST_INT and LARGEST_FLOAT: whatever a device can hold
    is_above: bool = False  # `low` itself is not allowed
    is_below: bool = False  # `high` itself is not allowed
    also: float | None = None  # one value outside the range with a meaning of its own
    why: str = ""  # the reason or the fix, for the end of the error message

    def check(self, shown: str, value: float) -> None:
        """Raises ValueError with `shown`, which names the setting and its value, and with the range."""
        if value == self.also:
            return
        held = _in_float32(value) if isinstance(value, float) else value
        if self._holds(value) and self._holds(held):
            return
        note = f" (float32 rounds it to {held:g})" if self._holds(value) else ""
        raise ValueError(f"{shown} must {self._words(value)}{note}{self.why}")

    def _holds(self, value: float) -> bool:
        # NaN compares false with everything, and so is in no range.
        is_high_enough = value > self.low if self.is_above else value >= self.low
        is_low_enough = value < self.high if self.is_below else value <= self.high
        return is_high_enough and is_low_enough

    def _words(self, value: float) -> str:
        also = f"be {self.also:g}, or " if self.also is not None else ""
        low = f"{'above' if self.is_above else 'at least'} {self.low}"
        if self.high not in (LARGEST_INT, LARGEST_FLOAT):
            if not self.is_above and not self.is_below:
                return f"{also}lie between {self.low} and {self.high}"
            return f"{also}be {low} and {'below' if self.is_below else 'at most'} {self.high}"
        if value <= self.low:
            return f"{also}be {low}"
        return f"{also}be {'a finite number, ' * isinstance(value, float)}{low} and at most {self.high:.10g}"


def _in_float32(value: float) -> float:
    """The number as a device computes with it."""
    with np.errstate(over="ignore", under="ignore"):
        held = float(np.float32(value))
    return 0.0 if abs(held) < SMALLEST_FLOAT else held


COUNT = Range(1, LARGEST_INT)
COUNT_OR_NONE = Range(0, LARGEST_INT)  # 0 has a meaning of its own: off, all, or as many as are needed
DEVICES = Range(1, LARGEST_INT, also=-1)
SEED = Range(0, MAX_SEED)
SHARE = Range(0.0, 1.0)
SHARE_ABOVE_ZERO = Range(0.0, 1.0, is_above=True)
SHARE_BELOW_ONE = Range(0.0, 1.0, is_below=True)
NOT_NEGATIVE = Range(0.0, LARGEST_FLOAT)
POSITIVE = Range(0.0, LARGEST_FLOAT, is_above=True)
WEIGHT = Range(0.0, 100.0)
# Logits divided by a temperature stay finite in float32.
SAMPLED_TEMPERATURE = Range(1e-6, 1e6)
TEMPERATURE = SAMPLED_TEMPERATURE._replace(also=0.0, why="; 0 is greedy")
TRAINED_TEMPERATURE = SAMPLED_TEMPERATURE._replace(
    why=": a greedy policy has nothing to learn from (evaluation is greedy by itself)"
)

# Patterns of fnmatch, of which the first that fits counts. Of a tuple, each element is checked.
RANGES: Mapping[str, Range] = {
    "seed": SEED,
    "task.data_seed": SEED,
    "ablation.seeds": SEED,
    "ablation.workers": COUNT,
    "task.min_steps": COUNT_OR_NONE,
    "task.validation": COUNT_OR_NONE,
    "task.*_words": COUNT,
    "task.*_letters": COUNT,
    "task.*_swaps": COUNT,
    "task.*_error": SHARE,
    "task.claim_noise": SHARE,
    "rl.generator_steps": COUNT,
    "rl.warmup_steps": COUNT_OR_NONE,
    "rl.*_turns_per_cycle": COUNT,
    "rl.prompts_per_step": COUNT,
    "rl.samples_per_prompt": COUNT,
    "rl.verifications_per_solution": COUNT,
    "rl.dynamic_sampling": COUNT_OR_NONE,
    "rl.trust": NOT_NEGATIVE,
    "rl.alpha_initial": SHARE,
    "rl.alpha_final": SHARE,
    "rl.outcome_weight": WEIGHT,
    "rl.format_weight": WEIGHT,
    "rl.correctness_weight": WEIGHT,
    "rl.gamma": WEIGHT,
    "rl.label_count_decay": SHARE_BELOW_ONE,
    "generate.samples": Range(1, MAX_SAMPLES),
    "generate.temperature": TEMPERATURE,
    "generate.top_p": SHARE_ABOVE_ZERO,
    "generate.problems": COUNT_OR_NONE,
    "generate.shard_problems": COUNT,
    "generate.keep.min_format": SHARE,
    "generate.keep.best": COUNT_OR_NONE,
    "generate.keep.validation_share": SHARE_BELOW_ONE,
    "eval.*": COUNT,
    "checkpoint.*": COUNT,
    "rollouts.every": COUNT_OR_NONE,
    "rollouts.eval_problems": COUNT_OR_NONE,
    "rollouts.max_mb": Range(1.0, LARGEST_FLOAT),
    "transcripts": COUNT_OR_NONE,
    "distributed.*_s": COUNT,
    "alarms.window": COUNT,
    "alarms.margin": SHARE_ABOVE_ZERO,
    "alarms.verdict_rate": SHARE,
    "alarms.verdict_accuracy": SHARE,
    "alarms.wrong_steps": SHARE,
    "alarms.misaligned": SHARE,
    "alarms.truncation": SHARE,
    "alarms.shortened": SHARE,
    "alarms.logprob_gap": NOT_NEGATIVE,
    "alarms.logprob_gap_share": SHARE,
    "alarms.grader_failures": SHARE,
    "alarms.groups_without_signal": SHARE,
    "alarms.*kl": NOT_NEGATIVE,
    "alarms.*_low": NOT_NEGATIVE,
    "alarms.*_high": NOT_NEGATIVE,
    "*.model.width": COUNT,
    "*.model.num_*": COUNT,
    "*.model.head_dim": COUNT,
    "*.model.mlp_width": COUNT,
    "*.model.max_position": COUNT,
    "*.model.rope_base": Range(1.0, LARGEST_FLOAT),
    "*.model.norm_eps": SHARE_ABOVE_ZERO,
    "*.max_prompt": COUNT,
    "*.max_response": COUNT,
    "*_buckets": COUNT,
    "*.cache_tokens": COUNT_OR_NONE,
    "*.reward_timeout_s": COUNT_OR_NONE,
    "task.grader_timeout_s": COUNT_OR_NONE,
    "*.temperature": TRAINED_TEMPERATURE,
    "*.top_p": SHARE_ABOVE_ZERO,
    "*.top_k": COUNT_OR_NONE,
    "*.pack_length": COUNT_OR_NONE,
    "*.rows_per_micro_batch": COUNT,
    "*.prompts_per_micro_batch": COUNT,
    "*.logp_chunk": COUNT_OR_NONE,
    "*.loss.step_scale": NOT_NEGATIVE,
    "*.loss.clip_low": SHARE,
    "*.loss.clip_high": NOT_NEGATIVE,
    "*.loss.*_coef": NOT_NEGATIVE,
    "*.loss.importance_cap": NOT_NEGATIVE,
    "*.loss.minibatches": COUNT,
    "*.loss.epochs": COUNT,
    "*.optimizer.lr": POSITIVE,
    "*.optimizer.*_steps": COUNT_OR_NONE,
    "*.optimizer.weight_decay": NOT_NEGATIVE,
    "*.optimizer.b[12]": SHARE_BELOW_ONE,
    "*.optimizer.eps": POSITIVE,  # with 0, a parameter that never had a gradient would become 0 / 0
    "*.optimizer.clip_norm": POSITIVE,
    "*.sft.steps": COUNT_OR_NONE,
    "*.sft.batch_size": COUNT,
    "*.sft.eval_every": COUNT,
    "*.sft.eval_examples": COUNT,
    "*.sft.checkpoint_every": COUNT,
    "*.sft.max_heldout_loss": NOT_NEGATIVE,
    "*.mesh.data": DEVICES,
    "*.mesh.fsdp": DEVICES,
    "*.mesh.tensor": DEVICES,
    "*.mesh.decode_tensor": COUNT,
}  # fmt: skip


@functools.cache
def range_of(key: str) -> Range:
    """The range of a numeric key of the config: that of the first pattern in the table that fits.

    Raises:
        KeyError: none does.
    """
    fitting = [allowed for pattern, allowed in RANGES.items() if fnmatch.fnmatchcase(key, pattern)]
    if not fitting:
        raise KeyError(f"RANGES has no row for {key}")
    return fitting[0]


def numbers_of(value: Any) -> tuple:
    """The numbers in a setting: itself, the elements of a tuple, or none."""
    items = value if isinstance(value, tuple) else (value,)
    return tuple(item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool))


def check_numbers(settings: Mapping[str, Any]) -> None:
    """Every number of the flat settings {"rl.gamma": 0.8, ...}. Raises ValueError for all outside their range."""
    mistakes = Mistakes()
    for key, value in settings.items():
        for number in numbers_of(value):
            shown = f"{key}={shortened(value)}" + (f": {shortened(number)}" if isinstance(value, tuple) else "")
            with mistakes.collected():
                range_of(key).check(shown, number)
    mistakes.raise_all()


def check_options(options: Any, ranges: Mapping[str, Range]) -> None:
    """The same for the options of a command, which are attributes of those names."""
    mistakes = Mistakes()
    for name, allowed in ranges.items():
        value = getattr(options, name)
        with mistakes.collected():
            allowed.check(f"--{name}={shortened(value)}", value)
    mistakes.raise_all()
