"""Compiles everything that a run may need before its first turn, so that nothing is compiled later.

Takes a run's context and parameters of both roles, and compiles the jitted functions for every shape; nothing is
computed. Runs once, after stage 1, with dummy batches.
"""

import jax
import numpy as np

from tango_jax.arms import TurnPlan
from tango_jax.loop.turn import RunContext, action_mask
from tango_jax.models.lora import split
from tango_jax.records import Responses, Rollout, States
from tango_jax.rl.family import joined_shape
from tango_jax.rl.packing import pack_minibatch
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.runtime.console import Stage
from tango_jax.runtime.trees import first_not_finite


def compile_run(context: RunContext, start: dict, progress: Stage, preemption: hosts.Preemption) -> None:
    """Compile what both roles sample with, and score and update those that are trained; `start` holds the weights of
    each. Runs of another arm in the same process compile what is missing."""
    turns = context.method.arm.turns
    hosts.compile_exchange()
    for role, policy in context.policies.items():
        phase = f"sampler and update of the {role}" if role in turns else f"sampler of the {role}"
        progress.begin(phase)
        with CompileAhead() as ahead:
            if role in turns:
                for bucket in (*policy.config.prompt_buckets, policy.config.max_prompt):
                    _compile_update(ahead, context, policy, bucket, turns[role])
            weights = policy.sampler.layout(start[role])
            policy.sampler.compile_ahead(ahead, weights, _group_sizes(context, role))
        preemption.check()
        first_not_finite(split(start[role])[0])  # runs before every save
        progress.advance(phase=phase)


def _group_sizes(context: RunContext, role: str) -> set[int]:
    """The numbers of responses to a prompt that the role gives in a turn, and the one of greedy evaluations."""
    calls = [call for plan in context.method.arm.turns.values() for call in plan.calls if call.role == role]
    return {1, *(context.config.rl[call.samples] for call in calls if call.samples)}


def compile_transfers(context: RunContext, states: States) -> None:
    """With `mesh.offload`, bring moments and references to the devices once, which several processes compile."""
    for role, policy in context.policies.items():
        if policy.config.mesh.offload:
            jax.block_until_ready(policy.fetched(states[role]))
            if role in context.references:
                jax.block_until_ready(context.references[role]())


def _compile_update(
    ahead: CompileAhead, context: RunContext, policy: Policy, prompt_length: int, plan: TurnPlan
) -> None:
    """Score and update on one-token responses, with prompts of the given length; `plan` is that of the role's turns."""
    P, M = context.config.rl.prompts_per_step, context.config.rl.samples_per_prompt
    P, M = joined_shape(len(plan.learners(policy.role)), P, M)
    token = np.array(policy.tokenizer.stop_ids[:1], np.int32)
    logp = np.zeros((1,), np.float32)
    rollout = Rollout((token,) * (P * M), (logp,) * (P * M), np.zeros(P * M, bool), 1, P * M)
    prompts = [[int(token[0])] * prompt_length] * P
    learner = Responses(policy.role, (), prompts, M, rollout, [], {})
    is_action_BT = action_mask(policy, rollout)
    adv_BT, state = np.zeros(is_action_BT.shape, np.float32), policy.abstract_state()
    weights = policy.abstract_weights()
    for number in range(policy.config.loss.minibatches):
        batch = pack_minibatch(policy.config, policy.placement, number, learner, adv_BT, is_action_BT)
        if plan.teacher:
            ahead(policy.score)(weights, batch)
        # The policy itself serves as the reference.
        batch = policy.with_scores(batch, weights, lambda: weights, ahead(policy.score))
        ahead(policy.update)(state, batch, split(weights)[1])
