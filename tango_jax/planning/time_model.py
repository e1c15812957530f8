"""Seconds of a function or of a decode step: its work (costs.py, traffic.py) over shares of a data sheet's rates.

    products    at the share for their kind of work (`Shares`) of the dense rate of their type; a float32 head with
                HIGHEST at SHARE_OF_FLOAT32 on a GPU; one in three bfloat16 products at a third
    memory      at the share `read` of the memory's rate
    sending     at SHARE_OF_LINK of the link's rate; between hosts, each device of a group has a network card

A micro-batch takes the longer of its products and of what is sent meanwhile (`Collective.hidden`), and then the rest of
what is sent. Each part of a decode step takes the longer of its reads and its products, and each layer STEP_OVERHEAD.
"""

from collections import Counter
from typing import NamedTuple

from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import (
    Flops,
    MicroBatchShape,
    StepPart,
    decode_parts,
    prefill_flops,
    score_flops,
    update_flops,
)
from tango_jax.planning.job import SizedPolicy
from tango_jax.planning.programs import Program
from tango_jax.planning.targets import Target
from tango_jax.planning.traffic import Collective, ring_bytes
from tango_jax.planning.workload import SamplingWorkload, UpdateWorkload
from tango_jax.rl.score import is_chunked

# 8,000 x 8,000 on an A100 (github.com/bewantbe/busy-gemm-benchmark): 14.1 of 19.5 TFLOP/s in float32.
SHARE_OF_FLOAT32 = 0.7
SHARE_OF_LINK = 0.8
STEP_OVERHEAD = 10e-6  # seconds a layer of a decode step: starting kernels, and small ones
SUM_LATENCY = 25e-6  # seconds of a sum of few bytes over the devices that share decoding weights


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
        self, policy: SizedPolicy, program: Program, passes: UpdateWorkload, kind: str = "update"
    ) -> float:
        sent = [(item, self.transfer_seconds(item)) for item in program.collectives]
        hidden = sum(item.hidden * seconds for item, seconds in sent if item.in_pass)
        alone = sum((1 - item.hidden) * seconds for item, seconds in sent if item.in_pass)
        once = sum(seconds for item, seconds in sent if not item.in_pass)
        total = passes.calls * once
        for shape, count in passes.shapes.items():
            products = self.matmul_seconds(function_flops(policy, shape, kind), policy.model_config, kind)
            total += count * (max(products, hidden) + alone)
        return total

    def layout_seconds(self, layout: Program) -> float:
        return sum(map(self.transfer_seconds, layout.collectives)) + self.read_seconds(layout.output + layout.argument)

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


def function_flops(policy: SizedPolicy, tokens: MicroBatchShape, kind: str) -> Flops:
    """Of one micro-batch on one device."""
    model, tensor = policy.model_config, policy.placement.train.shape["tensor"]
    shape = (model, tokens, tensor, model.attention)
    if kind == "score":
        return score_flops(*shape)
    return update_flops(*shape, is_chunked(tokens.scored, policy.config.logp_chunk))
