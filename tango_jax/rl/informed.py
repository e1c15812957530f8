"""A verifier that imitates its initial self with the gold answer in the prompt (self-trained verification, arXiv
2605.30290; on-policy self-distillation, arXiv 2601.18734).

Takes the verifications of a turn; scores them under the informed prompt, which nothing else sees; returns log-probs,
which `family.informed_credit` reads. Runs between the calls of a turn and its credit. The teacher is the reference
policy, the verifier at the start of reinforcement learning, as the code of 2601.18734 recommends: a teacher with the
student's weights moves with it, and nothing keeps the two from degrading together (configs/family.md).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from tango_jax.records import Responses, Solution
from tango_jax.rl.packing import pack_minibatch
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.text.templates import verifier_prompt, with_earlier

MAX_TEACHER_TOKENS = 2**24  # above that, float32 cannot tell the places of tokens apart


def informed_prompts(policy: Policy, solutions: Sequence[Solution]) -> list[tuple[list[int], bool]]:
    """The verifier's prompts with the gold answer after the problem, and whether the end of the solution, which the
    verifier itself may have seen, had to be cut off."""
    return [
        verifier_prompt(
            policy.template, policy.tokenizer, with_earlier(policy.template, "informed", one.problem), one.text,
            len(one.steps), policy.config.max_prompt,
        )
        for one in solutions
    ]  # fmt: skip


def teacher_scores(
    teacher: str, policy: Policy, reference_fn: Callable | None, learner: Responses, is_action_BT: np.ndarray
) -> np.ndarray | None:
    """Log-probs of the sampled tokens under the informed prompt, by the reference policy (`Policy.reference_fn`),
    float32 [B, T], 0 off the actions, and NaN where that prompt has no room for the solution: there the teacher says
    nothing. None if the plan has no `teacher`."""
    if not teacher:
        return None
    assert is_action_BT.size < MAX_TEACHER_TOKENS, is_action_BT.size  # validation.py
    prompts = informed_prompts(policy, learner.parents)
    informed = dataclasses.replace(learner, prompts=[ids for ids, _ in prompts])
    # Each token carries its place through the packing, where its advantage will be in the update.
    place_BT = np.arange(1, 1 + is_action_BT.size, dtype=np.float32).reshape(is_action_BT.shape)
    weights, parts = reference_fn(), []
    for number in range(policy.config.loss.minibatches):
        batch = pack_minibatch(policy.config, policy.placement, number, informed, place_BT, is_action_BT)
        scored = _own_shards(policy.score(weights, batch))
        parts += zip(_own_shards(batch.adv_NZRT), _own_shards(batch.is_action_NZRT), scored, strict=True)
    logp = np.zeros(1 + is_action_BT.size, np.float32)
    for place, is_action, logp_part in hosts.join_parts(parts):
        logp[place[is_action].astype(int)] = logp_part[is_action]
    is_cut_B = np.repeat([is_shortened for _, is_shortened in prompts], learner.group_size)
    return np.where(is_cut_B[:, None], np.float32(np.nan), logp[1:].reshape(is_action_BT.shape))


def _own_shards(array: jax.Array | np.ndarray) -> list[np.ndarray]:
    """The parts of an array that are on this process's devices, in the order of the devices."""
    if isinstance(array, np.ndarray):
        return [array]
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data) for shard in shards]
