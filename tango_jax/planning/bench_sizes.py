"""Sizes at which a model is timed: how much of the model, on which mesh, and how many rows and tokens.

In: the options of `bench --model=...`, and this machine. Out: a policy with random weights, and its sizes. Stage: the
start of `bench`. Sizes that the user leaves open follow from the device's memory; whether all of them fit is worked out
before anything is allocated.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from tango_jax.config import default_config, role_config
from tango_jax.models.attention import capability_of
from tango_jax.models.decode_attention import attention_names
from tango_jax.models.lora import LoraConfig
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.choices import halved
from tango_jax.planning.estimates import estimated_phases, rows_fit
from tango_jax.planning.job import Job, counted_placement, sized_job
from tango_jax.planning.machines import GIB, Machine
from tango_jax.planning.memory import PHASES_OF
from tango_jax.planning.sources import blank_tokenizer
from tango_jax.rl.policy import Policy, make_policy
from tango_jax.runtime.checks import cut, local_path
from tango_jax.sharding.placement import Placement, check_model
from tango_jax.weights.presets import CONFIG_JSON, short_names
from tango_jax.weights.source import NUMERICS, Source, published_model

SAMPLES = 8  # responses to a prompt
MICRO_BATCHES = 2  # of an update on each shard, so that gradients are accumulated as in a run
MESH_AXES = ("data", "fsdp", "tensor", "decode_tensor")


class BenchOptions(NamedTuple):
    """What the command line says. 0 stands for a size that it leaves open."""

    model: str  # a preset, by its short name or hub id, or a folder with a config.json
    dtype: str = "bfloat16"  # of products and of the cache; parameters are float32, as in a run
    head_dtype: str = "float32"
    head_precision: str = "highest"
    sample_cache_dtype: str = ""
    sample_weight_dtype: str = ""
    attention: str = "auto"
    decode_attention: str = "xla"
    remat: str = "full"
    base_dtype: str = ""  # of the frozen base of adapters
    mesh: str = "fsdp:-1"  # axis:size,axis:size; -1: all devices that the other axes leave
    layers: int = 0  # 0: all
    vocab: int = 0  # tokens that it knows, no option of the command line; 0: all
    rows: int = 0
    prompt: int = 0
    new: int = 0
    samples: int = 0
    micro_rows: int = 0
    logp_chunk: int = 0
    lora_rank: int = 0  # 0: all parameters are trained


class Sizes(NamedTuple):
    """Rows and tokens."""

    rows: int  # decoded at once, on all devices
    samples: int  # rows that continue the same prompt
    prompt: int  # tokens of each prompt
    new: int  # tokens of each response
    micro_rows: int  # responses in a micro-batch of a shard
    logp_chunk: int  # tokens of a micro-batch whose logits exist at a time

    @property
    def prompts(self) -> int:
        return self.rows // self.samples

    @property
    def micro_samples(self) -> int:
        """Responses to a prompt in the batch that is trained on: a small micro-batch has room for fewer."""
        return min(self.samples, self.micro_rows)

    @property
    def micro_prompts(self) -> int:
        return math.ceil(self.micro_rows / self.micro_samples)


class Usual(NamedTuple):
    """Sizes to try where the user says nothing."""

    rows: int
    prompt: int
    new: int
    micro_tokens: int  # of a micro-batch


USUAL_CPU = Usual(rows=8, prompt=64, new=32, micro_tokens=512)
USUAL_ACCELERATOR = Usual(rows=256, prompt=512, new=512, micro_tokens=16_384)


def open_model(options: BenchOptions) -> ModelConfig:
    """The model that the options name, cut to `layers` and `vocab`. Nothing is downloaded.

    Raises:
        ValueError: there is no such model, this project cannot run it, or it has fewer layers, or a matrix that is
            narrower than the rank of its adapter.
    """
    known = short_names()
    name = known.get(options.model, options.model)
    if name not in CONFIG_JSON and not local_path("--model", name).exists():
        raise ValueError(f"--model={cut(name)} is neither a preset nor a folder: choose one of {', '.join(known)}, or "
                         "give a folder that contains a config.json (weights are not read)")
    numerics = {"compute_dtype": options.dtype}
    numerics |= {key: getattr(options, key) for key in NUMERICS if key in BenchOptions._fields}
    model = published_model(name, **numerics)
    if options.layers > model.num_layers:
        raise ValueError(f"--layers={options.layers} is more than the {model.num_layers} of {cut(name)}: choose at "
                         f"most {model.num_layers}, or leave the option out for all of them")
    rank, alpha = options.lora_rank, role_config().model.lora.alpha
    lora = LoraConfig(rank, alpha, base_dtype=options.base_dtype) if rank else None
    try:
        sizes = {"num_layers": options.layers or model.num_layers, "vocab_size": options.vocab or model.vocab_size}
        return dataclasses.replace(model, **sizes, lora=lora)
    except ValueError as error:
        raise ValueError(f"--lora_rank={rank}: {error}") from error


def parse_mesh(text: str) -> ConfigDict:
    """`fsdp:4,decode_tensor:2` -> the `mesh` settings of a role; axes that are not named keep their defaults.

    Raises:
        ValueError: another axis, or a size that is no whole number.
    """
    settings = role_config().mesh
    for part in text.split(","):
        axis, _, size = part.partition(":")
        is_number = size.removeprefix("-").isdecimal() and len(size) < 8
        if axis not in MESH_AXES or not is_number:
            raise ValueError(f"--mesh={cut(text)}: {cut(part)!r} is not AXIS:SIZE, such as fsdp:4; the axes are "
                             f"{', '.join(MESH_AXES)}")
        settings[axis] = int(size)
    return settings


def place_model(options: BenchOptions, model: ModelConfig, machine: Machine) -> tuple[ConfigDict, Placement]:
    """The `mesh` settings of the options, and the meshes on that machine.

    Raises:
        ValueError: they fit neither the devices nor the model.
    """
    settings = parse_mesh(options.mesh)
    try:
        placement = counted_placement(settings, machine)
        check_model(model, settings, placement)
    except ValueError as error:
        raise ValueError(f"--mesh={cut(options.mesh)}: {error}") from error
    return settings, placement


def choose_sizes(options: BenchOptions, model: ModelConfig, machine: Machine) -> Sizes:
    """The sizes of the options, and for the others the largest usual ones that should fit.

    Raises:
        ValueError: sizes that do not go together, that exceed the model's positions, or that fit neither the devices
            nor what they can run.
    """
    mesh, placement = place_model(options, model, machine)
    usual, groups = USUAL_CPU if machine.is_cpu else USUAL_ACCELERATOR, placement.row_multiple
    half = model.max_position // 2
    prompt, new = options.prompt or min(usual.prompt, half), options.new or min(usual.new, half)
    if prompt + new > model.max_position:
        raise ValueError(f"--prompt={prompt} and --new={new} are {prompt + new} tokens, more than the "
                         f"{model.max_position} positions of the model: lower one of them")
    most = options.rows or max(usual.rows, groups)
    samples = options.samples or math.gcd(SAMPLES, max(1, most // groups))
    if options.rows % (samples * groups):
        raise ValueError(f"--rows={options.rows} must be a multiple of {samples * groups}: {samples} samples of a "
                         f"prompt on each of {groups} device groups; change it, or --samples")
    chunk = options.logp_chunk or machine.scale.logits_chunk(model.vocab_size)

    def fits(sizes: Sizes, kind: str) -> bool:
        return rows_fit(bench_job(model, sizes, mesh, machine), "generator", kind, machine)

    sizes = Sizes(most, samples, prompt, new, options.micro_rows or 1, chunk)
    if not options.rows:
        tried = [sizes._replace(rows=rows) for rows in halved(most, samples * groups)]
        sizes = next((each for each in tried if fits(each, "sampling")), sizes._replace(rows=samples * groups))
    while not options.micro_rows:
        larger = sizes._replace(micro_rows=2 * sizes.micro_rows)
        tokens = larger.micro_rows * (new + 1) + larger.micro_prompts * prompt
        if tokens > usual.micro_tokens or not fits(larger, "training"):
            break
        sizes = larger
    return sizes


def bench_job(model: ModelConfig, sizes: Sizes, mesh: ConfigDict, machine: Machine) -> Job:
    """What is timed, as shapes, before it is allocated.

    Raises:
        ValueError: see `sized_job`.
    """
    config = default_config()
    config.generator = role_settings(sizes, mesh)
    config.rl.prompts_per_step, config.rl.samples_per_prompt = sizes.micro_prompts * MICRO_BATCHES, sizes.micro_samples
    return sized_job(config, {"generator": model}, machine, sizes.samples)


def role_settings(sizes: Sizes, mesh: ConfigDict) -> ConfigDict:
    """A role's configuration of these sizes, without a reference policy."""
    config = role_config()
    config.mesh = mesh
    config.max_prompt, config.max_response, config.row_buckets = sizes.prompt, sizes.new, (sizes.rows,)
    config.rows_per_micro_batch, config.prompts_per_micro_batch = sizes.micro_rows, sizes.micro_prompts
    config.logp_chunk, config.loss.kl_coef = sizes.logp_chunk, 0.0
    return config


def make_bench_policy(model: ModelConfig, sizes: Sizes, mesh: ConfigDict) -> Policy:
    """The jitted functions of a policy of these sizes. No token ends its responses, and its weights are random.

    Raises:
        ValueError: the devices cannot run the attention that is asked for.
    """
    config = role_settings(sizes, mesh)
    tokenizer = dataclasses.replace(blank_tokenizer(model), stop_ids=(model.vocab_size,))
    return make_policy("generator", config, Source("", model, tokenizer, None, lambda folder: None, {}))


def open_bench(options: BenchOptions, memory: int) -> tuple[Policy, Sizes]:
    """The policy and the sizes that are timed, on devices of `memory` bytes each.

    Raises:
        ValueError: the options do not fit the model, the devices or their memory.
    """
    if jax.process_count() > 1:
        raise ValueError(f"--model is timed in one process, and there are {jax.process_count()}: start one, with all "
                         "devices of a machine")
    model, machine = open_model(options), bench_machine(memory)
    sizes = choose_sizes(options, model, machine)
    mesh = parse_mesh(options.mesh)
    check_memory(bench_job(model, sizes, mesh, machine), sizes, machine)
    return make_bench_policy(model, sizes, mesh), sizes


def bench_machine(memory: int) -> Machine:
    """This machine, with so many bytes of each device."""
    return Machine(jax.default_backend(), jax.device_count(), memory, capability_of(jax.local_devices()[0]))


def check_memory(job: Job, sizes: Sizes, machine: Machine) -> None:
    """Raises ValueError where the largest arrays alone, without any temporary ones, exceed a device's memory."""
    found = [phase for kind in PHASES_OF for phase in estimated_phases(job, "generator", kind, machine.platform)]
    phases = {phase.name.removeprefix("generator/"): phase for phase in found}
    update, sample = phases["update"], phases["sample"]
    held = {"parameters and moments": update.parameters + update.optimizer}
    _check("an update", held | {"gradients": update.gradients}, machine.memory, "--layers")
    parts = held | {"weights to sample with": sample.weights, "keys and values": sample.cache}
    _check(f"sampling {sizes.rows} rows of {sizes.prompt} + {sizes.new} tokens", parts, machine.memory,
           "--rows, --prompt, --new or --layers")


def _check(what: str, parts: dict[str, float], memory: int, options: str) -> None:
    total = sum(parts.values())
    if total > memory:
        shown = ", ".join(f"{size / GIB:.1f} of {name}" for name, size in parts.items())
        raise ValueError(f"{what} takes at least {total / GIB:.1f} GiB of each device ({shown}), which has "
                         f"{memory / GIB:.1f} GiB: lower {options}, or split the model over more devices with --mesh")


def describe_sizes(policy: Policy, sizes: Sizes) -> str:
    """One line, before anything is timed."""
    model, shape = policy.model_config, policy.placement.train.shape
    mesh = " x ".join(f"{axis} {size}" for axis, size in shape.items())
    tokens = sizes.micro_rows * (sizes.new + 1) + sizes.micro_prompts * sizes.prompt
    dtypes = {"weights": model.sample_weight_dtype, "cache": model.sample_cache_dtype}
    split = ", as three products of bfloat16" if model.head_precision == "bfloat16_x3" else ""
    lora = f"adapters of rank {model.lora.rank} on a frozen base, " if model.lora else ""
    small = "".join(f", {name} in {dtype}" for name, dtype in dtypes.items() if dtype)
    return (
        f"sizes: {model.num_layers} layers in {model.compute_dtype}, {lora}head in {model.head_dtype}{split}, "
        f"attention {attention_names(model)}, mesh {mesh}, decoding weights on "
        f"{policy.config.mesh.decode_tensor} device(s) each; sampling {sizes.rows} rows ({sizes.prompts} prompts of "
        f"{sizes.prompt} tokens x {sizes.samples} samples of {sizes.new}{small}); "
        f"training on {MICRO_BATCHES} micro-batches of {tokens} tokens on each of "
        f"{policy.placement.num_shards} shard(s) ({sizes.micro_rows} responses, {sizes.micro_prompts} prompts, logits "
        f"of {sizes.logp_chunk} tokens at a time, remat {model.remat})"
    )
