"""Seconds of every phase of a turn: the work (costs.py, traffic.py, workload.py) over shares of a data sheet's rates.

    products    at the share for their kind of work (`Shares`) of the dense rate of their type; a float32 head with
                HIGHEST at SHARE_OF_FLOAT32 on a GPU; one in three bfloat16 products at a third
    memory      at the share `read` of the memory's rate
    sending     at SHARE_OF_LINK of the link's rate; between hosts, each device of a group has a network card
An update or a score takes the longer of its products and its gathers and scatters, and then its sums. Each part of a
decode step takes the longer of its reads and its products, and each layer STEP_OVERHEAD. Offloaded arrays
(`mesh.offload`) are copied while nothing else is done. Parsing, grading and evaluation are not counted.
"""

import math
from collections import Counter
from typing import NamedTuple

from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import (
    Flops,
    MicroBatchShape,
    StepPart,
    decode_parts,
    optimizer_bytes,
    prefill_flops,
    score_flops,
    update_flops,
)
from tango_jax.planning.job import Job, SizedPolicy, device_bytes
from tango_jax.planning.programs import Program
from tango_jax.planning.targets import Target
from tango_jax.planning.traffic import Collective, ring_bytes
from tango_jax.planning.workload import (
    NOTHING,
    Measured,
    SamplingWorkload,
    UpdateWorkload,
    sampling_workload,
    stage_one_workload,
    update_workload,
)
from tango_jax.rl.score import is_chunked

# 8,000 x 8,000 on an A100 (github.com/bewantbe/busy-gemm-benchmark): 14.1 of 19.5 TFLOP/s in float32.
SHARE_OF_FLOAT32 = 0.7
SHARE_OF_LINK = 0.8
STEP_OVERHEAD = 10e-6  # seconds a layer of a decode step: starting kernels, and small ones
SUM_LATENCY = 10e-6  # seconds of a sum of few bytes over the devices that share decoding weights
OVERLAPPED = ("all-gather", "reduce-scatter")  # sent while something is computed


class TimeModel(NamedTuple):
    target: Target

    def matmul_seconds(self, flops: Flops, model: ModelConfig, kind: str = "update") -> float:
        target, share = self.target, getattr(self.target.reached.likely, kind)
        layers = head = share * target.flops
        if model.compute_dtype == "float32":
            layers = share * target.flops_float32
        if model.head_dtype == "float32":
            is_exact = model.head_precision == "highest" or target.platform == "cpu"
            of_highest = SHARE_OF_FLOAT32 if target.platform == "gpu" else share
            head = of_highest * target.flops_highest if is_exact else head / 3
        return flops.layers / layers + flops.head / head

    def read_seconds(self, size: float) -> float:
        return size / (self.target.read * self.target.reached.likely.read)

    def transfer_seconds(self, item: Collective) -> float:
        return item.wire_bytes / (self.bandwidth(item.members) * SHARE_OF_LINK)

    def host_seconds(self, size: float) -> float:
        return size / (self.target.host * SHARE_OF_LINK)

    def bandwidth(self, members: tuple[int, ...]) -> float:
        hosts = [member // self.target.per_host for member in members]
        if len(set(hosts)) == 1:
            return self.target.link
        return min(self.target.link, self.target.network * max(hosts.count(host) for host in set(hosts)))

    def training_seconds(
        self, policy: SizedPolicy, program: Program, flops: Flops, passes: UpdateWorkload, kind: str = "update"
    ) -> float:
        model, count, calls = policy.model_config, passes.micro_batches, passes.calls
        overlapped = [item for item in program.collectives if item.kind in OVERLAPPED]
        inside = sum(self.transfer_seconds(item) for item in overlapped if item.in_pass)
        open_sums = [item for item in program.collectives if item.kind not in OVERLAPPED]
        sums = sum(self.transfer_seconds(item) * (count if item.in_pass else calls) for item in open_sums)
        outside = calls * sum(self.transfer_seconds(item) for item in overlapped if not item.in_pass)
        return count * max(self.matmul_seconds(flops, model, kind), inside) + outside + sums

    def sampling_seconds(self, policy: SizedPolicy, done: SamplingWorkload) -> float:
        model, placement = policy.model_config, policy.placement
        tensor, groups = placement.local.shape["tensor"], placement.row_multiple
        prompts = done.prompts / groups
        seconds = 0.0
        for length, passes in Counter(done.pass_lengths).items():
            prefill = prefill_flops(model, prompts, length, tensor, model.attention)
            seconds += passes * self.matmul_seconds(prefill, model, "prefill")
        for segment in done.segments:
            rows = segment.rows / groups
            # Once rows are compacted into a smaller batch, each has a prefix to itself.
            is_shared = done.shares_prompts and segment.rows == done.segments[0].rows
            prefixes = min(prompts, rows) if is_shared else rows
            step = self.step_seconds(model, prefixes, done.prompt_length, rows, segment.cache, tensor)
            seconds += segment.steps * step
        return done.batches * seconds

    def step_seconds(
        self, model: ModelConfig, prefixes: float, prompt: float, rows: float, cache: float, tensor: int
    ) -> float:
        """A decode step of `rows` rows, which read `prompt` columns of `prefixes` caches and `cache` new ones each."""
        parts = decode_parts(model, prefixes, prompt, rows, cache, tensor)
        layers = model.num_layers * (STEP_OVERHEAD + self._sums(model, rows, tensor))
        return sum(self.part_seconds(part, model) for part in parts) + layers

    def part_seconds(self, part: StepPart, model: ModelConfig) -> float:
        return max(self.read_seconds(part.read), self.matmul_seconds(part.flops, model, "prefill"))

    def _sums(self, model: ModelConfig, rows: float, tensor: int) -> float:
        if tensor == 1:
            return 0.0
        size = ring_bytes("all-reduce", 2 * rows * model.width, tensor)
        return 2 * (SUM_LATENCY + size / (self.target.link * SHARE_OF_LINK))


class TurnTimes(NamedTuple):
    role: str
    passes: UpdateWorkload
    sampled: dict[str, SamplingWorkload]
    seconds: dict[str, float]  # phase -> seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def stage_one_step_seconds(
    job: Job, programs: dict[str, Program], target: Target, role: str, filled: float
) -> float:
    times, policy = TimeModel(target), job.policies[role].in_stage_one
    passes = stage_one_workload(job, role, filled)
    _, flops = function_flops(policy, passes.tokens)
    step = times.read_seconds(optimizer_bytes(device_bytes(policy.state), device_bytes(policy.state.params)))
    return step + times.training_seconds(policy, programs[f"{role}/sft"], flops, passes)


def turn_times(
    job: Job, programs: dict[str, Program], target: Target, role: str, filled: float, measured: Measured = NOTHING
) -> TurnTimes:
    times = TimeModel(target)
    requests = sampled_requests(job, role)
    sampled = {name: sampling_workload(job, name, *request, filled, measured) for name, request in requests.items()}
    passes = update_workload(job, role, filled, measured)
    batches = {name: measured[name].batches if name in measured else 1.0 for name in sampled}
    # Each call lays out the weights.
    calls = [call.prompt.role for call in job.method.rehearsals[role].calls.values()]
    layouts = {name: programs[f"{name}/layout"] for name in set(calls)}
    once = {name: sum(map(times.transfer_seconds, one.collectives)) + times.read_seconds(one.output + one.argument)
            for name, one in layouts.items()}
    seconds = {"reshard": sum(batches[name] * once[name] for name in calls)}
    for name, phase in (("generator", "sample"), ("verifier", "verify")):
        if name in sampled:
            seconds[phase] = batches[name] * times.sampling_seconds(job.policies[name], sampled[name])
    seconds |= trained_seconds(job, programs, target, role, passes)
    return TurnTimes(role, passes, sampled, seconds)


def sampled_requests(job: Job, role: str) -> dict[str, tuple[int, int]]:
    """{sampling role: (prompts, responses of each)} in the turn in which `role` is updated."""
    requests: dict[str, tuple[int, int]] = {}
    for call in job.method.rehearsals[role].calls.values():
        prompts, samples = math.ceil(call.prompts * job.prompts / job.config.rl.prompts_per_step), call.samples
        if call.prompt.role in requests:  # counted as further prompts of its first call, as many as there can be
            before, group_size = requests[call.prompt.role]
            requests[call.prompt.role] = (before + math.ceil(prompts * samples / group_size), group_size)
        else:
            requests[call.prompt.role] = (prompts, samples)
    return requests


def trained_seconds(
    job: Job, programs: dict[str, Program], target: Target, role: str, passes: UpdateWorkload
) -> dict[str, float]:
    times, policy = TimeModel(target), job.policies[role]
    state = policy.state
    loss, is_offloaded = policy.config.loss, policy.config.mesh.offload
    score, update = function_flops(policy, passes.tokens)
    scored, learner = job.method.rehearsals[role].scored, job.method.rehearsals[role].learner
    # A teacher is the reference with another prompt.
    by_teacher = sum(call.prompts * call.samples for call in scored) / (learner.prompts * learner.samples)
    score_s = times.training_seconds(policy, programs[f"{role}/score"], score, passes, "score")
    score_s *= scores_of(policy) + by_teacher
    step = loss.minibatches * times.read_seconds(optimizer_bytes(device_bytes(state), device_bytes(state.params)))
    update_s = loss.epochs * (times.training_seconds(policy, programs[f"{role}/update"], update, passes) + step)
    if is_offloaded:
        fetches = (loss.kl_coef > 0) * loss.minibatches + len(scored)
        score_s += fetches * times.host_seconds(device_bytes(state.params))
        update_s += 2 * times.host_seconds(device_bytes(state.opt_state))
    return {"score": score_s, "update": update_s}


def scores_of(policy: SizedPolicy) -> int:
    """Scores of a batch: by the reference, and by the policy before the first of several updates."""
    return (policy.config.loss.kl_coef > 0) + (policy.config.loss.minibatches * policy.config.loss.epochs > 1)


def function_flops(policy: SizedPolicy, tokens: MicroBatchShape) -> tuple[Flops, Flops]:
    """(score, update) of one micro-batch on one device."""
    model, tensor = policy.model_config, policy.placement.train.shape["tensor"]
    shape = (model, tokens, tensor, model.attention)
    return score_flops(*shape), update_flops(*shape, is_chunked(tokens.scored, policy.config.logp_chunk))
