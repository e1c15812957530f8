"""What a policy samples for its own stage 1, in parts on disk, so that an interrupted run reads what it had sampled.

A response depends on (seed, role, name of the sampling, part, its place in it) alone.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from tango_jax.loop.turn import RunContext, respond
from tango_jax.method.texts import build_prompts
from tango_jax.records import Problem, Solution, TrainState, problem_of
from tango_jax.rl.policy import Policy, sampler_sizes
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.checks import require
from tango_jax.runtime.console import Console
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.sampler import make_sampler
from tango_jax.tasks.tagged_examples import TaggedRow
from tango_jax.tasks.task import Task
from tango_jax.tasks.worked_examples import prompt_with, with_known
from tango_jax.text.prompts import OWN, Prompt, prompt_ids, solution_of
from tango_jax.text.templates import MANY_STEPS

PART = 32  # prompts of a part, which is written at once; an interruption loses at most one
# RFT samples at 0.7: fewer responses leave the format than at 1, and those of a problem still differ.
TEMPERATURE = 0.7
UNIT = 128  # prompts with examples are padded to a multiple of it, as kernels of devices want
NO_LIMIT = 1 << 30


class Sampled(NamedTuple):
    """One response, as it is stored."""

    text: str
    is_truncated: bool
    is_right: bool  # the grade of a solution's answer; of verifications, False


class Asked(NamedTuple):
    """A policy and the prompt that it answers."""

    policy: Policy
    prompt: Prompt


def plainly(policy: Policy, temperature: float | None = None) -> Asked:
    """With the role's own prompt; by default at the temperature of the turns."""
    return Asked(_at(policy, temperature or policy.config.temperature), OWN[policy.role])


def with_examples(policy: Policy, rows: Sequence[TaggedRow], samples: int) -> Asked:
    """With as many examples as the model's positions allow, and a sampler for these longer prompts. They are plain
    text, without the chat template: a model goes on with a text as it began, and answers a question in its own way.
    Raises ValueError: not even one fits."""
    plain_text = dataclasses.replace(policy.tokenizer, chat_fn=None)
    policy = dataclasses.replace(policy, tokenizer=plain_text)
    config, positions = policy.config, policy.model_config.max_position
    empty, added = Problem("", "", ""), 0
    # The verifier's with the longest line of what is known.
    parent = empty if policy.role == "generator" else with_known(solution_of(empty, ""), True, MANY_STEPS)
    plain = _num_tokens(policy, OWN[policy.role], parent)
    for count in range(len(rows), 0, -1):
        prompt = prompt_with(policy.role, list(rows[:count]))
        # Two texts side by side may take some tokens more than each alone.
        added = _num_tokens(policy, prompt, parent) - plain + 8
        longest = config.max_prompt + added
        if longest + config.max_response <= positions:
            break
    else:
        raise ValueError(f"task.stage_one=self: one worked example takes {added} tokens, and {policy.role}.max_prompt="
                         f"{config.max_prompt} and max_response={config.max_response} leave no room for it in the "
                         f"{positions} positions of {config.checkpoint}: give shorter ones as task.examples, lower the "
                         "limits, or take a model with more positions")
    longest = min(UNIT * math.ceil(longest / UNIT), positions - config.max_response)
    asked = _at(policy, TEMPERATURE, max_prompt=longest)
    sizes = _longer(sampler_sizes(config), longest, samples)
    sampler = make_sampler(policy.model_config, sizes, policy.tokenizer.stop_ids, policy.placement)
    return Asked(dataclasses.replace(asked, sampler=sampler), prompt)


def _num_tokens(policy: Policy, prompt: Prompt, parent: Problem | Solution) -> int:
    return len(prompt_ids(prompt, policy.template, policy.tokenizer, parent, NO_LIMIT)[0])


def _at(policy: Policy, temperature: float, **settings: int) -> Policy:
    config = policy.config.copy_and_resolve_references().unlock()
    config.temperature = temperature
    config.update(settings)
    return dataclasses.replace(policy, config=config)


def _longer(sizes: SamplerConfig, longest: int, samples: int) -> SamplerConfig:
    """Sizes for longer prompts: fewer rows at a time, in the memory that was planned for rows with a prompt each. Where
    `cache_tokens` is off, the samples of a prompt share its keys and values."""
    new = sizes.cache_buckets[-1]
    if sizes.cache_tokens:
        cache = max(sizes.cache_tokens, longest + new)
        rows = min(sizes.row_buckets[-1], cache // (longest + new))
    else:
        cache, rows = 0, sizes.row_buckets[-1] * sizes.longest // (-(-longest // samples) + new)
    return dataclasses.replace(sizes, prompt_buckets=(longest,), row_buckets=(max(1, rows),), cache_tokens=cache)


@dataclasses.dataclass(frozen=True)
class PartSampler:
    """Samples in parts under a folder."""

    config: ConfigDict
    task: Task
    console: Console
    check: Callable[[], None]  # raises Preempted
    begin: Callable[[], None]  # stores the run's settings before the first part

    def sample(
        self, folder: Path, asked: Asked, parents: Sequence, samples: int, weights_fn: Callable[[], dict]
    ) -> list[list[Sampled]]:
        """`samples` responses to each parent. `weights_fn` is called if a part is missing. All processes must call
        this. Raises ValueError: a stored part answers other prompts."""
        parts = [parents[start : start + PART] for start in range(0, len(parents), PART)]
        found = [self._read(folder, number, asked, part, samples) for number, part in enumerate(parts)]
        missing = [number for number, rows in enumerate(found) if rows is None]
        if missing:
            self.begin()
            weights, name = weights_fn(), f"{asked.policy.role}, {folder.name}"
            done = sum(len(part) for part, rows in zip(parts, found, strict=True) if rows is not None)
            with self.console.stage(f"Stage 1: sampling ({name})", total=len(parents), done=done) as bar:
                for number in missing:
                    self.check()
                    found[number] = self._sample_part(folder, number, asked, parts[number], samples, weights, bar)
                    bar.advance(len(parts[number]), phase="prompt")
        return [rows for part in found for rows in part]

    def _sample_part(
        self, folder: Path, number: int, asked: Asked, parents: Sequence, samples: int, weights: dict, bar: Any
    ) -> list[list[Sampled]]:
        policy = asked.policy
        context = RunContext(self.config, self.task, {policy.role: policy}, {}, PhaseTimer(), show_fn=bar.show)
        key_data = rng.step_key(self.config.seed, "self", policy.role, folder.name, number)
        states = {policy.role: TrainState(weights, (), None)}
        records = respond(context, states, policy.role, parents, samples, key_data, prompt=asked.prompt).records
        is_solution = policy.role == "generator"
        flat = [Sampled(one.text, one.is_truncated, is_solution and one.is_correct) for one in records]
        rows = [flat[start : start + samples] for start in range(0, len(flat), samples)]
        head = {"prompts": _digest(asked, parents, samples, self.task)}
        lines = [head] + [{"problem": problem_of(parent).id, "sample": sample, **one._asdict()}
                          for parent, own in zip(parents, rows, strict=True) for sample, one in enumerate(own)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        hosts.in_first(lambda: write_atomically(_path(folder, number), text))
        return rows

    def _read(
        self, folder: Path, number: int, asked: Asked, parents: Sequence, samples: int
    ) -> list[list[Sampled]] | None:
        """None if the part is absent or damaged."""
        path, digest, stored = _path(folder, number), _digest(asked, parents, samples, self.task), None
        try:
            head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            flat = [Sampled(**{name: line[name] for name in Sampled._fields}) for line in lines]
            stored = (head["prompts"], flat) if len(flat) == samples * len(parents) else None
        except (OSError, ValueError, TypeError, KeyError):  # absent; not text or JSON; other fields
            pass
        stored = hosts.from_first(stored)
        if stored is None:
            return None
        require(stored[0] == digest, f"{path} holds responses to other prompts: the problems, the template, the "
                "tokenizer, the grader or task.examples have changed since; put back what was there, or choose another "
                "--workdir")
        return [stored[1][start : start + samples] for start in range(0, len(stored[1]), samples)]


def _path(folder: Path, number: int) -> Path:
    return folder / f"part_{number:04d}.jsonl"


def _digest(asked: Asked, parents: Sequence, samples: int, task: Task) -> str:
    prompts, _ = build_prompts(asked.policy, asked.prompt, parents)
    facts = [prompts, samples, asked.policy.config.temperature, getattr(task.is_correct, "digest", ""),
             [problem_of(parent).answer for parent in parents]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
