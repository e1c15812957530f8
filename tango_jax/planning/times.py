"""Seconds of every phase of a turn, predicted from counts and a data sheet's rates. Nothing here was timed.

In: the job, its compiled functions, what a turn does (workload.py). Out: {phase: seconds} for a turn of either role.

    products    FLOPs at SHARE_OF_FLOPS of the dense rate of their type
    memory      bytes read at SHARE_OF_READ of the memory's rate
    sending     bytes received at SHARE_OF_LINK of the link's rate: between hosts, each device of a group has a network
                card, and those of a host share what the host receives
An update or a score takes the longer of its products and its gathers and scatters, which run beside them, and then its
sums. A decode step takes the longer of reading weights and cache and of its products, and STEP_OVERHEAD a layer.
Parsing, grading and evaluation are not in it.
"""

from typing import NamedTuple

from tango_jax.arms import ARMS
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.hlo import Collective, ring_bytes
from tango_jax.planning.needs import (
    Flops,
    decode_bytes,
    decode_flops,
    optimizer_bytes,
    prefill_flops,
    score_flops,
    update_flops,
)
from tango_jax.planning.programs import Job, Program, device_bytes
from tango_jax.planning.targets import Target
from tango_jax.planning.workload import SamplingWorkload, UpdateWorkload, sampling_workload, update_workload
from tango_jax.rl.policy import Policy
from tango_jax.rl.score import is_chunked

SHARE_OF_FLOPS = 0.5
SHARE_OF_READ = 0.7
SHARE_OF_LINK = 0.8
STEP_OVERHEAD = 10e-6  # seconds a layer of a decode step: starting kernels, and small ones
SUM_LATENCY = 10e-6  # seconds of a sum of few bytes over the devices that share decoding weights
OVERLAPPED = ("all-gather", "reduce-scatter")  # sent while something is computed


class TimeModel(NamedTuple):
    """Seconds on one target."""

    target: Target

    def matmul_seconds(self, flops: Flops, compute_dtype: str, head_dtype: str) -> float:
        target = self.target
        layers = target.flops_float32 if compute_dtype == "float32" else target.flops
        head = target.flops_highest if head_dtype == "float32" else target.flops  # see transformer.logits_from_hidden
        return (flops.layers / layers + flops.head / head) / SHARE_OF_FLOPS

    def read_seconds(self, size: float) -> float:
        return size / (self.target.read * SHARE_OF_READ)

    def transfer_seconds(self, item: Collective) -> float:
        return item.wire_bytes / (self.bandwidth(item.members) * SHARE_OF_LINK)

    def bandwidth(self, members: tuple[int, ...]) -> float:
        """Bytes per second that a device of the group receives."""
        hosts = [member // self.target.per_host for member in members]
        if len(set(hosts)) == 1:
            return self.target.link
        return min(self.target.link, self.target.network * max(hosts.count(host) for host in set(hosts)))

    def training_seconds(self, policy: Policy, program: Program, flops: Flops, passes: UpdateWorkload) -> float:
        """All micro-batches of an update or a score."""
        model, count, calls = policy.model_config, passes.micro_batches, passes.calls
        overlapped = [item for item in program.collectives if item.kind in OVERLAPPED]
        inside = sum(self.transfer_seconds(item) for item in overlapped if item.in_pass)
        open_sums = [item for item in program.collectives if item.kind not in OVERLAPPED]
        sums = sum(self.transfer_seconds(item) * (count if item.in_pass else calls) for item in open_sums)
        outside = calls * sum(self.transfer_seconds(item) for item in overlapped if not item.in_pass)
        return count * max(self.matmul_seconds(flops, model.compute_dtype, model.head_dtype), inside) + outside + sums

    def sampling_seconds(self, policy: Policy, done: SamplingWorkload) -> float:
        """All decode batches of a phase. Copies of rows to host memory and back are not counted."""
        model, placement = policy.model_config, policy.placement
        tensor, groups = placement.local.shape["tensor"], placement.row_multiple
        dtypes = (model.compute_dtype, model.head_dtype)
        prompts = done.prompts / groups
        prefill = prefill_flops(model, prompts, done.prompt_length, tensor, model.attention)
        seconds = done.passes * self.matmul_seconds(prefill, *dtypes)
        for segment in done.segments:
            rows = segment.rows / groups
            # Once rows are compacted into a smaller batch, each has a prefix of its own.
            is_shared = done.shares_prompts and segment.rows == done.segments[0].rows
            prefixes = min(prompts, rows) if is_shared else rows
            size = decode_bytes(model, prefixes, done.prompt_length, rows, segment.cache, tensor)
            flops = decode_flops(model, rows, done.prompt_length + segment.cache, tensor)
            step = max(self.read_seconds(size), self.matmul_seconds(flops, *dtypes))
            seconds += segment.steps * (step + model.num_layers * (STEP_OVERHEAD + self._sums(model, rows, tensor)))
        return done.batches * seconds

    def _sums(self, model: ModelConfig, rows: float, tensor: int) -> float:
        """The two sums of a layer over the devices that share decoding weights."""
        if tensor == 1:
            return 0.0
        size = ring_bytes("all-reduce", 2 * rows * model.width, tensor)
        return 2 * (SUM_LATENCY + size / (self.target.link * SHARE_OF_LINK))


class TurnPlan(NamedTuple):
    """What a turn of one role does, and how long that takes."""

    role: str
    passes: UpdateWorkload
    sampled: dict[str, SamplingWorkload]  # by the role that samples
    seconds: dict[str, float]  # phase -> seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def plan_turn(job: Job, programs: dict[str, Program], target: Target, role: str, filled: float) -> TurnPlan:
    """The turn in which `role` is updated."""
    times, rl, policy = TimeModel(target), job.config.rl, job.policies[role]
    M, is_generator = rl.samples_per_prompt, role == "generator"
    judged = (job.prompts * M, rl.verifications_per_solution) if is_generator else (job.prompts, M)
    sampled = {"generator": sampling_workload(job, "generator", job.prompts, M if is_generator else 1, filled)}
    if "verifier" in {call.role for call in ARMS[job.config.arm].turns[role].calls}:
        sampled["verifier"] = sampling_workload(job, "verifier", *judged, filled)
    passes = update_workload(job, role, filled)
    loss = policy.config.loss
    score, update = function_flops(policy, passes)
    seconds = {"reshard": sum(reshard_seconds(times, programs[f"{name}/layout"]) for name in sampled)}
    for name, phase in (("generator", "sample"), ("verifier", "verify")):
        if name in sampled:
            seconds[phase] = times.sampling_seconds(job.policies[name], sampled[name])
    seconds["score"] = scores_of(policy) * times.training_seconds(policy, programs[f"{role}/score"], score, passes)
    state = job.states[role]
    step = loss.minibatches * times.read_seconds(optimizer_bytes(device_bytes(state), device_bytes(state.params)))
    update_s = times.training_seconds(policy, programs[f"{role}/update"], update, passes)
    seconds["update"] = loss.epochs * (update_s + step)
    return TurnPlan(role, passes, sampled, seconds)


def scores_of(policy: Policy) -> int:
    """How often a batch is scored: by the reference, and by the policy itself before the first of several updates."""
    return (policy.config.loss.kl_coef > 0) + (policy.updates_per_batch > 1)


def function_flops(policy: Policy, passes: UpdateWorkload) -> tuple[Flops, Flops]:
    """(score, update) of one micro-batch on one device."""
    model, tensor = policy.model_config, policy.placement.train.shape["tensor"]
    shape = (model, passes.tokens, tensor, model.attention)
    return score_flops(*shape), update_flops(*shape, is_chunked(passes.tokens.scored, policy.config.logp_chunk))


def reshard_seconds(times: TimeModel, layout: Program) -> float:
    """Parameters sent to where they are sampled with, and written there."""
    sent = sum(times.transfer_seconds(item) for item in layout.collectives)
    return sent + times.read_seconds(layout.output + layout.argument)
