"""Compiles everything that a run may need before its first turn, so that nothing is compiled later.

Takes a run's context and parameters of both roles, and calls the jitted functions with every shape. Runs once, after
stage 1, with dummy batches.
"""

import dataclasses

import numpy as np

from tango_jax.loop.turn import RunContext, action_mask, update_policy
from tango_jax.records import Responses, Rollout, TrainState
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.console import Stage
from tango_jax.runtime.finite import first_not_finite
from tango_jax.runtime.timers import PhaseTimer


def warm_up(context: RunContext, params: dict, progress: Stage, preemption: hosts.Preemption) -> None:
    """Compile sampling, scoring and updates of both roles; any parameters of the right shapes will do."""
    rl = context.config.rl
    # Greedy evaluation uses one response per prompt. All arms are covered, since the arms of an ablation share compiled
    # functions.
    group_sizes = {
        "generator": (1, rl.samples_per_prompt),
        "verifier": (1, rl.samples_per_prompt, rl.verifications_per_solution),
    }
    hosts.warm_up()
    for role, policy in context.policies.items():
        policy.sampler.warm_up(policy.sampler.layout(params[role]), group_sizes[role])
        state = policy.parked(policy.restart(policy.init(rng.step_key(0, "warm-up")).params))
        for bucket in (*policy.config.prompt_buckets, policy.config.max_prompt):
            state = _warm_up_update(context, policy, state, bucket)
            preemption.check()
        first_not_finite(state.params)  # also runs before every save
        progress.advance(phase=f"sampler and update of the {role}")


def _warm_up_update(context: RunContext, policy: Policy, state: TrainState, prompt_length: int) -> TrainState:
    """Score and update on one-token responses, with prompts of the given length."""
    P, M = context.config.rl.prompts_per_step, context.config.rl.samples_per_prompt
    token = np.array(policy.tokenizer.stop_ids[:1], np.int32)
    logp = np.zeros((1,), np.float32)
    rollout = Rollout((token,) * (P * M), (logp,) * (P * M), np.zeros(P * M, bool), 1, P * M)
    prompts = [[int(token[0])] * prompt_length] * P
    learner = Responses(policy.role, (), prompts, M, rollout, [], {})
    is_action_BT = action_mask(policy, rollout)
    # The policy itself serves as the reference; a separate timer keeps these seconds out of the first turn.
    scratch = dataclasses.replace(context, references={policy.role: state.params}, timer=PhaseTimer())
    return update_policy(scratch, state, learner, np.zeros(is_action_BT.shape, np.float32), is_action_BT)[0]
