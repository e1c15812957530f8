"""Seconds of every phase of a turn, and of a step of stage 1.

Offloaded arrays (`mesh.offload`) are copied while nothing else is done. Reading texts is not counted.
"""

import math
from typing import NamedTuple

from tango_jax.config import ROLES
from tango_jax.planning.assumed_lengths import AssumedLengths
from tango_jax.planning.costs import optimizer_bytes
from tango_jax.planning.job import Job, SizedPolicy, device_bytes
from tango_jax.planning.programs import Program
from tango_jax.planning.targets import Target
from tango_jax.planning.time_model import TimeModel
from tango_jax.planning.upkeep import grade_seconds, upkeep_seconds
from tango_jax.planning.workload import (
    NOTHING,
    Measured,
    SamplingWorkload,
    UpdateWorkload,
    reading_workload,
    sampling_workload,
    stage_one_workload,
    update_workload,
)


class TurnTimes(NamedTuple):
    role: str
    passes: UpdateWorkload
    sampled: dict[str, SamplingWorkload]
    seconds: dict[str, float]  # phase -> seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def stage_one_step_seconds(
    job: Job, programs: dict[str, Program], target: Target, role: str, lengths: AssumedLengths
) -> float:
    times, policy = TimeModel(target), job.policies[role].in_stage_one
    step = times.read_seconds(optimizer_bytes(device_bytes(policy.state), device_bytes(policy.state.params)))
    return step + times.training_seconds(policy, programs[f"{role}/sft"], stage_one_workload(job, role, lengths))


def turn_times(
    job: Job, programs: dict[str, Program], target: Target, role: str, lengths: AssumedLengths,
    measured: Measured = NOTHING,
) -> TurnTimes:
    times = TimeModel(target)
    requests = sampled_requests(job, role)
    sampled = {name: sampling_workload(job, name, *request, lengths, measured) for name, request in requests.items()}
    passes = update_workload(job, role, lengths, measured)
    batches = {name: measured[name].batches if name in measured else 1.0 for name in ROLES}
    # Each call lays out the weights.
    calls = [call.prompt.role for call in job.method.rehearsals[role].calls.values() if not call.prompt.is_scored]
    layouts = {name: programs[f"{name}/layout"] for name in set(calls)}
    once = {name: times.layout_seconds(one) for name, one in layouts.items()}
    seconds = {"reshard": sum(batches[name] * once[name] for name in calls)}
    for name, phase in (("generator", "sample"), ("verifier", "verify")):
        if name in sampled:
            seconds[phase] = batches[name] * times.sampling_seconds(job.policies[name], sampled[name])
    if count := read_solutions(job, role):
        passes_read = reading_workload(job, "verifier", count, lengths, measured)
        seconds["verify"] = batches["verifier"] * times.training_seconds(
            job.policies["verifier"], programs["verifier/score"], passes_read, "score")
    solutions = batches["generator"] * math.prod(requests["generator"]) if "generator" in requests else 0
    seconds["grade"] = grade_seconds(job.config, solutions)
    seconds |= trained_seconds(job, programs, target, role, passes) | upkeep_seconds(job, programs, times, lengths)
    return TurnTimes(role, passes, sampled, seconds)


def sampled_requests(job: Job, role: str) -> dict[str, tuple[int, int]]:
    """{sampling role: (prompts, responses of each)} in the turn in which `role` is updated."""
    requests: dict[str, tuple[int, int]] = {}
    for call in job.method.rehearsals[role].calls.values():
        if call.prompt.is_scored:
            continue
        prompts, samples = math.ceil(call.prompts * job.prompts / job.config.rl.prompts_per_step), call.samples
        if call.prompt.role in requests:  # counted as further prompts of its first call, as many as there can be
            before, group_size = requests[call.prompt.role]
            requests[call.prompt.role] = (before + math.ceil(prompts * samples / group_size), group_size)
        else:
            requests[call.prompt.role] = (prompts, samples)
    return requests


def read_solutions(job: Job, role: str) -> int:
    """Whose marks a process reads in the turn in which `role` is updated."""
    calls = job.method.rehearsals[role].calls.values()
    return math.ceil(sum(call.prompts for call in calls if call.prompt.is_scored) / job.processes)


def trained_seconds(
    job: Job, programs: dict[str, Program], target: Target, role: str, passes: UpdateWorkload
) -> dict[str, float]:
    times, policy = TimeModel(target), job.policies[role]
    state = policy.state
    loss, is_offloaded = policy.config.loss, policy.config.mesh.offload
    scored, learner = job.method.rehearsals[role].scored, job.method.rehearsals[role].learner
    # A teacher is the reference with another prompt.
    by_teacher = sum(call.prompts * call.samples for call in scored) / (learner.prompts * learner.samples)
    score_s = times.training_seconds(policy, programs[f"{role}/score"], passes, "score")
    score_s *= scores_of(policy) + by_teacher
    step = loss.minibatches * times.read_seconds(optimizer_bytes(device_bytes(state), device_bytes(state.params)))
    update_s = loss.epochs * (times.training_seconds(policy, programs[f"{role}/update"], passes) + step)
    if is_offloaded:
        fetches = (loss.kl_coef > 0) * loss.minibatches + len(scored)
        score_s += fetches * times.host_seconds(device_bytes(state.params))
        update_s += 2 * times.host_seconds(device_bytes(state.opt_state))
    return {"score": score_s, "update": update_s}


def scores_of(policy: SizedPolicy) -> int:
    """Scores of a batch: by the reference, and by the policy before the first of several updates."""
    return (policy.config.loss.kl_coef > 0) + (policy.config.loss.minibatches * policy.config.loss.epochs > 1)
