"""Stage 1, supervised fine-tuning: each policy learns the text format; the loss covers responses only.

Checkpoints are in WORKDIR/sft; `init_from` uses those of another run. One policy in both roles learns the generator's
text first, then both in each batch.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.loop.fine_tuning import run_sft, save_untrained
from tango_jax.loop.init_from import check_stage_one, how_it_judged, sft_directory, what_it_lacks
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
    stage = _StageOne(policies, config, task, workdir, console, preemption, provenance)
    stage.check_bases()
    for number, role in enumerate(policies, 1):
        preemption.check()
        stage.add(role, f"Stage 1.{number}: SFT of the {role}")
    weights = stage.weights
    is_shared = "verifier" in weights and policies["verifier"].is_shared
    return dict.fromkeys(policies, weights["verifier"]) if is_shared else weights


@dataclasses.dataclass(frozen=True)
class _StageOne:
    """Role by role, the generator's first."""

    policies: dict[str, Policy]
    config: ConfigDict
    task: Task
    workdir: Path
    console: Console
    preemption: hosts.Preemption
    provenance: Provenance | None
    ended: dict[str, Any] = dataclasses.field(default_factory=dict)  # what stage 1 trained: all parameters, or adapters
    bases: dict[tuple, dict] = dataclasses.field(default_factory=dict)  # those already loaded, see `_base_of`
    weights: dict[str, dict] = dataclasses.field(default_factory=dict)  # `ended`, and the base of adapters

    def check_bases(self) -> None:
        """Before the generator's stage 1: a verifier's base is loaded again when it is its turn."""
        for role, policy in self.policies.items():
            if init_from := self.config[role].init_from:
                found = peek_meta(*_sft_arrays(policy, init_from), part=("params",))
                if found and policy.trains_adapters and role == "verifier" and self.config.generator.sft.steps:
                    _check_base(self.config, role, found.meta, _base_of(policy, {}))

    def add(self, role: str, title: str) -> None:
        # Not policy.config: runs that share policies may differ in their starting points.
        policy, settings, loaded = self.policies[role], self.config[role], None
        if settings.init_from:
            loaded = self._load(role)
            self.ended[role] = loaded.state
        elif settings.sft.steps:
            self.ended[role] = self._train(role, title)
        elif policy.is_shared and role == "verifier":
            self.ended[role] = self.ended["generator"]
        else:
            if policy.load_params:
                form = how_it_judged(self.config, settings.checkpoint) if role == "verifier" else ""
                self.console.log(f"reading the weights of the {role} from {settings.checkpoint}{form}")
            self.ended[role] = _fresh_params(policy, self.config.seed)
        goes_on = policy.is_shared and role == "generator" and self.config.verifier.sft.steps
        if loaded or not goes_on:
            self.weights[role] = self._with_base(policy, self.ended[role])
        if loaded:
            _check_base(self.config, role, loaded.meta, split(self.weights[role])[1])

    def _load(self, role: str) -> Restored:
        policy, init_from = self.policies[role], self.config[role].init_from
        loaded = load_sft(policy, init_from)
        if role == "verifier" or not (policy.is_shared and self.config.verifier.init_from):
            whose = "the policy of both roles" if policy.is_shared else f"the {role}"
            stage_one = f"step {loaded.step} of the stage 1 in {init_from}"
            # A fork begins with later weights: to these its KL term refers.
            self.console.log(f"the reference of {whose} is {stage_one}" if self.config.fork_of else
                             f"{whose} starts from {stage_one}{what_it_lacks(self.config, role, init_from)}")
        return loaded

    def _train(self, role: str, title: str) -> Any:
        config, policy, parents = self.config, self.policies[role], ()
        alone = OwnStageOne(self.policies, config, self.task, self.workdir, self.console, self.preemption,
                            self.provenance)
        learns_alone = config.task.stage_one == SELF and not alone.is_finished(role)
        if learns_alone:
            parents = alone.prompts_of(role, self._generator_weights)
        base = _base_of(policy, self.bases) if policy.trains_adapters else {}
        start = self._start_of(role)
        self.ended.clear()  # all parameters of a generator with adapters, which are frozen by now, would stay in memory
        rehearsed = self.policies["generator"] if policy.is_shared and role == "verifier" else None
        if learns_alone:
            self._learn_alone(alone, policy, parents, start, base, rehearsed)
        if config.task.stage_one == SELF:
            start.clear()
            return _own_result(policy, self.workdir, base)
        return run_sft(policy, self.task, config, self.workdir, self.console, title, self.preemption, start,
                       self.provenance, base, rehearsed)

    def _generator_weights(self) -> dict:
        if "generator" in self.weights:
            return self.weights["generator"]
        return self._with_base(self.policies["generator"], self.ended["generator"])

    def _start_of(self, role: str) -> dict:
        """{role: parameters}; empty: its checkpoint, or a fresh initialisation."""
        policy, generator = self.policies[role], self.config.generator
        if role == "verifier" and (policy.is_shared or self.config.verifier.sft.start == "generator"):
            ended = self.ended["generator"]
            # Where all parameters are trained, a generator's fresh adapters are nothing to start from.
            is_fresh = not (generator.sft.steps or generator.init_from) and is_adapter_tree(ended)
            if policy.trains_adapters or not is_fresh:
                # The roles' meshes may take different devices.
                return {role: fetch(ended, policy.shardings.params if policy.trains_adapters
                                    else policy.full_shardings)}
        if self.config[role].adapter not in ("", "generator"):
            return {role: _fresh_params(policy, self.config.seed)}
        return {}

    def _learn_alone(
        self, alone: OwnStageOne, policy: Policy, parents: Sequence, start: dict, base: dict, rehearsed: Policy | None
    ) -> None:
        """`start`: as `run_sft`, and kept, as each round begins with it."""

        def imitate(task: Task, folder: Path, title: str) -> Any:
            return run_sft(policy, task, self.config, folder, self.console, title, self.preemption, dict(start), None,
                           base, rehearsed)

        def weights(params: Any) -> dict:
            if params is None:
                params = start[policy.role] if start else _fresh_params(policy, self.config.seed)
            return self._with_base(policy, params)

        def untrained() -> None:
            save_untrained(policy, self.config.seed, self.workdir, dict(start), base)

        alone.learn(policy.role, parents, weights, imitate, untrained)

    def _with_base(self, policy: Policy, params: Any) -> dict:
        if not policy.model_config.lora:
            return params
        if is_adapter_tree(params):
            return with_base(_base_of(policy, self.bases), params)
        fresh = policy.init(rng.step_key(self.config.seed, "init", policy.role))
        return with_base(policy.freeze(params), fresh.params)


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
