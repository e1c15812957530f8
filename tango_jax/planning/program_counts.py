"""How many programs a run compiles before its first turn, by kind, by the rules of its buckets and without a model."""

from collections import Counter
from collections.abc import Iterable, Mapping

from tango_jax.planning.job import Job
from tango_jax.planning.times import scores_of
from tango_jax.runtime.ahead import MOST_AT_A_TIME
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.given_text import row_lengths

# Kinds that take seconds to compile, each with the planned function (programs.py) that takes about as long.
_LOCAL = {"prefill": "prefill", "read": "prefill", "insert": "prefill", "decode": "decode"}
_SHARED = {"layout": "layout", "score": "score", "update": "update", "sft": "sft"}  # by all processes, in one order


def role_programs(job: Job, role: str) -> Counter[str]:
    config, rehearsal = job.functions[role].sampler.driver.config, job.method.rehearsals.get(role)
    policy, found = job.policies[role], Counter(sft=2 * bool(job.policies[role].stage_one))
    widths = len(config.prompt_buckets) if policy.config.prompts_per_micro_batch and not policy.is_scored else 1
    scored = set()  # (prompts, samples) of scored batches: batches of one size share a program
    if rehearsal is not None:
        learners = [rehearsal.learner] * bool(scores_of(policy))
        scored = {(one.prompts, one.samples) for one in (*rehearsal.scored, *learners)}
        found.update(update=widths)
    if policy.is_scored:
        return +(found + Counter(score=len(scored | {(job.method.most_read(job.config), 1)})))
    found.update(score=widths * len(scored), layout=1)
    if policy.model_config.score_head:
        return +(found + Counter(prefill=len(row_lengths(config.prompt_buckets[-1]))))
    return +(found + sampler_programs(config, {1, *job.method.samples_of(role)}))


def compile_seconds(counts: Mapping[str, Counter[str]], seconds: Mapping[str, float], processes: int) -> float:
    """On MOST_AT_A_TIME cores. `seconds`: of one core for each planned function."""
    local, shared = (sum(found[kind] * seconds.get(f"{role}/{name}", 0.0)
                         for role, found in counts.items() for kind, name in kinds.items())
                     for kinds in (_LOCAL, _SHARED))
    return max(local / MOST_AT_A_TIME, shared) if processes > 1 else (local + shared) / MOST_AT_A_TIME


def sampler_programs(config: SamplerConfig, group_sizes: Iterable[int]) -> Counter[str]:
    return _of_slots(config) if config.cache_tokens else _of_batches(config, group_sizes)


def _of_slots(config: SamplerConfig) -> Counter[str]:
    """Rows enter and leave the shapes whose columns grow; the others are sampled in."""
    growing, shapes = len(config.columns), len(config.shapes)
    return Counter(read=len(config.prompt_buckets), make=growing, insert=growing, save=growing - 1,
                   restore=growing - 1, decode=shapes, resize=shapes - 1)


def _of_batches(config: SamplerConfig, group_sizes: Iterable[int]) -> Counter[str]:
    found, last = set(), config.cache_buckets[-1]
    for prompt in config.prompt_buckets:
        for group_size in group_sizes:
            for prompts in config.prompt_counts(group_size):
                found |= {("prefill", prompt, prompts, group_size), ("begin", prompts * group_size)}
                pending = [(prompts * group_size, config.cache_buckets[0], prompts)]
                while pending:
                    rows, length, prefixes = state = pending.pop()
                    if ("decode", prompt, state) in found:
                        continue
                    found.add(("decode", prompt, state))
                    if length < last:
                        found.add(("grow", rows, length))
                        pending.append((rows, config.cache_bucket(length + 1), prefixes))
                    if smaller := config.smaller_row_bucket(rows):
                        found |= {("compact a layer", prompt, state), ("compact the rest", rows, prefixes)}
                        pending.append((smaller, length, smaller))
    return Counter(kind for kind, *_ in found)
