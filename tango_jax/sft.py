"""Stage 1, supervised fine-tuning: a policy learns the text contract from a teacher's examples, loss on responses only.

Runs as the first part of `python -m tango_jax.train`, or alone:

    python -m tango_jax.sft --config=configs/last_letter.py --workdir=runs/sft

which leaves the checkpoints of both roles under DIR/sft; another run starts from them with
--config.generator.init_from=DIR --config.verifier.init_from=DIR.
"""

import math
import sys
import time
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax import hosts, rng, runtime
from tango_jax.checkpoint import Checkpointer, read_state
from tango_jax.config import check_config, parse_command_line
from tango_jax.console import Console
from tango_jax.data.problems import make_task
from tango_jax.data.task import SftExample, Task
from tango_jax.lock import hold
from tango_jax.loggers import RunLog
from tango_jax.prompts.collate import TrainSequence, pack
from tango_jax.prompts.templates import generator_prompt, verifier_prompt
from tango_jax.records import Batch
from tango_jax.rl.policy import Policy, make_sft, sft_pack_shape
from tango_jax.sharding import place_batch, with_shardings
from tango_jax.workdir import check_log, make_policies


def sft_directory(workdir: Path, role: str) -> Path:
    return Path(workdir).expanduser() / "sft" / role


def sft_sequence(policy: Policy, example: SftExample) -> tuple[list[int], np.ndarray]:
    """(prompt ids, response ids) of one example."""
    if policy.role == "generator":
        prompt = generator_prompt(policy.template, policy.tokenizer, example.problem)
    else:
        prompt, _ = verifier_prompt(
            policy.template,
            policy.tokenizer,
            example.problem,
            example.solution,
            example.num_steps,
            policy.config.max_prompt,
        )
    # The task left out what is too long, but a mistake carried through a solution may add a digit here and there.
    room = sft_pack_shape(policy.config).row_length - len(prompt)
    return prompt, np.array(policy.tokenizer.encode_response(example.response)[:room], np.int32)


def sft_batch(policy: Policy, task: Task, split: str, start: int, count: int) -> Batch:
    """Examples start .. start + count of a split, packed; every response token has the same weight (token mean).

    Each process makes all examples, for the weight, and packs its share.
    """
    pairs = [sft_sequence(policy, task.sft_example(policy.role, split, index)) for index in range(start, start + count)]
    weight = np.float32(1.0 / sum(len(response) for _, response in pairs))
    sequences = [
        TrainSequence(prompt=prompt, response=response, weight=np.full(len(response), weight))
        for prompt, response in hosts.own_part(pairs)
    ]
    placement = policy.placement
    most = math.ceil(count / jax.process_count())
    batch = pack(sequences, sft_pack_shape(policy.config), most, num_shards=placement.num_local_shards)
    return place_batch(placement, batch)


def run_stage_one(
    policies: dict, config: ConfigDict, task: Task, workdir: Path, console: Console, preemption: hosts.Preemption
) -> dict:
    """Parameters of both roles after stage 1: {role: params}; another run's, this run's, or fresh ones.

    Raises:
        ValueError: see `run_sft` and `load_sft`.
        Preempted: the state is saved.
    """
    params = {}
    for number, (role, policy) in enumerate(policies.items(), 1):
        # Not policy.config: runs that share their policies differ in where they start from.
        sft, init_from = config[role].sft, config[role].init_from
        if init_from:
            params[role] = load_sft(policy, init_from)
        elif sft.steps:
            start = params["generator"] if sft.start == "generator" else None
            title = f"Stage 1.{number}: SFT of the {role}"
            params[role] = run_sft(policy, task, config, workdir, console, title, preemption, start)
        elif policy.load_params:
            params[role] = policy.load_params()
        else:
            params[role] = policy.init(rng.step_key(config.seed, "init", role)).params
    return params


def run_sft(
    policy: Policy, task: Task, config: ConfigDict, workdir: Path, console: Console, title: str, preemption,
    start_params=None,
):
    """Train until `sft.steps`, resuming where an earlier attempt stopped. Returns the finished parameters.

    It starts from `start_params`, which it leaves alone, from the policy's checkpoint, or from a fresh initialisation.

    Raises:
        ValueError: the held-out loss ends above `sft.max_heldout_loss`; reinforcement learning would have no start.
        Preempted: the state is saved.
    """
    sft, directory = policy.config.sft, sft_directory(workdir, policy.role)
    jitted, key_data = make_sft(policy), rng.step_key(config.seed, "init", policy.role)
    checkpointer = Checkpointer(directory / "checkpoints")
    restored = checkpointer.restore(with_shardings(jax.eval_shape(jitted.init, key_data), jitted.shardings))
    done, offset, loss, seconds = 0, 0, float("inf"), 0.0
    if restored is not None:
        state, done, offset = restored.state, restored.step, restored.meta["metrics_bytes"]
        loss, seconds = restored.meta["heldout_loss"], restored.meta["seconds"]
    elif start_params is not None:
        state = jitted.restart(start_params)
    else:
        state = jitted.restart(policy.load_params()) if policy.load_params else jitted.init(key_data)
    if done < sft.steps:
        check_log(directory, restored, sft.checkpoint_every)
        heldout = sft_batch(policy, task, "heldout", 0, sft.eval_examples)
        with (
            RunLog(directory, config, console, offset, f"sft {policy.role}", workdir / "config.json") as writer,
            console.stage(title, total=sft.steps, done=done) as progress,
        ):
            start, pending = time.monotonic() - seconds, None
            for step in range(done, sft.steps):
                batch = sft_batch(policy, task, "train", step * sft.batch_size, sft.batch_size)
                state, metrics = jitted.update(state, batch)
                # The step before is read while this one runs.
                train_loss, pending = float(pending["loss"]) if pending else None, metrics
                is_last = step + 1 == sft.steps
                if (step + 1) % sft.eval_every == 0 or is_last:
                    loss = float(jitted.loss(state.params, heldout))  # nats per held-out response token
                    writer.write(
                        step + 1,
                        "sft",
                        {f"{policy.role}/sft_loss": float(metrics["loss"]), f"{policy.role}/sft_heldout_loss": loss},
                    )
                shown = {"loss": train_loss} if train_loss is not None else {}
                progress.advance(phase="step", **shown, **({"heldout_loss": loss} if np.isfinite(loss) else {}))
                must_stop = preemption.is_due()
                if (step + 1) % sft.checkpoint_every == 0 or is_last or must_stop:
                    meta = {
                        "metrics_bytes": writer.position(),
                        "heldout_loss": loss,
                        "seconds": time.monotonic() - start,
                    }
                    checkpointer.save(step + 1, state, meta)
                if must_stop:
                    raise hosts.Preempted
    if 0 < sft.max_heldout_loss < loss:
        raise ValueError(
            f"stage 1 of the {policy.role} ended at a held-out loss of {loss:.3f} per token; the gate is "
            f"{policy.role}.sft.max_heldout_loss={sft.max_heldout_loss}: raise {policy.role}.sft.steps={sft.steps} "
            "and choose a new workdir"
        )
    return state.params


def load_sft(policy: Policy, source: str):
    """The stage-1 parameters in another run's workdir, with the manifest checked.

    Raises:
        CheckpointError: none is there, it is damaged, or it belongs to another architecture.
    """
    shapes = policy.abstract_state().params
    return read_state(sft_directory(source, policy.role) / "checkpoints", shapes, part=("params",)).state


def main(argv: list[str]) -> None:
    config, workdir = parse_command_line(__doc__, argv, "runs/sft")
    with runtime.session(config, workdir) as console, hold(workdir, console):
        check_config(config, workdir / "config.json")
        policies = make_policies(config)
        task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
        run_stage_one(policies, config, task, workdir, console, hosts.Preemption())
        for role in policies:
            console.log(f"{role}: {sft_directory(workdir, role)}")


if __name__ == "__main__":
    main(sys.argv[1:])
