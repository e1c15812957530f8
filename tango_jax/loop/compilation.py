"""Compiles all that a run may need before its first turn."""

from collections.abc import Iterator

import jax
import numpy as np

from tango_jax.loop.breakdown import names_memory
from tango_jax.loop.turn import RunContext
from tango_jax.method.rehearsal import Rehearsal, Trained
from tango_jax.models.lora import split
from tango_jax.records import Batch, Problem, Responses, Rollout, States
from tango_jax.rl.packing import action_mask, pack_minibatch
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.runtime.console import Stage
from tango_jax.runtime.trees import first_not_finite


def compile_run(context: RunContext, start: dict, progress: Stage, preemption: hosts.Preemption) -> None:
    """Compile all programs of a run before its first turn. `start`: weights by role."""
    rehearsals = context.method.rehearsals
    hosts.compile_exchange()
    for role, policy in context.policies.items():
        names = {"score": "scores"} if context.own[role].is_scored else {"sample": "sampler"}
        names |= {"update": "update"} if role in rehearsals else {}
        phase, doing = f"{' and '.join(names.values())} of the {role}", f"compiling for the {role}"
        progress.begin(phase)
        # A compiler refuses a program that is larger than the memory.
        with names_memory(doing, list(names), context.config, policy), CompileAhead() as ahead:
            for bucket in (*policy.config.prompt_buckets, policy.config.max_prompt) if role in rehearsals else ():
                _compile_update(ahead, policy, bucket, rehearsals[role])
            if context.own[role].is_scored:
                for batch in _batches(policy, 1, Trained(context.method.most_read(context.config), 1, is_scored=True)):
                    ahead(policy.score)(policy.abstract_weights(), batch)
            else:
                weights = policy.sampler.layout(start[role])
                if policy.model_config.score_head:
                    policy.reader.compile_ahead(ahead, weights)
                else:  # one response to a prompt: greedy evaluations
                    policy.sampler.driver.compile_ahead(ahead, weights, {1, *context.method.samples_of(role)})
        preemption.check()
        first_not_finite(split(start[role])[0])  # runs before every save
        progress.advance(phase=phase)


def compile_transfers(context: RunContext, states: States) -> None:
    """With `mesh.offload`, bring moments and references to the devices once, which several processes compile."""
    for role, policy in context.policies.items():
        if policy.config.mesh.offload:
            jax.block_until_ready(policy.fetched(states[role]))
            if role in context.references:
                jax.block_until_ready(context.references[role]())


def _compile_update(ahead: CompileAhead, policy: Policy, prompt_length: int, rehearsal: Rehearsal) -> None:
    state, weights = policy.abstract_state(), policy.abstract_weights()
    for call in rehearsal.scored:
        for batch in _batches(policy, prompt_length, Trained(call.prompts, call.samples)):
            ahead(policy.score)(weights, batch)
    for batch in _batches(policy, prompt_length, rehearsal.learner):
        # The policy itself serves as the reference.
        batch = policy.with_scores(batch, weights, lambda: weights, ahead(policy.score))
        ahead(policy.update)(state, batch, split(weights)[1])


def _batches(policy: Policy, prompt_length: int, trained: Trained) -> Iterator[Batch]:
    """Minibatches of one-token responses to different problems."""
    P, M, is_joined, is_scored = trained
    token = np.array(policy.tokenizer.stop_ids[:1], np.int32)
    rollout = Rollout((token,) * (P * M), (np.zeros((1,), np.float32),) * (P * M), np.zeros(P * M, bool), 1, P * M,
                      (token,) * (P * M) if is_scored else None)
    prompts = [[int(token[0])] * prompt_length] * P
    records = [Problem(str(b), "", "") for b in range(P * M)]
    learner = Responses(policy.role, (), prompts, M, rollout, records, {}, is_joined=is_joined)
    is_action_BT = action_mask(policy.config, rollout)
    for number in range(policy.config.loss.minibatches):
        yield pack_minibatch(policy.config, policy.placement, number, learner, np.zeros(is_action_BT.shape, np.float32),
                             is_action_BT)
