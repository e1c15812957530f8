"""Configurations of the math task that are small enough to run whole."""

from support.paths import CONFIGS, ROWS
from tango_jax.cli.command_line import load_config
from tango_jax.tasks.registry import make_task

SHORT = ROWS / "gsm8k_short.jsonl"


def math_config(checkpoint, **task):
    """One cycle on one device at the smallest sizes that run every path; the templates are the material alone. Both
    roles have the same shapes, so that what is compiled for one is found in the cache for the other."""
    config = load_config(str(CONFIGS / "tiny.py"))
    config.task.name, config.task.train, config.task.test = "math", str(SHORT), str(ROWS / "gsm8k.jsonl")
    config.task.stage_one, config.task.validation, config.task.min_steps = "gsm8k", 2, 3
    for key, value in task.items():
        config.task[key] = value
    for role in (config.generator, config.verifier):
        role.checkpoint = str(checkpoint)
        role.max_prompt, role.max_response = 320, 250
        role.cache_buckets, role.row_buckets = (), (4,)
        role.sft.steps = 2 if config.task.stage_one else 0
        role.sft.batch_size, role.sft.eval_examples, role.mesh.fsdp = 2, 2, 1
        role.sft.pack_length, role.sft.rows_per_micro_batch = 600, 2
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 2, 2
    config.rl.generator_steps, config.rl.warmup_steps, config.rl.generator_turns_per_cycle = 1, 1, 1
    config.eval.every, config.eval.problems, config.eval.pool = 1, 2, 2
    config.checkpoint.every = 1
    return config


def task_of(config, tokenizer):
    return make_task(config, {"generator": tokenizer, "verifier": tokenizer})
