"""Console summaries of a run, at its start and its end."""

from collections import Counter
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.loop.imitation import sft_sequence
from tango_jax.loop.init_from import trained_on_before
from tango_jax.method.load import Method
from tango_jax.method.own_arm import arm_name, arm_of
from tango_jax.models.attention import why_plain
from tango_jax.models.decode_attention import attention_names
from tango_jax.rl.policy import Policy
from tango_jax.rl.schedule import Place, Schedule
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import typed_command
from tango_jax.runtime.machine import describe_machine
from tango_jax.runtime.trees import flatten_names
from tango_jax.tasks.registry import turn_sizes
from tango_jax.tasks.task import Task
from tango_jax.text.templates import generator_prompt, verifier_prompt
from tango_jax.tracking.scores import LEFT_OUT
from tango_jax.tracking.stored_runs import compare
from tango_jax.weights.workdir import has_two_policies


def describe_run(
    console: Console, config: ConfigDict, policies: dict[str, Policy], task: Task, schedule: Schedule, method: Method
) -> None:
    rl = config.rl
    console.log(f"machine: {describe_machine()}")
    for note in config.notes.splitlines():
        console.log(note)
    arm = arm_of(config)
    console.log(f"arm {arm_name(config.arm)} ({arm.label}): {arm.help}; seed {config.seed}")
    turns = Counter(turn.phase for turn in schedule.turns())
    console.log(
        f"{schedule.num_turns} turns: {turns['warmup']} verifier warm-up, {turns['generator']} generator, "
        f"{turns['verifier']} verifier (N_g : N_v = {rl.generator_turns_per_cycle} : {schedule.cycle[1]})"
    )
    if schedule.cycle[1] and not turns["verifier"]:
        console.log(
            "the verifier has no turn after its warm-up: the first would come after generator step "
            f"{rl.generator_turns_per_cycle}, and rl.generator_steps is {rl.generator_steps}"
        )
    for role, rehearsal in method.rehearsals.items():
        batches, (turn, _) = f" in each of up to {1 + rl.dynamic_sampling} batches", rehearsal.example
        sampled = []
        for key, call in rehearsal.calls.items():
            is_read = call.prompt.is_scored or bool(policies[call.prompt.role].model_config.score_head)
            sampled.append(f"{key[0]} {call.prompts} x {call.samples}{batches * (key in turn.repeated)}"
                           + ", read in one pass" * is_read)
        console.log(f"a turn of the {role} samples at most (prompt, parents x samples of each): {', '.join(sampled)}")
    if sizes := turn_sizes(config, {role: rehearsal.draws for role, rehearsal in method.rehearsals.items()}):
        console.log(sizes)
    for note in (*task.notes, *trained_on_before(config, task.fingerprint)):
        console.log(note)
    if config.task.grader:
        console.log(f"answers are graded by {config.task.grader}")
    if policies["verifier"].is_shared:
        console.log("one policy has both roles: each role's learning rate follows its own schedule and counts only its "
                    "own updates; AdamW's moments are shared")
    tables: dict[tuple, list[str]] = {}
    for role, policy in policies.items():
        for own in method.own_rewards.get(role, ()) if role in arm.turns else ():
            times = f"{own.weight:g} x " if own.weight != 1 else ""
            console.log(f"{times}{own.function.name} is added to the {role}'s reward")
        start = "" if config.fork_of else config[role].checkpoint
        if start and not (policy.is_shared and role == "verifier"):
            half = ": from its generator, and not from its verifier" * (policy.is_shared and has_two_policies(start))
            console.log(f"{'one policy' if policy.is_shared else f'the {role}'} starts from {start}{half}")
        tables.setdefault(_parameters(policy), []).append(role)
    generator, verifier = policies["generator"], policies["verifier"]
    for (attention, rows), roles in tables.items():
        whose = "the policy of both roles" if verifier.is_shared else " and ".join(roles) + " each" * (len(roles) > 1)
        is_adapted = policies[roles[0]].model_config.lora is not None
        of = " of adapters (those of the frozen model are not listed)" * is_adapted
        console.table(f"{whose}: {sum(row[-1] for row in rows):,} parameters{of}, attention by {attention}",
                      ("parameter", "shape", "dtype", "count"), rows)
    prompt = generator_prompt(generator.template, generator.tokenizer, task.train_problem(0))
    console.log(f"a generator prompt: {generator.tokenizer.decode_for_reader(prompt)!r}")
    if "verifier" in task.sft_roles:
        prompt, *_ = sft_sequence(verifier, task.sft_example("verifier", "train", 0))
    else:
        problem, text = task.train_problem(0), "<think><step>a step</step></think><answer>\\boxed{an answer}</answer>"
        prompt, _ = verifier_prompt(verifier.template, verifier.tokenizer, problem, text, 1, verifier.config.max_prompt)
    cache = f"kept in {config.compile_cache}" if config.compile_cache else "kept nowhere, as compile_cache is empty"
    console.log(f"all programs are compiled before the first turn: minutes the first time; they are {cache}")
    console.log(f"a verifier prompt: {verifier.tokenizer.decode_for_reader(prompt)!r}")


def _parameters(policy: Policy) -> tuple[str, tuple[tuple[str, str, str, int], ...]]:
    """(how attention is computed, rows of name, shape, dtype and count)."""
    shapes = jax.eval_shape(policy.init, np.zeros((2,), np.uint32)).params
    rows = tuple((name, str(leaf.shape), str(leaf.dtype), int(np.prod(leaf.shape)))
                 for name, leaf in flatten_names(shapes).items())
    model = policy.model_config
    reason = policy.config.model.attention == "auto" and why_plain(model, policy.placement.local.devices.flat[0])
    return f"{attention_names(model)} ({reason})" if reason else attention_names(model), rows


def describe_results(console: Console, config: ConfigDict, workdir: Path, summary: dict) -> None:
    generator, verifier = summary["generator"], summary["verifier"]
    console.log(f"generator accuracy {generator['accuracy_initial']:.3f} -> {generator['accuracy_final']:.3f}")
    for name, key in (("step F1", "step_f1"), ("first-error F1", "first_error_f1"), ("outcome F1", "outcome_f1")):
        if None not in (verifier.get(f"{key}_initial"), verifier.get(f"{key}_final")):
            console.log(f"verifier {name} on the fixed pool {verifier[f'{key}_initial']:.3f} -> "
                        f"{verifier[f'{key}_final']:.3f}")
    if config.verifier.stop_at_first_error and verifier.get("step_f1_final") is not None:
        console.log(LEFT_OUT)
    console.log(
        f"largest sampler-trainer log-prob gap {summary['logprob_gap_max']:.2e}, {summary['compiles_after_warmup']} "
        f"compilations after warm-up since it was last started, {summary['wall_seconds']:.0f} s in all starts that "
        "saved a turn"
    )
    for line in compare(config, workdir) if hosts.is_first() else ():
        console.log(line)
    console.log(f"view the report: {typed_command('report')} {workdir}")
    console.log("files:")
    for name in ("metrics.jsonl", "summary.json", "curves.png", "transcripts.md", "rollouts", "checkpoints",
                 "sft"):
        if (workdir / name).exists():
            console.log(f"  {workdir / name}")


def describe_turn(place: Place, schedule: Schedule) -> str:
    if place.phase == "warmup":
        return f"verifier warm-up {place.index + 1}/{schedule.warmup_turns}"
    if place.role == "generator":
        return f"generator step {place.generator_step + 1}/{schedule.generator_turns}"
    return f"verifier turn (after {place.generator_step} generator steps)"
