"""SmolLM2-135M-Instruct on last-letter concatenation: all parameters or adapters, with and without trust.

Command:   python -m tango_jax.ablate --config=configs/smollm2_lora.py:weights --workdir=runs/smollm2_lora
           Run :published and :trusted in one other folder, because they also have a stage 1 of the verifier. Offline,
           see smollm2_last_letter.py. --config.ablation.workers=2 uses two cores.
Hardware:  a CPU with two cores and 24 GiB of memory.
Time:      stage 1 takes ten minutes on two cores for the generator, half an hour for both roles. On one core a run of
           `grpo` takes 10 to 16 minutes with adapters and 21 with all parameters, a run of `tango` with adapters 25 to
           30.
Expected:  results/smollm2_lora.md.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped

TRUST = {"rl.trust": (0.4, 0.55), "rl.judge": "failed"}
RANK, RATIO = 16, 7  # of the learning rates of adapters and of all parameters, chosen on last_letter
# Arms, and cells: all parameters or adapters, trust or none.
PARTS = {
    "weights": (("grpo",), ("full", "adapters"), ("off",)),
    "published": (("grpo", "tango", "gold_steps"), ("adapters",), ("off",)),
    "trusted": (("tango",), ("adapters",), ("on",)),
}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: a part of the experiment."""
    part = argument or "weights"
    if part not in PARTS:
        raise ValueError(f"there is no part {part!r}: choose one of {', '.join(PARTS)}")
    config = load_shipped("smollm2_last_letter")
    # Of 60 steps, its verifier read too badly to be of use; grpo asks none.
    config.verifier.sft.steps = 0 if part == "weights" else 140
    config.rl.generator_steps = 18
    config.rollouts.every = 0
    arms, weights, trust = PARTS[part]
    roles = ("generator", "verifier")
    adapters = {f"{role}.{key}": value for role in roles for key, value in (
        ("model.lora.rank", RANK), ("optimizer.lora_lr", RATIO * config[role].optimizer.lr), ("sft.full", True),
    )}
    settings = {"full": {}, "adapters": adapters}
    config.ablation.arms, config.ablation.seeds = arms, (0, 1)
    config.ablation.grid = {
        "weights": {label: settings[label] for label in weights},
        "trust": {label: TRUST if label == "on" else {} for label in trust},
    }
    return config
