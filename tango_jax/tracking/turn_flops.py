"""FLOPs of a turn by arithmetic, for comparisons of methods by what they compute on any machine.

Tokens count once where they must be computed once: a prompt for all its responses, no padding, nothing that a backward
pass computes again. A backward pass is twice its forward pass, or once where a matrix is frozen.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.method.turn import Turn
from tango_jax.models.flops import adapter_flops, head_flops, layer_flops
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Lesson, Responses
from tango_jax.rl.packing import action_mask
from tango_jax.rl.policy import Policy


class Work(NamedTuple):
    """Of forward passes."""

    tokens: int
    pairs: float  # of queries and keys
    scored: int  # tokens whose logits are needed


def turn_flops(t: Turn, lesson: Lesson, policies: Mapping[str, Policy]) -> dict[str, float]:
    """`flops/rollout` of all that the turn sampled or read, with groups that dynamic sampling dropped;
    `flops/training` of its update and the scores for it."""
    rollout, policy = 0.0, policies[t.role]
    for responses in t.everything():
        if responses.rollout.others is not None:  # read once, whatever was drawn
            M = responses.group_size
            responses = responses.replace(group_size=1, rollout=responses.rollout.rows(slice(None, None, M)))
            scored = sum(int((other_T >= 0).sum()) for other_T in responses.rollout.others)
        else:
            scored = sum(map(len, responses.rollout.tokens))
        model = policies[responses.role].model_config
        if model.score_head:  # its head runs on all that it reads
            scored = sum(map(len, responses.prompts))
        rollout += _forward(model, _work(responses, scored))
    learner, loss, model = lesson.responses, policy.config.loss, policy.model_config
    work = _work(learner, int(action_mask(policy.config, learner.rollout).sum()))
    # Of the reference, of the policy before several updates, of a teacher.
    scores = (loss.kl_coef > 0) + (policy.updates_per_batch > 1) + len(t.scored)
    training = scores * _forward(model, work) + loss.epochs * _update(model, work)
    return {"flops/rollout": rollout, "flops/training": training}


def _work(responses: Responses, scored: int) -> Work:
    lengths = np.array([len(tokens) for tokens in responses.rollout.tokens], float)
    prompts = np.array(list(map(len, responses.prompts)), float)
    prompt_B = np.repeat(prompts, responses.group_size)
    once = _once(responses.prompts)
    own = prompts[once]
    pairs = (own * (own + 1) / 2).sum() + (lengths * prompt_B + lengths * (lengths + 1) / 2).sum()
    return Work(int(own.sum() + lengths.sum()), float(pairs), scored)


def _once(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Joined responses to one prompt each name it."""
    return list({tuple(prompt): place for place, prompt in enumerate(prompts)}.values())


def _forward(model: ModelConfig, work: Work) -> float:
    return layer_flops(model, work.tokens, work.pairs) + _adapters(model, work) + head_flops(model, work.scored)


def _update(model: ModelConfig, work: Work) -> float:
    """Forward and backward pass."""
    frozen = layer_flops(model, work.tokens, 0) + head_flops(model, work.scored) if model.lora else 0.0
    return 3 * _forward(model, work) - frozen


def _adapters(model: ModelConfig, work: Work) -> float:
    return adapter_flops(model, work.tokens) if model.lora else 0.0
