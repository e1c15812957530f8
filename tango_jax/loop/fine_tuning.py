"""Supervised fine-tuning of one policy on a task's examples: updates, held-out loss, checkpoints, resume."""

import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.loop.breakdown import names_memory
from tango_jax.loop.imitation import heldout_batch, sft_batch, sft_pairs
from tango_jax.loop.init_from import UNTRAINED, passes_gate, sft_directory
from tango_jax.records import Batch, TrainState, with_base
from tango_jax.rl.optimizer import peak_rate
from tango_jax.rl.policy import Policy
from tango_jax.rl.supervised import Sft, make_sft
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError, Restored
from tango_jax.runtime.console import Console, Stage
from tango_jax.runtime.trees import first_not_finite, tree_fingerprint
from tango_jax.sharding.layouts import with_shardings
from tango_jax.tasks.task import Task
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.metrics import check_log
from tango_jax.tracking.provenance import Provenance

# Training has diverged if the held-out loss exceeds this multiple of the loss of uniform guessing.
DIVERGED = 10
# Most seconds between checkpoints; after a slow save, SAVE_SHARE times as long must pass.
SAVE_S, SAVE_SHARE = 120.0, 20


class SftProgress(NamedTuple):
    """What checkpoints of stage 1 hold beside the state."""

    step: int = 0  # updates made
    heldout_loss: float = math.inf  # nats per response token, at the last evaluation
    left_out: int = 0  # training examples that did not fit
    seconds: float = 0.0


class SftRun(NamedTuple):
    policy: Policy
    jitted: Sft
    task: Task
    checkpointer: Checkpointer
    made_from: dict[str, str]  # see `_made_from`
    rehearsed: Policy | None  # the generator's, if the policy is one with it: its examples are in every batch as well

    @property
    def num_examples(self) -> int:
        return self.policy.config.sft.batch_size * (2 if self.rehearsed else 1)


def run_sft(
    policy: Policy, task: Task, config: ConfigDict, workdir: Path, console: Console, title: str,
    preemption: hosts.Preemption, start: dict, provenance: Provenance | None = None,
    base: dict | None = None, rehearsed: Policy | None = None,
) -> Any:
    """Train up to `sft.steps`, resuming an earlier attempt; return the final parameters, or adapters of `base`.

    Training starts from the parameters in `start`, which is emptied, so that devices do not hold them beside the state;
    else from the policy's checkpoint or a fresh initialisation. Where one policy has both roles, every batch also has
    examples of the `rehearsed` generator.

    Raises:
        ValueError: the held-out loss is above its gate, examples or parameters changed, or no held-out example fits.
        FloatingPointError: the loss or the parameters became non-finite; that state is not saved.
        Preempted: SIGTERM was received; the state is saved.
    """
    sft, directory = policy.config.sft, sft_directory(workdir, policy.role)
    jitted, key_data = make_sft(policy), rng.step_key(config.seed, "init", policy.role)
    checkpointer = Checkpointer(directory / "checkpoints", keep=config.checkpoint.keep)
    rehearsed, start_params = rehearsed if "generator" in task.sft_roles else None, start.pop(policy.role, None)
    run = SftRun(policy, jitted, task, checkpointer, _made_from(policy, task, start_params, base), rehearsed)
    restored = run.checkpointer.restore(with_shardings(jax.eval_shape(jitted.init, key_data), jitted.shardings))
    done, offset = SftProgress(), 0
    if restored is not None:
        meta = restored.meta
        state, offset = restored.state, meta["metrics_bytes"]
        done = SftProgress(restored.step, meta["heldout_loss"], meta["left_out"], meta["seconds"])
        _check_made_from(run, restored, directory)
    else:
        state = _first_state(policy, jitted, key_data, start_params)
    del start_params
    if done.step < sft.steps:
        check_log(directory, restored, sft.checkpoint_every)
        if restored is None and (directory / "metrics.jsonl").exists():
            console.log(f"{title}: the attempt before this one saved no checkpoint; it begins again at step 1")
        heldout, left_out = heldout_batch(policy, task)
        if left_out:
            console.log(f"{title}: {left_out} of {sft.eval_examples} held-out examples do not fit, so the loss of the "
                        "others is reported")
        with (
            RunLog(
                directory, config, console, offset, f"sft {policy.role}", workdir / "config.json", provenance
            ) as writer,
            console.stage(title, total=sft.steps, done=done.step) as bar,
            preemption.held(),
            checkpointer,
            names_memory(f"stage 1 of the {policy.role}", ["sft"], config, policy),
        ):
            state, done = _make_updates(run, state, base or {}, heldout, done, writer, bar, preemption)
    if done.left_out:
        whose = "of both roles" if rehearsed else f"of the {policy.role}"
        console.log(f"stage 1 of the {policy.role}: {done.left_out} of {sft.steps * run.num_examples} examples were "
                    f"left out, because their prompt or response would have been truncated (raise max_prompt or "
                    f"sft.pack_length {whose} in a new run to include them)")
    if not passes_gate(sft.max_heldout_loss, done.heldout_loss):
        raise ValueError(
            f"stage 1 of the {policy.role} ended at a held-out loss of {done.heldout_loss:.3f} per token; the gate is "
            f"{policy.role}.sft.max_heldout_loss={sft.max_heldout_loss}: raise {policy.role}.sft.steps={sft.steps} "
            "and choose a new --workdir"
        )
    return state.params


def _make_updates(
    run: SftRun, state: TrainState, base: dict, heldout: Batch, done: SftProgress, writer: RunLog, bar: Stage,
    preemption: hosts.Preemption,
) -> tuple[TrainState, SftProgress]:
    policy, jitted, checkpointer = run.policy, run.jitted, run.checkpointer
    sft, role = policy.config.sft, policy.role
    began, pending, train_loss = time.monotonic() - done.seconds, None, None
    saved_at, save_s = time.monotonic(), 0.0
    for step in range(done.step + 1, sft.steps + 1):
        checkpointer.check()
        batch, unfit = sft_batch(policy, run.task, "train", (step - 1) * sft.batch_size, sft.batch_size, run.rehearsed)
        state, metrics = jitted.update(state, batch, base)
        if pending is not None:  # read the previous step's loss while this step runs
            train_loss = _finite_loss(run, step - 1, pending)
        pending, left_out = metrics["loss"], done.left_out + unfit
        is_last, must_stop = step == sft.steps, preemption.is_due()
        is_logged = step % sft.eval_every == 0 or is_last
        is_overdue = hosts.from_first(time.monotonic() - saved_at > max(SAVE_S, SAVE_SHARE * save_s))
        is_saved = step % sft.checkpoint_every == 0 or is_last or must_stop or is_overdue
        if is_logged or is_saved:
            train_loss = _finite_loss(run, step, pending)
            loss = _usable_loss(run, step, state, base, heldout)
            done = SftProgress(step, loss, left_out, time.monotonic() - began)
        if is_logged:
            writer.write(step, "sft", {f"{role}/sft_loss": train_loss, f"{role}/sft_heldout_loss": loss})
        done = done._replace(step=step, left_out=left_out)
        shown = {"loss": train_loss} if train_loss is not None else {}
        bar.advance(
            phase="step", **shown, **({"heldout_loss": done.heldout_loss} if math.isfinite(done.heldout_loss) else {})
        )
        if is_saved:
            save_began = time.monotonic()
            meta = {name: value for name, value in done._asdict().items() if name != "step"}
            meta |= {"metrics_bytes": writer.position(), "made_from": run.made_from}
            checkpointer.save(step, state, meta | {"is_full": not policy.trains_adapters})
            if must_stop:
                raise hosts.Preempted
            saved_at = time.monotonic()
            save_s = saved_at - save_began
    return state, done


def _finite_loss(run: SftRun, step: int, loss: jax.Array) -> float:
    """Nats per response token. Raises FloatingPointError."""
    loss = float(loss)
    if not math.isfinite(loss):
        raise _breakdown(run, step, f"had a loss of {loss}")
    return loss


def _usable_loss(run: SftRun, step: int, state: TrainState, base: dict, heldout: Batch) -> float:
    """Held-out loss in nats per response token. Raises FloatingPointError."""
    loss = float(run.jitted.loss(with_base(base, state.params), heldout))
    limit = DIVERGED * math.log(run.policy.model_config.vocab_size)
    if not loss <= limit:  # also true for NaN
        raise _breakdown(run, step, f"led to a held-out loss of {loss:.3g} per token ({DIVERGED} times the loss of "
                                      f"uniform guessing is {limit:.3g})")
    if name := first_not_finite(state):
        raise _breakdown(run, step, f"left values in {name} that are not finite or absurdly large")
    return loss


def _breakdown(run: SftRun, step: int, what: str) -> FloatingPointError:
    role, sft, last = run.policy.role, run.policy.config.sft, run.checkpointer.latest_step()
    name, rate = peak_rate(sft.optimizer, run.policy.trains_adapters)
    kept = "there is no earlier checkpoint" if last is None else f"the last checkpoint is of step {last}"
    return FloatingPointError(
        f"step {step} of the {role}'s stage 1 {what}; it is not saved, and {kept}. Resuming would repeat it: choose a "
        f"new --workdir and lower {role}.sft.optimizer.{name}={rate:g}"
    )


def _made_from(policy: Policy, task: Task, start_params: Any, base: dict | None) -> dict[str, str]:
    """{what: digest}: examples of the first step, start parameters, and the base of adapters."""
    first = sft_pairs(policy, task, "train", 0, policy.config.sft.batch_size)
    tokens = json.dumps([(prompt, response.tolist()) for prompt, response in first])
    examples = hashlib.sha256(f"{task.sft_fingerprint}\n{tokens}".encode()).hexdigest()
    start, own_base = (tree_fingerprint(tree) if tree else "" for tree in (start_params, base))
    return {"examples": examples, "start": start, "base": own_base}


def _check_made_from(run: SftRun, restored: Restored, directory: Path) -> None:
    saved = restored.meta["made_from"]
    changed = [name for name, now in run.made_from.items() if saved.get(name, now) != now]
    if changed:
        own = run.policy.config.adapter not in ("", "generator")
        names = {"examples": "its examples or prompts", "base": "the checkpoint that its adapters belong to",
                 "start": "the adapters" if own else "the generator's stage 1, which it starts from,"}
        what = " and ".join(names[name] for name in changed)
        raise CheckpointError(
            f"stage 1 of the {run.policy.role}: {what} changed since the checkpoint of step {restored.step} in "
            f"{directory / 'checkpoints'} was saved: put back what was there, or choose another --workdir"
        )


def save_untrained(policy: Policy, seed: int, workdir: Path, start: dict, base: dict) -> None:
    """A stage 1 that is finished before its first update, as every run and command finds one."""
    jitted, key_data = make_sft(policy), rng.step_key(seed, "init", policy.role)
    meta = SftProgress(heldout_loss=0.0)._asdict() | {
        "metrics_bytes": 0, "made_from": {"base": tree_fingerprint(base) if base else ""}, UNTRAINED: True,
        "is_full": not policy.trains_adapters}
    with Checkpointer(sft_directory(workdir, policy.role) / "checkpoints") as checkpointer:
        checkpointer.save(0, _first_state(policy, jitted, key_data, start.pop(policy.role, None)), meta)


def _first_state(policy: Policy, jitted: Sft, key_data: np.ndarray, start_params: Any) -> TrainState:
    if start_params is not None:
        return jitted.restart(start_params)
    if policy.load_params and not policy.trains_adapters:
        return jitted.restart(policy.load_params())
    return jitted.init(key_data)
