"""Lengths of prompts and responses that a plan assumes (`--lengths`):

    lognormal:MEAN,SHARE[,PROMPT]    log-normal, as responses of models are. Responses have a mean of MEAN tokens, and a
                                     SHARE of them is cut off at max_response. The generator's prompts have a mean of
                                     PROMPT (0.3), and SHARE of them have max_prompt
    even:SHARE                       from 1 token on, evenly spread around SHARE of the longest
    RUN                              responses as in the rollouts of a run (its workdir)

MEAN and PROMPT are tokens or, below 1, a share of the longest. Lengths are the distribution's quantiles, the longest
first: a plan gives the same times every time.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.own_arm import arm_of
from tango_jax.runtime.checks import shortened
from tango_jax.text.templates import has_steps, load_template
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.tracking.turn_metrics import tokens_scored

FORMS = "lognormal:MEAN,SHARE, lognormal:MEAN,SHARE,PROMPT, even:SHARE or the workdir of a run with rollouts"
PROMPT, CUT = 0.3, 0.02  # of the generator's prompts: the mean as a share of the longest, and how many are the longest
DEFAULT = f"lognormal:{PROMPT},{CUT}"
WIDEST = 20.0  # standard deviation of a logarithm
NORMAL = NormalDist()
WRITES, READS_MARKS, WRITES_NOTHING = "writes", "reads marks", "is a process reward model"


class AssumedLengths(Protocol):
    def check(self, config: ConfigDict) -> None:
        """Raises ValueError: this configuration cannot have responses of these lengths."""

    def responses(self, config: ConfigDict, role: str, count: int) -> np.ndarray: ...

    def prompts(self, config: ConfigDict, role: str, count: int) -> np.ndarray: ...

    def __str__(self) -> str:
        """For the list of a plan's assumptions."""


@dataclasses.dataclass(frozen=True)
class Even:
    share: float

    def check(self, config: ConfigDict) -> None:
        pass

    def responses(self, config: ConfigDict, role: str, count: int) -> np.ndarray:
        return evenly_spaced_lengths(count, config[role].max_response, self.share)

    def prompts(self, config: ConfigDict, role: str, count: int) -> np.ndarray:
        return evenly_spaced_lengths(count, config[role].max_prompt, self.share)

    def __str__(self) -> str:
        return f"lengths spread evenly with a mean of {self.share:g} of the longest"


@dataclasses.dataclass(frozen=True)
class LogNormal:
    mean: float
    cut: float
    prompt: float = PROMPT

    def check(self, config: ConfigDict) -> None:
        limits = [(f"{role}.max_response", self.mean, config[role].max_response) for role in ROLES]
        for name, mean, longest in [*limits, ("generator.max_prompt", self.prompt, config.generator.max_prompt)]:
            tokens, least = _tokens(mean, longest), longest * _mean_share(WIDEST, self.cut)
            if not least < tokens < longest:
                raise ValueError(f"--lengths: with {self.cut:g} of the lengths at {name}={longest}, the mean lies "
                                 f"between {least:.0f} and {longest} tokens, and {tokens:g} does not: give another "
                                 "mean or share")

    def responses(self, config: ConfigDict, role: str, count: int) -> np.ndarray:
        return log_normal_lengths(count, config[role].max_response, self.mean, self.cut)

    def prompts(self, config: ConfigDict, role: str, count: int) -> np.ndarray:
        if role != "generator":
            return prompts_with_solutions(self, config, count)
        return log_normal_lengths(count, config.generator.max_prompt, self.prompt, self.cut)

    def __str__(self) -> str:
        return (f"log-normal lengths: a mean of {_described(self.mean, 'max_response')}, {self.cut:.1%} at the limit, "
                f"and {_described(self.prompt, 'max_prompt')} in the generator's prompts; the verifier's hold such a "
                "prompt and a solution")


@dataclasses.dataclass(frozen=True)
class OfRun:
    workdir: str
    tokens: dict[str, np.ndarray]  # of a role's responses, the longest first
    sampled: dict[str, float]  # mean of all responses in a role's turns, where dynamic sampling left some out
    verifier: str  # what it does: the verifications' lengths are of that

    def check(self, config: ConfigDict) -> None:
        """Evaluations sample the verifier in all arms. Of a process reward model no length of a verification is
        assumed."""
        arm, is_reward_model = arm_of(config), has_steps(load_template("verifier", config.verifier.template))
        here = READS_MARKS if arm.is_scored else WRITES
        if not is_reward_model and here != self.verifier:
            raise ValueError(f"--lengths={shortened(self.workdir)}: the verifier of that run {self.verifier}, and that "
                             f"of arm={config.arm} {here}, so its verifications have other lengths: give the workdir "
                             f"of a run whose verifier {here}, or other --lengths")

    def responses(self, config: ConfigDict, role: str, count: int) -> np.ndarray:
        places = (_middles(count) * len(self.tokens[role])).astype(int)
        return np.minimum(self.tokens[role][places], config[role].max_response)

    def prompts(self, config: ConfigDict, role: str, count: int) -> np.ndarray:
        if role != "generator":
            return prompts_with_solutions(self, config, count)
        return log_normal_lengths(count, config.generator.max_prompt, PROMPT, CUT)

    def __str__(self) -> str:
        counts = " and ".join(f"{len(tokens)} of the {role}" for role, tokens in self.tokens.items())
        means = " and ".join(f"{mean:.0f} of the {role}" for role, mean in self.sampled.items())
        chosen = ("; dynamic sampling chose these; the mean of all first responses in a role's own turns was "
                  f"{means}" if means else "")
        return (f"responses as long as those in the rollouts of {self.workdir} ({counts}; the verifier's are of the "
                f"solutions judged in turns of both roles{chosen}); log-normal prompts of the generator with a mean of "
                f"{PROMPT:g} of max_prompt; the verifier's hold such a prompt and a solution")


def parse_lengths(text: str) -> AssumedLengths:
    """Raises ValueError."""
    kind, _, numbers = text.partition(":")
    if kind in ("even", "lognormal"):
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError as error:
            raise ValueError(f"--lengths={shortened(text)}: {numbers!r} is no list of numbers; give {FORMS}") from error
        if kind == "even" and len(values) == 1 and 0 < values[0] <= 1:
            return Even(*values)
        if kind == "lognormal" and len(values) in (2, 3) and all(v > 0 for v in values) and values[1] < 1:
            return LogNormal(*values)
        raise ValueError(f"--lengths={shortened(text)}: give {FORMS}; MEAN and PROMPT are above 0, SHARE of lognormal "
                         "is above 0 and below 1, and SHARE of even is above 0 and at most 1")
    return _of_run(text)


def _of_run(workdir: str) -> OfRun:
    folder = Path(workdir).expanduser() / "rollouts"
    if not folder.is_dir():
        raise ValueError(f"--lengths={shortened(workdir)}: there is no folder {folder}; give {FORMS}")
    tokens: dict[str, list[int]] = {role: [] for role in ROLES}
    rollouts = list(read_rollouts(folder))
    # The problems of the verifier's turns may be shorter; where it alone is trained, there are no others.
    solved = "generator" if any(row["role"] == "generator" for row in rollouts) else "verifier"
    for row in rollouts:
        if row["role"] == solved and row["solution"] is not None:  # null: a user's verifier judged something else
            second = [row["second_try"]] if "second_try" in row else []
            tries = [row["solution"], *second, *row.get("later_tries", ())]
            tokens["generator"] += [one["tokens"] for one in tries]
        tokens["verifier"] += [one["tokens"] for one in row["verifications"]]
    if empty := [role for role in ROLES if not tokens[role]]:
        raise ValueError(f"--lengths={shortened(workdir)}: its rollouts have no response of the {empty[0]}; give the "
                         "workdir of a run in which both roles respond")
    rows = read_metrics(folder.parent) if (folder.parent / "metrics.jsonl").is_file() else []
    verifier = READS_MARKS if any(map(tokens_scored, rows)) else WRITES
    verifier = verifier if any(tokens["verifier"]) else WRITES_NOTHING
    return OfRun(workdir, {role: np.sort(counts)[::-1] for role, counts in tokens.items()}, _sampled_means(rows),
                 verifier)


def _sampled_means(rows: Sequence[Mapping]) -> dict[str, float]:
    means = {}
    for role in ROLES:
        found = [row for row in rows if f"{role}/batches_sampled" in row and row.get(f"{role}/tokens_sampled")]
        if any(row[f"{role}/batches_sampled"] > 1 for row in found):
            tokens = [row[f"{role}/tokens_sampled"] for row in found]
            responses = [count / row[f"{role}/length_mean"] for count, row in zip(tokens, found, strict=True)]
            means[role] = sum(tokens) / sum(responses)
    return means


def evenly_spaced_lengths(count: int, longest: int, share: float) -> np.ndarray:
    """From 1 to `longest`, evenly spaced around a mean of `share` x `longest`; the longest first."""
    half = min(share, 1 - share)
    shares = np.linspace(share + half, share - half, count)
    return np.maximum(1, np.ceil(longest * shares)).astype(int)


def log_normal_lengths(count: int, longest: int, mean: float, cut: float) -> np.ndarray:
    """The longest first, min(X, longest) of a log-normal X that reaches `longest` with probability `cut`; their mean is
    `mean`."""
    spread, edge = _spread(_tokens(mean, longest) / longest, cut), NORMAL.inv_cdf(1 - cut)
    normal = np.array([NORMAL.inv_cdf(1 - place) for place in _middles(count)])
    return np.clip(np.rint(longest * np.exp(spread * (normal - edge))), 1, longest).astype(int)


def _spread(mean_share: float, cut: float) -> float:
    """The standard deviation of log X at which the mean of min(X, 1) is `mean_share`. The mean falls with it."""
    low, high = 0.0, WIDEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_share(middle, cut) > mean_share else (low, middle)
    return (low + high) / 2


def _mean_share(spread: float, cut: float) -> float:
    """The mean of min(X, 1) where log X is normal and X > 1 with probability `cut`."""
    edge = NORMAL.inv_cdf(1 - cut)
    below = math.erfc((spread - edge) / math.sqrt(2)) / 2
    return math.exp(spread**2 / 2 - spread * edge) * below + cut


def prompts_with_solutions(lengths: AssumedLengths, config: ConfigDict, count: int) -> np.ndarray:
    """The verifier's prompts: a prompt of the generator, a solution, and what else max_prompt has room for."""
    generator, longest = config.generator, config.verifier.max_prompt
    rest = max(0, longest - generator.max_prompt - generator.max_response)
    solutions = shuffled(lengths.responses(config, "generator", count))
    return np.sort(np.minimum(longest, lengths.prompts(config, "generator", count) + solutions + rest))[::-1]


def shuffled(lengths: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(lengths)


def _middles(count: int) -> np.ndarray:
    """The middles of `count` equal parts of 0 to 1."""
    return (np.arange(count) + 0.5) / count


def _tokens(mean: float, longest: int) -> float:
    return mean if mean >= 1 else mean * longest


def _described(mean: float, limit: str) -> str:
    return f"{mean:g} tokens" if mean >= 1 else f"{mean:g} of {limit}"
