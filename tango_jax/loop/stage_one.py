"""Stage 1, supervised fine-tuning: each policy learns the text format; the loss covers responses only.

Checkpoints are in WORKDIR/sft; `init_from` uses those of another run. One policy in both roles learns the generator's
text first, then both in each batch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.loop.fine_tuning import run_sft, save_untrained
from tango_jax.loop.init_from import check_stage_one, sft_directory, what_it_lacks
from tango_jax.loop.self_stage_one import OwnStageOne
from tango_jax.models.lora import is_adapter_tree, split
from tango_jax.records import with_base
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.checkpoint import CheckpointError, Restored, peek_meta, read_state
from tango_jax.runtime.console import Console
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.sharding.layouts import fetch
from tango_jax.tasks.self_text import SELF
from tango_jax.tasks.task import Task
from tango_jax.tracking.provenance import Provenance
from tango_jax.weights.peft_folder import read_adapter
from tango_jax.weights.source import kind_of


def run_stage_one(
    policies: dict[str, Policy],
    config: ConfigDict,
    task: Task,
    workdir: Path,
    console: Console,
    preemption: hosts.Preemption,
    provenance: Provenance | None = None,
) -> dict:
    """{role: weights after stage 1}: from another run, from this run, or freshly initialised. Adapters of the same
    checkpoint on the same devices share its arrays. Raises ValueError, FloatingPointError or Preempted, as `run_sft`
    and `load_sft`."""
    # What stage 1 trained (all parameters or adapters), loaded bases, and both together.
    ended, bases, weights, meta_of = {}, {}, {}, {}
    alone = OwnStageOne(policies, config, task, workdir, console, preemption, provenance)
    for role, policy in policies.items():  # before the stage 1 of another role
        if init_from := config[role].init_from:
            found = peek_meta(*_sft_arrays(policy, init_from), part=("params",))
            if found and policy.trains_adapters and role == "verifier" and config.generator.sft.steps:
                _check_base(config, role, found.meta, _base_of(policy, {}))  # loaded again when it is its turn
    for number, (role, policy) in enumerate(policies.items(), 1):
        preemption.check()
        # Not policy.config: runs that share policies may differ in their starting points.
        sft, init_from = config[role].sft, config[role].init_from
        if init_from:
            step, ended[role], meta_of[role] = load_sft(policy, init_from)
            if role == "verifier" or not (policy.is_shared and config.verifier.init_from):
                whose = "the policy of both roles" if policy.is_shared else f"the {role}"
                lacking = what_it_lacks(config, ROLES if policy.is_shared else (role,), init_from)
                console.log(f"{whose} starts from step {step} of the stage 1 in {init_from}{lacking}")
        elif sft.steps:
            learns_alone, parents = config.task.stage_one == SELF and not alone.is_finished(role), ()
            if learns_alone:
                parents = alone.prompts_of(role, lambda: weights["generator"] if "generator" in weights else _with_base(
                    policies["generator"], ended["generator"], config.seed, bases))
            base = _base_of(policy, bases) if policy.trains_adapters else {}
            # The roles' meshes may take different devices.
            places = policy.shardings.params if policy.trains_adapters else policy.full_shardings
            is_next = role == "verifier" and (policy.is_shared or sft.start == "generator")
            # Where all parameters are trained, a generator's fresh adapters are nothing to start from.
            has_stage_one = config.generator.sft.steps or config.generator.init_from
            if is_next and not has_stage_one and is_adapter_tree(ended["generator"]):
                is_next = policy.trains_adapters
            start = {role: fetch(ended["generator"], places)} if is_next else {}
            ended.clear()  # all parameters of a generator with adapters, which are frozen by now, would stay in memory
            rehearsed = policies["generator"] if policy.is_shared and role == "verifier" else None
            if not is_next and config[role].adapter not in ("", "generator"):
                start = {role: _fresh_params(policy, config.seed)}
            if learns_alone:
                _learn_alone(alone, policy, parents, start, base, bases, rehearsed)
            if config.task.stage_one == SELF:
                start.clear()
                ended[role] = _own_result(policy, workdir, base)
            else:
                title = f"Stage 1.{number}: SFT of the {role}"
                ended[role] = run_sft(policy, task, config, workdir, console, title, preemption, start, provenance,
                                      base, rehearsed)
        elif policy.is_shared and role == "verifier":
            ended[role] = ended["generator"]
        else:
            if policy.load_params:
                console.log(f"reading the weights of the {role} from {config[role].checkpoint}")
            ended[role] = _fresh_params(policy, config.seed)
        if role in meta_of or not (policy.is_shared and role == "generator" and config.verifier.sft.steps):
            weights[role] = _with_base(policy, ended[role], config.seed, bases)
        if role in meta_of:
            _check_base(config, role, meta_of[role], split(weights[role])[1])
    if "verifier" in weights and policies["verifier"].is_shared:
        weights = dict.fromkeys(policies, weights["verifier"])
    return weights


def _learn_alone(
    alone: OwnStageOne, policy: Policy, parents: Sequence, start: dict, base: dict, bases: dict,
    rehearsed: Policy | None,
) -> None:
    """`start`: as `run_sft`, and kept, as each round begins with it."""
    config = alone.config

    def imitate(task: Task, folder: Path, title: str) -> Any:
        return run_sft(policy, task, config, folder, alone.console, title, alone.preemption, dict(start), None, base,
                       rehearsed)

    def weights(params: Any) -> dict:
        if params is None:
            params = start[policy.role] if start else _fresh_params(policy, config.seed)
        return _with_base(policy, params, config.seed, bases)

    def untrained() -> None:
        save_untrained(policy, config.seed, alone.workdir, dict(start), base)

    alone.learn(policy.role, parents, weights, imitate, untrained)


def _own_result(policy: Policy, workdir: Path, base: dict) -> Any:
    """Raises CheckpointError: its adapters belong to another base."""
    result = load_sft(policy, str(workdir))
    if base and result.meta["made_from"]["base"] != tree_fingerprint(base):
        raise CheckpointError(f"stage 1 of the {policy.role}: {policy.role}.checkpoint={policy.config.checkpoint}, to "
                              f"which the adapters in {sft_directory(workdir, policy.role)} belong, has changed: put "
                              "back what was there, or choose another --workdir")
    return result.state


def _check_base(config: ConfigDict, role: str, meta: dict, base: dict) -> None:
    wanted = meta.get("made_from", {}).get("base", "")
    if wanted and wanted != tree_fingerprint(base):
        raise ValueError(f"{role}.init_from={config[role].init_from}: its adapters do not belong to the weights of "
                         f"{role}.checkpoint={config[role].checkpoint}: name the checkpoint of that run")


def _fresh_params(policy: Policy, seed: int) -> dict:
    """Adapters, its checkpoint's parameters, or random ones."""
    if policy.config.adapter not in ("", "generator"):
        adapters = read_adapter(Path(policy.config.adapter).expanduser(), policy.model_config)
        return fetch(adapters, policy.shardings.params)
    if policy.load_params and not policy.model_config.lora:
        return policy.load_params()
    return policy.init(rng.step_key(seed, "init", policy.role)).params


def _with_base(policy: Policy, params: dict, seed: int, bases: dict) -> dict:
    if not policy.model_config.lora:
        return params
    if is_adapter_tree(params):
        return with_base(_base_of(policy, bases), params)
    return with_base(policy.freeze(params), policy.init(rng.step_key(seed, "init", policy.role)).params)


def _base_of(policy: Policy, bases: dict) -> dict:
    """The base of a policy with adapters. `bases`: those already loaded."""
    model, checkpoint = policy.model_config, policy.config.checkpoint
    own = policy.roles[0] if kind_of(checkpoint) == "workdir" else ""  # each role of a run has its weights
    key = checkpoint, own, model.lora.base_dtype, model.compute_dtype, policy.placement.train
    if key not in bases:
        bases[key] = policy.freeze(policy.load_params())
    return bases[key]


def _sft_arrays(policy: Policy, source: str) -> tuple[Path, Any]:
    """Another run's stage-1 checkpoints, and what they must hold."""
    directory = sft_directory(source, policy.role) / "checkpoints"
    found = peek_meta(directory)
    is_full = found is None or found.meta["is_full"]
    return directory, policy.abstract_full_params() if is_full else policy.abstract_state().params


def load_sft(policy: Policy, source: str) -> Restored:
    """Raises ValueError as `read_state` and `check_stage_one`."""
    restored = read_state(*_sft_arrays(policy, source), part=("params",))
    check_stage_one(policy.role, policy.config.sft, source, restored.step, restored.meta)
    return restored
