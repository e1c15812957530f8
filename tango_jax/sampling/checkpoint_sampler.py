"""A sampler for any checkpoint, for `sample` and `evaluate`. Settings missing in the command line come from the run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tango_jax.config import default_config
from tango_jax.records import Rollout
from tango_jax.runtime.checks import cut, require
from tango_jax.runtime.device_memory import names_what_is_full
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.sampler import Sampler, SampleRequest, make_sampler
from tango_jax.sharding.layouts import param_shardings
from tango_jax.sharding.placement import Placement, check_model, make_placement
from tango_jax.text.templates import PRM_TEMPLATES, asks_to_stop, check_template, load_template
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.hf_layout import abstract_params
from tango_jax.weights.prompting import Prompting
from tango_jax.weights.source import NUMERICS, Source, kind_of
from tango_jax.weights.workdir import open_checkpoint, prompting_of

DEFAULT_TEMPLATE = "math"
MIN_STEPS = 3  # fewer step blocks lower the format score; a run has a setting of its own


@dataclasses.dataclass(frozen=True)
class CheckpointSamplerSettings:
    """Zeros and None stand for the run's settings, or for the defaults here."""

    template: str | None = None  # name or file; by default DEFAULT_TEMPLATE, or that of a process reward model
    max_prompt: int = 0
    max_new: int = 0
    use_chat: bool = False
    dtype: str = "float32"  # of the weights in memory and of all computation; a workdir keeps its own
    rows: int = 1  # decoded at once
    default_tokens: int = 2048  # of a prompt, and of a response
    max_new_flag: str = "max_new"  # what the command line calls it, for the error message
    decode_tensor: int = 1  # devices of a process that share a copy of the weights


@dataclasses.dataclass(frozen=True)
class CheckpointSampler:
    source: Source
    sampler: Sampler
    weights: dict | None  # in the sampler's layout; None until `with_weights`
    template: str
    max_prompt: int
    min_steps: int
    rows: int = 1
    placement: Placement | None = None  # None: the default device alone
    stops: bool = False  # a verifier that writes ends its judgements at the first INCORRECT
    reads_marks: bool = False  # a verifier writes nothing: its marks are read in one pass (text/mark_rows.py)
    chosen_by: str = ""  # see Prompting

    @property
    def is_sampled(self) -> bool:
        return not (self.reads_marks or self.source.model_config.score_head)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer

    def with_weights(self) -> "CheckpointSampler":
        """Reads the weights and lays them out. All processes of a job must call it."""
        shardings = None
        if self.placement is not None:
            shardings = param_shardings(self.placement.train, abstract_params(self.source.model_config))
        doing = f"reading the weights of {self.source.name}"
        with names_what_is_full(doing, lambda: "A model that is no run needs half with --dtype=bfloat16"):
            return dataclasses.replace(self, weights=self.sampler.layout(self.source.load_params(shardings)))

    def _advice_on_memory(self) -> str:
        fewer = f"--rows={self.rows // 2}, or " if self.rows > 1 else ""
        return f"Try {fewer}fewer tokens of a response or a prompt"

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        numbers_PM: np.ndarray,
        key_data: np.ndarray,
        temperature: float,
        top_p: float = 1.0,
    ) -> Rollout:
        """M responses to each of P prompts, prompt-major. Randomness depends on the key and a response's number. More
        than `rows` samples of a prompt take several rounds. FloatingPointError: logits are not finite."""
        rounds = []
        for start in range(0, numbers_PM.shape[1], self.rows):
            chosen_PM = numbers_PM[:, start : start + self.rows]
            request = SampleRequest(
                prompts, chosen_PM.shape[1], key_data, temperature, top_p, row_numbers=chosen_PM.reshape(-1)
            )
            try:
                with names_what_is_full(f"sampling from {self.source.name}", self._advice_on_memory):
                    rounds.append((chosen_PM.shape[1], self.sampler.sample(self.weights, request)))
            except FloatingPointError as error:
                raise FloatingPointError(f"cannot sample from {self.source.name}: {error}") from error
        # Each response's round and row, prompt by prompt.
        rows = [(rollout, p * size + m) for p in range(len(prompts)) for size, rollout in rounds for m in range(size)]
        return Rollout(
            tokens=tuple(rollout.tokens[b] for rollout, b in rows),
            logps=tuple(rollout.logps[b] for rollout, b in rows),
            is_truncated_B=np.array([rollout.is_truncated_B[b] for rollout, b in rows], bool),
            decode_steps=sum(rollout.decode_steps for _, rollout in rounds),
            row_steps=sum(rollout.row_steps for _, rollout in rounds),
        )


def open_checkpoint_sampler(role: str, name: str, settings: CheckpointSamplerSettings) -> CheckpointSampler:
    """Opens a checkpoint as "generator" or "verifier"; reads no weights. ValueError: it is missing or cannot run, a
    response exceeds its positions, or the devices cannot split it."""
    # A run chose these for its devices and its speed: here the model is what was trained.
    numerics = {"remat": "none", "attention": "auto", "decode_attention": "xla", "head_precision": "highest"}
    numerics |= {"sample_cache_dtype": "", "sample_weight_dtype": ""}
    if kind_of(name) != "workdir":
        numerics |= {key: settings.dtype for key in NUMERICS[:3]}
    own = prompting_of(name, role, download=True)
    use_chat = True if settings.use_chat else own.use_chat if own else None
    source = open_checkpoint(name, role, use_chat, **numerics)
    positions, score_head = source.model_config.max_position, source.model_config.score_head
    # A run's limits fit together; defaults must leave room for a prompt. A process reward model writes nothing.
    max_new = settings.max_new or (own.max_new_tokens if own else min(settings.default_tokens, positions // 2))
    max_new *= not score_head
    if max_new >= positions:
        raise ValueError(f"--{settings.max_new_flag}={max_new} leaves no room for a prompt in the {positions} "
                         f"positions of {name}: lower it")
    max_prompt = settings.max_prompt or min(own.max_prompt if own else settings.default_tokens, positions - max_new)
    if max_prompt + max_new > positions:
        flag = settings.max_new_flag.replace("new", "prompt")
        raise ValueError(f"--{flag}={max_prompt} and --{settings.max_new_flag}={max_new} are more than the {positions} "
                         f"positions of {name}: lower one of them")
    placement = _placement(source, settings)
    sampler_config = _sampler_config(max_prompt, max(1, max_new), settings.rows)
    named = template_of(own, settings, PRM_TEMPLATES.get(score_head, DEFAULT_TEMPLATE))
    template, reads_marks = load_template(role, named), not score_head and own is not None and own.is_scored
    check_template(f"the template {cut(named)}", template, score_head, source.tokenizer)
    return CheckpointSampler(
        source=source,
        sampler=make_sampler(source.model_config, sampler_config, source.tokenizer.stop_ids, placement),
        weights=None,
        template=template,
        max_prompt=max_prompt,
        min_steps=own.min_steps if own else MIN_STEPS,
        rows=settings.rows,
        placement=placement,
        stops=not (score_head or reads_marks) and asks_to_stop(named, own is not None and own.stop_at_first_error),
        reads_marks=reads_marks,
        chosen_by=own.chosen_by if own else "",
    )


def uses_chat(options: Any, role: str) -> bool:
    """Whether a command's options ask for a role's prompts in the chat template. Each of the two flags is of one model,
    since one may be a process reward model, a base model or a run with prompts of its own. Raises ValueError where
    that model is not named."""
    flags = {"checkpoint": "use_chat", "verifier": "verifier_use_chat"}
    for model, flag in flags.items():
        require(not getattr(options, flag) or bool(getattr(options, model)), f"--{flag}: no --{model} is given; "
                "--use_chat is of the prompts of --checkpoint, and --verifier_use_chat of those of --verifier")
    return getattr(options, flags["verifier" if role == "verifier" and options.verifier else "checkpoint"])


def template_of(
    own: Prompting | None, settings: CheckpointSamplerSettings, default: str = DEFAULT_TEMPLATE
) -> str:
    return settings.template or (own.template if own else default)


def _placement(source: Source, settings: CheckpointSamplerSettings) -> Placement | None:
    """All devices share the reading, and those of a process its rows; one row needs one device."""
    if settings.decode_tensor == 1 and (jax.device_count() == 1 or settings.rows == 1):
        return None
    mesh = default_config().generator.mesh.copy_and_resolve_references()
    mesh.decode_tensor = settings.decode_tensor
    placement = make_placement(mesh)
    check_model(source.model_config, mesh, placement)
    return placement


def _sampler_config(max_prompt: int, max_new: int, rows: int) -> SamplerConfig:
    """Doubling buckets: short rows do not pay for long ones. For a few rows of a large model, compiling a size takes
    longer than it saves: with many rows there are fewer sizes."""
    start = 64 if rows == 1 else 256
    return SamplerConfig(
        prompt_buckets=doubling_buckets(start, max_prompt),
        cache_buckets=doubling_buckets(2 * start, max_new),
        row_buckets=(rows // 4, rows) if rows >= 4 else (rows,),
    )


def doubling_buckets(start: int, last: int) -> tuple[int, ...]:
    return (*(start << power for power in range(32) if start << power < last), last)
