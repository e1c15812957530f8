"""A role that is ready to write, from any checkpoint, for the commands that have no training config.

In: a checkpoint's name and what the command line says of prompts, lengths and rows; a workdir's own settings go where
it says nothing. Out: a Speaker, and what it writes. Stage: none of the loop; `sample` and `evaluate` speak through it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tango_jax.config import default_config
from tango_jax.records import Rollout
from tango_jax.sampling.sampler import Sampler, SamplerConfig, make_sampler
from tango_jax.sharding.layouts import param_shardings
from tango_jax.sharding.placement import Placement, check_model, make_placement
from tango_jax.text.templates import load_template
from tango_jax.weights.hf_layout import abstract_params
from tango_jax.weights.source import NUMERICS, Source, kind_of
from tango_jax.weights.workdir import open_checkpoint, read_config

MIN_STEPS = 3  # fewer step blocks cost format score; a workdir brings its own


@dataclasses.dataclass(frozen=True)
class SpeakerSettings:
    """What a command line says; zeros and None leave it to the workdir, or to the defaults here."""

    template: str | None = None  # name or file; by default "math"
    max_prompt: int = 0
    max_new: int = 0
    use_chat: bool = False
    dtype: str = "float32"  # of the weights in memory and of everything computed; a workdir keeps its own
    rows: int = 1  # decoded at once
    default_tokens: int = 2048  # of a prompt, and of a response
    max_new_flag: str = "max_new"  # what the command line calls it, for the error message
    decode_tensor: int = 1  # devices of a process that share a copy of the weights


@dataclasses.dataclass(frozen=True)
class Speaker:
    """An opened role."""

    source: Source
    sampler: Sampler
    weights: Any  # as the sampler wants them; None until `with_weights`
    template: str
    max_prompt: int
    min_steps: int
    rows: int = 1
    placement: Placement | None = None  # None: the default device alone


def open_speaker(role: str, name: str, settings: SpeakerSettings) -> Speaker:
    """Open a checkpoint as `role` ("generator" or "verifier"); no weights are read yet.

    Raises:
        ValueError: nothing of that name, a checkpoint that cannot be run, a response longer than its positions, or
            devices that the model cannot be split over.
    """
    # A run's choice of attention was made for its own devices.
    numerics, min_steps = {"remat": "none", "attention": "auto"}, MIN_STEPS
    if kind_of(name) == "workdir":
        config = read_config(Path(name).expanduser())
        own, min_steps = config[role], config.task.min_steps
    else:
        own = default_config()[role].copy_and_resolve_references()
        own.max_prompt = own.max_response = settings.default_tokens
        numerics |= {key: settings.dtype for key in NUMERICS[:3]}
    source = open_checkpoint(name, role, True if settings.use_chat else None, **numerics)
    positions = source.model_config.max_position
    max_new = settings.max_new or min(own.max_response, positions // 2)
    if max_new >= positions:
        raise ValueError(f"--{settings.max_new_flag}={max_new} leaves no room for a prompt in the {positions} "
                         f"positions of {name}: lower it")
    max_prompt = settings.max_prompt or min(own.max_prompt, positions - max_new)
    if max_prompt + max_new > positions:
        flag = settings.max_new_flag.replace("new", "prompt")
        raise ValueError(f"--{flag}={max_prompt} and --{settings.max_new_flag}={max_new} are more than the {positions} "
                         f"positions of {name}: lower one of them")
    placement = _placement(source, settings)
    buckets = _buckets(max_prompt, max_new, settings.rows)
    sampler = make_sampler(source.model_config, buckets, source.tokenizer.stop_ids, placement)
    template = load_template(role, settings.template or own.template)
    return Speaker(source, sampler, None, template, max_prompt, min_steps, settings.rows, placement)


def _placement(source: Source, settings: SpeakerSettings) -> Placement | None:
    """All devices of the job share the reading, and those of a process its rows; one row alone needs one device."""
    if settings.decode_tensor == 1 and (jax.device_count() == 1 or settings.rows == 1):
        return None
    mesh = default_config().generator.mesh.copy_and_resolve_references()
    mesh.decode_tensor = settings.decode_tensor
    placement = make_placement(mesh)
    check_model(source.model_config, mesh, placement)
    return placement


def with_weights(speaker: Speaker) -> Speaker:
    """The same speaker, its weights read and laid out for sampling. All processes of a job must call it."""
    shardings = None
    if speaker.placement is not None:
        shardings = param_shardings(speaker.placement.train, abstract_params(speaker.source.model_config))
    return dataclasses.replace(speaker, weights=speaker.sampler.layout(speaker.source.load_params(shardings)))


def write_many(
    speaker: Speaker,
    prompts: Sequence[Sequence[int]],
    numbers_PM: np.ndarray,
    key_data: np.ndarray,
    temperature: float,
    top_p: float = 1.0,
) -> Rollout:
    """M responses to each of P prompts, prompt-major. A response's randomness depends on the key and its number alone.

    Samples of a prompt share its cache: M of them above the speaker's rows are written in several rounds.

    Raises:
        FloatingPointError: logits that are not finite, with the checkpoint's name.
    """
    rounds = []
    for start in range(0, numbers_PM.shape[1], speaker.rows):
        chosen_PM = numbers_PM[:, start : start + speaker.rows]
        try:
            rollout = speaker.sampler.sample(
                speaker.weights, prompts, chosen_PM.shape[1], key_data, temperature, top_p,
                row_numbers=chosen_PM.reshape(-1),
            )  # fmt: skip
        except FloatingPointError as error:
            raise FloatingPointError(f"cannot sample from {speaker.source.name}: {error}") from error
        rounds.append((chosen_PM.shape[1], rollout))
    # Which row of which round each response is, prompt by prompt.
    rows = [(rollout, p * size + m) for p in range(len(prompts)) for size, rollout in rounds for m in range(size)]
    return Rollout(
        tokens=tuple(rollout.tokens[b] for rollout, b in rows),
        logps=tuple(rollout.logps[b] for rollout, b in rows),
        is_truncated_B=np.array([rollout.is_truncated_B[b] for rollout, b in rows], bool),
        decode_steps=sum(rollout.decode_steps for _, rollout in rounds),
        row_steps=sum(rollout.row_steps for _, rollout in rounds),
    )


def _buckets(max_prompt: int, max_new: int, rows: int) -> SamplerConfig:
    """Doubling sizes: a short question does not pay for a long one's padding, nor a short answer for a long cache.

    Each size is compiled once, which takes longer for a large model than it saves for a few rows: with many rows there
    are fewer sizes.
    """
    start = 64 if rows == 1 else 256
    return SamplerConfig(
        prompt_buckets=_doubling(start, max_prompt),
        cache_buckets=_doubling(2 * start, max_new),
        row_buckets=(rows // 4, rows) if rows >= 4 else (rows,),
    )


def _doubling(start: int, last: int) -> tuple[int, ...]:
    return (*(start << power for power in range(32) if start << power < last), last)
