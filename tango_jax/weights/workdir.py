"""Opening of a run's policies, from its settings or its workdir."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import ROLES, default_config, flatten, read_settings
from tango_jax.data.rows import short_name
from tango_jax.models.lora import LORA_A, LORA_B, freeze, init_adapters, merge
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import with_base
from tango_jax.runtime.checkpoint import open_state, peek_meta
from tango_jax.runtime.checks import read_json_object
from tango_jax.runtime.sealed import MANIFEST, complete_steps, sampled_digest
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.runtime.unread import Unread, load_all
from tango_jax.sharding.layouts import param_shardings, with_shardings
from tango_jax.tasks.registry import tokenizer_model
from tango_jax.text.character_tokenizer import write_character_tokenizer
from tango_jax.text.tokenizer import load_sentencepiece
from tango_jax.weights.from_hf import resolve_folder
from tango_jax.weights.hf_layout import abstract_params
from tango_jax.weights.prompting import Prompting, read_prompting
from tango_jax.weights.source import Source, fields_of, generation_of, kind_of, open_source, sized_model

BASE = "_base"  # after a role, in the names of a run's fingerprints (loop/resume.py): the base of its adapters


def open_checkpoint(name: str, role: str, use_chat: bool | None = None, **numerics) -> Source:
    """Open anything with weights: a published checkpoint, or one role of a workdir. ValueError: missing, unsupported.

    `use_chat` None: as in the run or export, else no. `numerics` (source.NUMERICS) replace the run's or the defaults.
    Only a verifier may be a process reward model.
    """
    if kind_of(name) == "workdir":
        return open_workdir(Path(name).expanduser(), role, use_chat, **numerics)
    return open_source(name, use_chat, takes_scores=role == "verifier", **numerics)


def prompting_of(name: str, role: str, download: bool = False) -> Prompting | None:
    """How a checkpoint's role was prompted; None: unknown, or a hub id without `download`. ValueError: damaged."""
    kind = kind_of(name)
    if kind == "gguf" or (kind == "hub" and not download):
        return None
    if kind == "workdir":
        workdir = Path(name).expanduser()
        config = read_config(workdir)
        # The template may be a file that is gone.
        return prompting_in_run(workdir, config, role, config[role].template)
    folder = resolve_folder(name)
    found = read_prompting(folder)
    return found if found is None or found.role == role else read_prompting(folder, role)


def prompting_in_run(workdir: Path, config: ConfigDict, role: str, template: str) -> Prompting:
    own, is_scored = config[role], role == "verifier" and bool(_stored_arm(workdir).get("is_scored", False))
    return Prompting(role, template, own.use_chat, own.max_prompt, own.max_response, config.task.min_steps,
                     own.stop_at_first_error, is_scored, what_chose(workdir, config, role))


def open_workdir(
    workdir: Path, role: str, use_chat: bool | None = None, only: int | None = None, **numerics
) -> Source:
    """Open a role's newest checkpoint, of stage 2 or else stage 1; adapters are merged. ValueError: none there.

    `only`: the step to open, see `best_step`.
    """
    config = read_config(workdir)
    base = start_source(config, role, use_chat, has_one_policy(workdir))
    directory, part = newest_checkpoints(workdir, role)
    saved = base.model_config
    plain = dataclasses.replace(saved, lora=None, param_dtype=config[role].model.param_dtype)
    wanted = dataclasses.replace(plain, **numerics)
    has_adapters = saved.lora is not None and (len(part) > 1 or not peek_meta(directory).meta["is_full"])

    def open_params(shardings=None):
        shapes = abstract_params(plain)
        if shardings is not None:
            shapes = with_shardings(shapes, shardings)
        if has_adapters:
            stage_one = full_stage_one(config, workdir, role)
            start = open_state(stage_one, shapes, part=("params",)).state if stage_one else base.open_params(shardings)
            adapters = open_adapters(workdir, role, saved, shardings, only)
            check_base(directory, role, saved, start)
            params = merged(saved, start, adapters["layers"], shardings)
        else:
            params = open_state(directory, shapes, part, only).state
        return jax.tree.map(lambda leaf: _as_dtype(leaf, wanted.param_dtype), params)

    return dataclasses.replace(base, name=str(workdir), model_config=wanted, open_params=open_params)


def _as_dtype(leaf: Unread, dtype: str) -> Unread:
    if leaf.dtype == np.dtype(dtype):
        return leaf
    return Unread(leaf.shape, np.dtype(dtype), lambda: leaf.load().astype(dtype))


def merged(model: ModelConfig, start: dict, adapters: dict, shardings: dict | None) -> dict:
    """`Unread` parameters with `Unread` adapters merged into them, one at a time."""

    def open_leaf(path: tuple, leaf: Unread, sharding=None) -> Unread:
        name, is_stacked = path[-1].key, len(path) > 1
        own = {key: adapters[key] for key in (name + LORA_A, name + LORA_B) if key in adapters}

        def merge_alone(array, parts: dict) -> jax.Array:
            tree = {"layers": {name: array}} if is_stacked else {name: array, "layers": {}}
            merged_tree = merge(model, with_base(freeze(model, tree), {"layers": parts}))
            return merged_tree["layers"][name] if is_stacked else merged_tree[name]

        def load():
            if sharding is not None:
                return jax.device_put(merge_alone(leaf.load(), load_all(own)), sharding)
            if not is_stacked:
                return merge_alone(leaf.load(), {})
            # One layer at a time: merging holds several copies.
            array, out = leaf.load(), np.empty(leaf.shape, np.float32)
            parts = {key: part.load() for key, part in own.items()}
            for i in range(len(out)):
                one = {key: part[i : i + 1] for key, part in parts.items()}
                out[i : i + 1] = merge_alone(*jax.device_put((array[i : i + 1], one)))
            return out

        return Unread(leaf.shape, np.dtype("float32"), load)

    return jax.tree_util.tree_map_with_path(open_leaf, start, *([] if shardings is None else [shardings]))


def check_base(directory: Path, role: str, model: ModelConfig, start: dict) -> None:
    """Check that adapters belong to these weights, if their checkpoint recorded them."""
    meta = peek_meta(directory).meta
    saved = meta.get("source_fingerprint", {}).get(f"{role}{BASE}") or meta.get("made_from", {}).get("base")
    base_dtype = model.lora.base_dtype or model.compute_dtype
    # Accelerators round the scales of int8 differently.
    if saved and base_dtype != "int8" and saved != tree_fingerprint(
            jax.tree.map(lambda leaf: _as_dtype(leaf, base_dtype), start)):
        raise ValueError(f"the adapters in {directory} were trained on other weights than the run's {role} starts "
                         "from now: put back the checkpoint that it was trained on")


def read_adapters(workdir: Path, role: str, model: ModelConfig, only: int | None = None) -> dict:
    """The newest adapters of a role, or those of a step."""
    return load_all(open_adapters(workdir, role, model, only=only))


def open_adapters(
    workdir: Path, role: str, model: ModelConfig, shardings: dict | None = None, only: int | None = None
) -> dict:
    """`read_adapters`, as `Unread`. `shardings`: of all parameters, for their mesh."""
    adapters = jax.eval_shape(lambda: init_adapters(model, jax.random.key(0)))
    if shardings is not None:
        adapters = with_shardings(adapters, param_shardings(jax.tree.leaves(shardings)[0].mesh, adapters))
    directory, part = newest_checkpoints(workdir, role)
    return open_state(directory, adapters, part, only).state


def full_stage_one(config: ConfigDict, workdir: Path, role: str) -> Path | None:
    """Checkpoints of a stage 1 that trained all parameters: the adapters' base. None: `checkpoint` is."""
    if has_one_policy(workdir):  # the verifier's stage 1, where it has one, continues from the generator's
        verifier = config.verifier
        role = "verifier" if verifier.init_from or verifier.sft.steps else "generator"
    own = config[role]
    if not own.init_from and not (own.sft.steps and own.sft.full):
        return None
    directory = Path(own.init_from or workdir).expanduser() / "sft" / role / "checkpoints"
    found = peek_meta(directory)
    if found is None:
        raise ValueError(f"{directory} is gone, and the adapters in {workdir} need this stage 1: put it back")
    return directory if found.meta["is_full"] else None


def start_source(
    config: ConfigDict, role: str, use_chat: bool | None = None, is_one_policy: bool = False
) -> Source:
    """Architecture and tokenizer from `checkpoint` (one policy: the generator in it), or from `model` and task."""
    role_config = config[role]
    numerics = fields_of(role_config)
    if role_config.checkpoint:
        whose = "generator" if is_one_policy else role
        use_chat = role_config.use_chat if use_chat is None else use_chat
        return open_checkpoint(role_config.checkpoint, whose, use_chat, **numerics)
    model = tokenizer_model(config)
    tokenizer = load_sentencepiece(model)
    return Source(
        name="",
        model_config=sized_model(role_config, tokenizer.vocab_size),
        tokenizer=tokenizer,
        open_params=None,
        write_tokenizer=lambda folder: write_character_tokenizer(model, folder),
        generation=generation_of(tokenizer),
    )


def has_one_policy(workdir: Path) -> bool:
    """Whether one policy has both roles in a run: by its settings, or by the record of its arm."""
    if read_config(workdir).verifier.adapter == "generator":
        return True
    return bool(_stored_arm(workdir).get("is_one_policy", False))


def _stored_arm(workdir: Path) -> Mapping[str, Any]:
    """What the run stored about its arm. It needs no file of the user's; empty before the run begins."""
    path = workdir / "provenance.json"
    stored = read_json_object(path, "restore it") if path.is_file() else {}
    return stored.get("arm") or {}


def has_two_policies(checkpoint: str) -> bool:
    """Whether it is a run of two policies: one policy in its place starts from its generator, without its verifier."""
    return bool(checkpoint) and kind_of(checkpoint) == "workdir" and not has_one_policy(Path(checkpoint).expanduser())


def newest_checkpoints(workdir: Path, role: str) -> tuple[Path, tuple[str, ...]]:
    """The directory of checkpoints, and the branch of the saved tree with the role's parameters."""
    is_shared = has_one_policy(workdir)
    if complete_steps(workdir / "checkpoints"):
        return workdir / "checkpoints", ("generator" if is_shared else role, "params")
    if is_shared:  # the verifier's stage 1 continues from the generator's
        own = [name for name in reversed(ROLES) if complete_steps(workdir / "sft" / name / "checkpoints")]
        role = own[0] if own else role
    if complete_steps(workdir / "sft" / role / "checkpoints"):
        return workdir / "sft" / role / "checkpoints", ("params",)
    raise ValueError(f"{workdir} holds no complete checkpoint of the {role}: let the run save one (checkpoint.every, "
                     f"{role}.sft.checkpoint_every), or give another workdir")


def best_step(workdir: Path) -> int:
    """The turn of the checkpoint that `checkpoint.keep_best` kept. Raises ValueError: none."""
    found = peek_meta(workdir / "checkpoints")
    best = found and found.meta.get("best")
    if not best:
        raise ValueError(f"{workdir} holds no best checkpoint: it was trained without checkpoint.keep_best, or has not "
                         "been evaluated yet")
    step = best[1]
    if step not in complete_steps(workdir / "checkpoints"):
        raise ValueError(f"{workdir / 'checkpoints' / str(step)} is gone, and it was the best checkpoint, with "
                         f"{read_config(workdir).checkpoint.keep_best}={best[0]:g}: put it back")
    return step


def what_chose(workdir: Path, config: ConfigDict, role: str, is_best: bool = False) -> str:
    """The metric that chose a role's weights in a run's newest or best checkpoint, and its problems; empty: none did,
    or it could not compare the role's weights."""
    kept, task, how = config.checkpoint, config.task, "checkpoint.keep_best"
    arm = _stored_arm(workdir)
    # The generator has no part in the fixed pool. A verifier without interleaved turns stays as its warm-up left it:
    # only its own metrics compare its weights.
    is_pool = kept.keep_best.startswith("verifier/pool/")
    is_compared = not is_pool if role == "generator" else (
        arm.get("is_interleaved", True) or kept.keep_best.startswith("verifier/"))
    if not (role in arm.get("turns", ROLES) and is_compared) and not has_one_policy(workdir):
        return ""
    if not is_best:
        # What ended the training also says which checkpoint is the newest.
        found = kept.patience and peek_meta(workdir / "checkpoints")
        _, _, misses = (found and found.meta.get("best")) or (0, 0, 0)
        if not 0 < kept.patience <= misses:
            return ""
        how = f"checkpoint.patience={kept.patience}"
    problems = f"the task {Path(task.name).name}"
    if task.name == "math":  # whose pool stage 1 makes from rows that it holds out
        has_test = task.test and not is_pool
        problems = short_name(task.test) if has_test else f"the problems set aside from {short_name(task.train)}"
    problems = "the fixed pool of " * is_pool + problems
    return f"{kept.keep_best} on {problems} ({how})"


def identify_weights(name: str, role: str) -> tuple[int | None, str]:
    """(step of a workdir or None, digest of files), to tell weights in one place apart. Empty for a hub id."""
    path, kind = Path(name).expanduser(), kind_of(name)
    if kind == "workdir":
        directory, _ = newest_checkpoints(path, role)
        step = max(complete_steps(directory))
        return step, sampled_digest(directory.glob(f"{step}/{MANIFEST}"))
    return None, sampled_digest([path] if kind == "gguf" else sorted(path.glob("*.safetensors")))


def settings_of(source: str) -> dict:
    """Settings of a run as they are stored; empty if they are missing or cannot be read."""
    try:
        settings = json.loads((Path(source).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: ~ of a user who has no home
        return {}
    return settings if isinstance(settings, dict) else {}


def read_config(workdir: Path) -> ConfigDict:
    """A run's settings, with defaults for missing keys. ValueError: missing, damaged, or keys of another version."""
    config = default_config()
    known = flatten(config)
    for key, value in read_settings(workdir / "config.json").items():
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[leaf] = tuple(value) if isinstance(known[key], tuple) else value
    return config
