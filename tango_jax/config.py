"""The configuration: every key with its default and meaning, and command-line overrides.

`configs/*.py` expose `get_config(arg)` and start from `default_config()`. The result is locked: a key that does not
exist is refused with the nearest one that does.
"""

import difflib
import importlib.util
import json
import sys
from ast import literal_eval
from pathlib import Path

from ml_collections import ConfigDict

ARMS = {
    "tango": "generator and verifier take turns (the method)",
    "grpo": "generator alone, outcome reward only",
    "fixed_verifier": "the verifier as it is after stage 1, never trained with RL",
    "fixed_verifier_warm": "the verifier trained in the warm-up only, then fixed",
    "fixed_generator": "the verifier alone, on solutions of a generator that stays as it is",
    "gold_steps": "step labels from the task instead of a verifier (an upper bound)",
}


def optimizer_config(lr: float) -> ConfigDict:
    return ConfigDict(
        {
            "lr": lr,  # peak learning rate
            "schedule": "constant",  # constant or cosine
            "warmup_steps": 0,  # linear warm-up
            "decay_steps": 0,  # cosine: where it reaches zero; 0 means the stage's number of steps
            "weight_decay": 0.01,
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-8,
            "clip_norm": 1.0,  # global gradient norm
        }
    )


def role_config() -> ConfigDict:
    """Settings of one policy; generator and verifier have identical keys (SPEC section 2's table is the default)."""
    return ConfigDict(
        {
            "model": {  # models/transformer.py ModelConfig; vocab_size comes from the tokenizer
                "width": 128,
                "num_layers": 3,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 32,
                "mlp_width": 512,
                "rope_base": 10_000.0,
                "norm_eps": 1e-6,
                "tied_head": True,
                "qkv_bias": False,
                "qk_norm": False,
                "max_position": 4096,
                "param_dtype": "float32",  # master weights and Adam moments
                "compute_dtype": "float32",  # matmuls; bfloat16 on accelerators
                "head_dtype": "float32",  # output projection; float32 keeps sampler and trainer log-probs together
                "remat": "full",  # none, dots (keep matmul results), full (keep each layer's input only)
                "unroll": False,  # unroll the training scan over layers: quicker for small models, longer compiles
            },
            "init_from": "",  # workdir of a run whose stage-1 checkpoint to start from; empty: run stage 1 here
            "template": "math",  # prompts/templates.py, or a path to a text file
            "max_prompt": 2048,  # tokens
            "max_response": 2048,  # tokens
            "prompt_buckets": (),  # lengths that prompts are padded to; max_prompt is always the last
            "cache_buckets": (),  # sizes that the cache of new tokens grows through; max_response is always the last
            "row_buckets": (80,),  # rows of a decode batch; as rows finish it shrinks through these
            "temperature": 1.0,
            "top_p": 1.0,  # below 1 the trained distribution differs from the sampled one
            "top_k": 0,  # 0: off
            "share_prompts": True,  # train on a prompt once for all its responses instead of once each
            "pack_length": 0,  # tokens of a packed row; 0: as many as the longest sequence needs
            "rows_per_micro_batch": 4,  # packed rows whose gradients are computed at once
            "prompts_per_micro_batch": 2,  # prompts that those rows may belong to, where they are shared
            "logp_chunk": 0,  # tokens whose logits exist at once; 0 means all of a micro-batch
            "loss": {
                "algorithm": "grpo",  # grpo, rloo, reinforce_pp
                "use_std": True,  # False: centre only (Dr. GRPO)
                "step_scale": 10.0,  # RLOO's factor on step advantages
                "aggregation": "token_mean",  # token_mean, seq_mean, seq_sum_norm
                "ratio": "token",  # token, or sequence (GSPO)
                "clip_low": 0.2,
                "clip_high": 0.2,
                "kl_coef": 0.001,  # beta; 0 needs no reference policy
                "kl_kind": "k3",  # k1, k2 (mse), k3 (low_var)
                "entropy_coef": 0.001,
                "importance_cap": 0.0,  # truncated importance weights against the sampler's log-probs; 0: off
                "mask_overlong": False,  # leave truncated responses out of the loss
                "minibatches": 1,  # updates per batch and epoch
                "epochs": 1,
            },
            "optimizer": optimizer_config(1e-6),
            "sft": {
                "steps": 0,  # 0: no stage 1
                "start": "fresh",  # fresh, or generator: the verifier's stage 1 continues from the generator's
                "batch_size": 64,  # sequences
                "pack_length": 0,  # tokens of a packed row; 0 means max_prompt + max_response
                "rows_per_micro_batch": 4,
                "eval_every": 100,
                "eval_examples": 64,  # held-out examples
                "max_heldout_loss": 0.0,  # stage 1 fails if it ends above this loss per token; 0: no gate
                "checkpoint_every": 200,
                "optimizer": optimizer_config(5e-6),
            },
        }
    )


def default_config() -> ConfigDict:
    config = ConfigDict(
        {
            "seed": 0,
            "arm": "tango",  # see ARMS
            "task": {
                "name": "last_letter",
                "data_seed": 0,  # SFT text, test problems and the fixed pool; RL problems also depend on `seed`
                "sft_words": (2, 8),
                "sft_letters": (3, 8),
                "rl_words": (2, 6),
                "rl_letters": (3, 10),
                "test_words": (2, 8),
                "test_letters": (3, 10),
                "hard_error": 0.6,  # the teacher's error rate on words that end in a hard letter
                "easy_error": 0.02,
                "reading_error": 0.55,  # the verifier's teacher misreads a hard letter this often
                "claim_noise": 0.15,  # solutions in the verifier's stage 1 name a random letter this often
                "min_steps": 2,  # fewer step blocks cost format score
            },
            "generator": role_config(),
            "verifier": role_config(),
            "rl": {
                "generator_steps": 300,
                "warmup_steps": 40,  # verifier turns before the first generator turn
                "generator_turns_per_cycle": 3,  # N_g
                "verifier_turns_per_cycle": 1,  # N_v
                "prompts_per_step": 256,
                "samples_per_prompt": 5,  # M
                "verifications_per_solution": 1,  # n_inference
                "alpha_initial": 0.1,
                "alpha_final": 1e-3,
                "alpha_schedule": "exponential",  # exponential, linear, cosine, none
                "outcome_weight": 1.0,
                "format_weight": 0.0,  # generator's format score is logged; its weight in the reward
                "gamma": 0.8,  # verifier's format weight
                "label_count_decay": 0.8,  # EMA of how many correct and incorrect solutions were seen
            },
            "eval": {
                "every": 10,  # generator steps
                "problems": 200,  # held-out problems for the generator, greedy
                "pool": 200,  # fixed solutions for the verifier, greedy
            },
            "checkpoint": {"every": 10, "keep": 2},  # turns between saves; how many to keep
            "compile_cache": "~/.cache/tango_jax/xla",  # compiled programs are reused across runs; empty: off
            "transcripts": 6,  # annotated examples in transcripts.md
            "ablation": {"arms": tuple(ARMS), "seeds": (0, 1, 2)},
        }
    )
    return config.lock()


def load_config(path: str, overrides: list[str] = ()) -> ConfigDict:
    """`get_config` of a Python file, with `key.path=value` overrides applied. `FILE:arg` hands `arg` to get_config.

    Raises:
        ValueError: the file is missing or has no get_config; an override names no key, or has another type.
    """
    file, _, argument = path.partition(":")
    if not Path(file).is_file() or not file.endswith(".py"):
        raise ValueError(f"{file!r} is not a Python file that exists; try configs/last_letter.py")
    spec = importlib.util.spec_from_file_location("tango_config", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{file} has no function get_config(arg)")
    try:
        config = module.get_config(argument)
    except (AttributeError, KeyError, TypeError) as error:  # a locked ConfigDict's complaint about a key or a type
        raise ValueError(f"{file}: {error}") from error
    for override in overrides:
        _apply_override(config, override)
    return config.lock()


def _apply_override(config: ConfigDict, override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator:
        raise ValueError(f"override {override!r} must look like --config.key=value")
    node, keys = config, name.split(".")
    for depth, key in enumerate(keys):
        if not isinstance(node, ConfigDict) or key not in node:
            known = flatten(config)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown config key {'.'.join(keys[: depth + 1])!r} in --config.{override}{hint}")
        node = node if depth == len(keys) - 1 else node[key]
    old = node[keys[-1]]
    if isinstance(old, ConfigDict):
        raise ValueError(f"--config.{name} is a group of keys ({', '.join(old)}); set one of them")
    node[keys[-1]] = _parse_like(old, text, name)


def _parse_like(old, text: str, name: str):
    """The text as a value of the old one's type."""
    if isinstance(old, str):
        return text
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(old, float) and type(value) is int:
        value = float(value)
    if isinstance(old, tuple) and isinstance(value, list):
        value = tuple(value)
    if isinstance(old, tuple) and isinstance(value, tuple):
        # Every tuple of the config holds integers, but for the names of arms.
        kind = str if name == "ablation.arms" else int
        is_right = all(type(item) is kind for item in value)
    else:
        is_right = type(value) is type(old)
    if not is_right:
        raise ValueError(f"--config.{name}={text} must be of type {type(old).__name__}, like its default {old!r}")
    return value


def flatten(config: ConfigDict) -> dict:
    """{'rl.gamma': 0.8, ...}"""
    flat = {}
    for key, value in config.items():
        nested = flatten(value) if isinstance(value, ConfigDict) else None
        flat |= {f"{key}.{inner}": leaf for inner, leaf in nested.items()} if nested is not None else {key: value}
    return flat


def parse_command_line(doc: str, argv: list[str], default_workdir: str) -> tuple[ConfigDict, Path]:
    """`--config=FILE[:arg] --config.key=value ... --workdir=DIR` -> (validated config, workdir).

    Prints `doc` and ends on --help; ends with one line on a user's mistake.
    """
    if "--help" in argv or "-h" in argv:
        print(doc.strip() + "\n\nusage: --config=FILE[:arg] [--config.key=value ...] [--workdir=DIR]\n")
        print("Every key with its default is in tango_jax/config.py.")
        sys.exit(0)
    try:
        path, workdir, overrides = "configs/last_letter.py", default_workdir, []
        for argument in argv:
            if argument.startswith("--config="):
                path = argument.removeprefix("--config=")
            elif argument.startswith("--config."):
                overrides.append(argument.removeprefix("--config."))
            elif argument.startswith("--workdir="):
                workdir = argument.removeprefix("--workdir=")
            else:
                raise ValueError(f"unknown argument {argument!r}; --help shows the usage")
        config = load_config(path, overrides)
        validate(config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    return config, Path(workdir).expanduser()


def save_config(config: ConfigDict, path: Path, may_change: str = "") -> None:
    """Write the config, or, where one was written before, insist that nothing differs that a resumed run depends on.

    Keys that start with `may_change` (such as "ablation.") are free to differ.

    Raises:
        ValueError: the run in this folder was made with other settings; names them.
    """
    text = json.dumps(flatten(config), indent=1, default=list, sort_keys=True)
    if path.exists():
        old, new = json.loads(path.read_text()), json.loads(text)
        changed = [
            f"{key}: {old.get(key)} -> {new.get(key)}"
            for key in sorted(old | new)
            if old.get(key) != new.get(key) and not (may_change and key.startswith(may_change))
        ]
        if changed:
            raise ValueError(
                f"{path.parent} holds a run with other settings ({'; '.join(changed[:5])}): "
                "resume with the same ones, or choose another --workdir"
            )
    path.write_text(text)


def validate(config: ConfigDict) -> None:
    """Every check that needs no data, before any work. Raises ValueError with the numbers and the fix."""
    from tango_jax import validation

    validation.check(config)
