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
from tango_jax.runtime.finite import first_not_finite


def compile_run(context: RunContext, start: dict, progress: Stage, preemption: hosts.Preemption) -> None:
    """Compile sampling, scoring and updates of both roles; `start` holds the weights of each."""
    rl = context.config.rl
    # Greedy evaluation uses one response per prompt. All arms are covered, since the arms of an ablation share compiled
    # functions.
    group_sizes = {
        "generator": (1, rl.samples_per_prompt),
        "verifier": (1, rl.samples_per_prompt, rl.verifications_per_solution),
    }
    hosts.compile_exchange()
    for role, policy in context.policies.items():
        progress.begin(f"sampler and update of the {role}")
        with CompileAhead() as ahead:
            for bucket in (*policy.config.prompt_buckets, policy.config.max_prompt):
                _compile_update(ahead, context, policy, bucket, context.method.arm.turns.get(role))
            weights = policy.sampler.layout(start[role])
            policy.sampler.compile_ahead(ahead, weights, group_sizes[role])
        preemption.check()
        first_not_finite(split(start[role])[0])  # runs before every save
        progress.advance(phase=f"sampler and update of the {role}")


def compile_transfers(context: RunContext, states: States) -> None:
    """With `mesh.offload`, bring moments and references to the devices once, which several processes compile."""
    for role, policy in context.policies.items():
        if policy.config.mesh.offload:
            jax.block_until_ready(policy.fetched(states[role]))
            if role in context.references:
                jax.block_until_ready(context.references[role]())


def _compile_update(
    ahead: CompileAhead, context: RunContext, policy: Policy, prompt_length: int, plan: TurnPlan | None
) -> None:
    """Score and update on one-token responses, with prompts of the given length; `plan` is that of the role's turns,
    None if it is not trained."""
    P, M = context.config.rl.prompts_per_step, context.config.rl.samples_per_prompt
    P, M = joined_shape(len(plan.learners(policy.role)) if plan else 1, P, M)
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
        if plan and plan.teacher:
            ahead(policy.score)(weights, batch)
        # The policy itself serves as the reference.
        batch = policy.with_scores(batch, weights, lambda: weights, ahead(policy.score))
        ahead(policy.update)(state, batch, split(weights)[1])
