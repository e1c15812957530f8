"""FLOPs of a turn by arithmetic, for comparisons of methods by what they compute on any machine.

Tokens count once where they must be computed once: a prompt for all its responses, no padding, nothing that a backward
pass computes again. A backward pass is twice its forward pass, or once where a matrix is frozen.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tango_jax.method.turn import Turn
from tango_jax.models.flops import Work, forward_flops, head_flops, layer_flops, reading, writing
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Lesson, Responses
from tango_jax.rl.packing import action_mask
from tango_jax.rl.policy import Policy


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
        rollout += forward_flops(model, _work(responses, scored))
    learner, loss, model = lesson.responses, policy.config.loss, policy.model_config
    work = _work(learner, int(action_mask(policy.config, learner.rollout).sum()))
    # Of the reference, of the policy before several updates, of a teacher.
    scores = (loss.kl_coef > 0) + (policy.updates_per_batch > 1) + len(t.scored)
    training = scores * forward_flops(model, work) + loss.epochs * _update(model, work)
    return {"flops/rollout": rollout, "flops/training": training}


def _work(responses: Responses, scored: int) -> Work:
    lengths, prompts = (np.array(list(map(len, texts))) for texts in (responses.rollout.tokens, responses.prompts))
    prompt_B = np.repeat(prompts, responses.group_size)
    read = prompts[_distinct(responses.prompts)] if responses.is_joined else prompts
    return reading(read).plus(writing(prompt_B, lengths))._replace(scored=scored)


def _distinct(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Joined responses each name their prompt, and packing joins what is equal. Elsewhere equal prompts, such as those
    of two equal solutions, are computed one by one."""
    return list({tuple(prompt): place for place, prompt in enumerate(prompts)}.values())


def _update(model: ModelConfig, work: Work) -> float:
    """Forward and backward pass."""
    frozen = layer_flops(model, work.tokens, 0) + head_flops(model, work.scored) if model.lora else 0.0
    return 3 * forward_flops(model, work) - frozen
