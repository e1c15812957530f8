"""Both roles, every stage and two cycles, to check that everything runs.

Command:   python -m tango_jax.train --config=configs/tiny.py --workdir=runs/tiny
Hardware:  any CPU.
Time:      150 CPU seconds the first time, nearly all of it compiling. Later runs take 30, from the cache.
Expected:  every code path runs. The models learn nothing in such a short time, and several alarms ring.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    for role in (config.generator, config.verifier):
        role.template = "last_letter"
        role.model.width, role.model.num_layers, role.model.mlp_width = 32, 2, 64
        role.model.num_heads, role.model.num_kv_heads = 2, 1
        role.model.remat = "none"
        role.row_buckets = (4, 8)
        role.optimizer.lr = 1e-3
        role.sft.steps, role.sft.batch_size = 6, 4
        role.sft.eval_every, role.sft.eval_examples, role.sft.checkpoint_every = 3, 8, 3
        role.sft.optimizer.lr = 3e-3
    config.generator.max_prompt, config.generator.max_response = 104, 32
    config.generator.cache_buckets = (16,)
    config.verifier.max_prompt, config.verifier.max_response = 104, 48
    for split in ("sft", "rl", "test"):
        config.task[f"{split}_words"], config.task[f"{split}_letters"] = (1, 2), (2, 3)
    config.task.hard_error, config.task.reading_error = 0.7, 0.55
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 4, 2
    config.rl.generator_steps, config.rl.warmup_steps = 6, 2
    config.rl.alpha_initial = 0.5
    config.eval.every, config.eval.problems, config.eval.pool = 3, 8, 8
    config.checkpoint.every = 2
    return config
