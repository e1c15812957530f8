"""Two small Qwen2.5 roles on one frozen base, on GSM8K: 1.5B on a GPU of 24 GB, 0.5B on one TPU v5e chip of 16 GB.

Command:   python -m tango_jax.train --config=configs/qwen2_5_lora.py --workdir=runs/qwen2_5_1_5b_lora
           --config=configs/qwen2_5_lora.py:0_5b trains the 0.5B roles.
           To use local files instead of the hub, add --config.task.train=TRAIN.jsonl --config.task.test=TEST.jsonl
           --config.generator.checkpoint=FOLDER --config.verifier.checkpoint=FOLDER
Hardware:  an L4, A10G or RTX 4090 for 1.5B; a TPU v5e chip, which Colab has, for 0.5B. These print memory and times:
               python -m tango_jax.plan --config=configs/qwen2_5_lora.py --target=l4:1
               python -m tango_jax.plan --config=configs/qwen2_5_lora.py:0_5b --target=tpu-v5e:1
Time:      predicted, not measured: tango_jax/planning/README.md.
Expected:  not run on a GPU or TPU so far.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.method.arms import ARMS

MODELS = {"1_5b": "Qwen/Qwen2.5-1.5B", "0_5b": "Qwen/Qwen2.5-0.5B"}


def get_config(argument: str = "") -> ConfigDict:
    size = argument or "1_5b"
    if size not in MODELS:
        raise ValueError(f"there is no size {size!r}: choose one of {', '.join(MODELS)}")
    config = default_config()
    config.task.name = "math"
    config.task.train, config.task.test = "hub:openai/gsm8k:main/train", "hub:openai/gsm8k:main/test"
    config.task.stage_one = "gsm8k"
    config.task.validation, config.task.min_steps = 64, 3
    for role in (config.generator, config.verifier):
        role.checkpoint = MODELS[size]
        role.model.lora.rank = 32
        role.template = "math"
        role.model.compute_dtype, role.model.remat, role.model.head_precision = "bfloat16", "full", "bfloat16_x3"
        role.logp_chunk = 512  # 152k float32 logits per token
        role.row_buckets = (16, 32, 64, 128)
        role.prompts_per_micro_batch = 0
        role.optimizer.lora_lr = 1e-5
        role.sft.batch_size, role.sft.rows_per_micro_batch = 16, 2
        role.sft.eval_every, role.sft.eval_examples, role.sft.checkpoint_every = 16, 16, 64
        role.sft.optimizer.lora_lr, role.sft.optimizer.schedule = 2e-4, "cosine"
        role.sft.optimizer.warmup_steps = 4
    # The longest question gives a prompt of 305 tokens; the verifier's has 378 to 589 tokens without the solution.
    config.generator.max_prompt, config.generator.max_response = 320, 512
    config.verifier.max_prompt, config.verifier.max_response = 1088, 512
    config.generator.pack_length, config.generator.rows_per_micro_batch = 2048, 2
    config.verifier.pack_length, config.verifier.rows_per_micro_batch = 4096, 1
    config.generator.cache_buckets, config.verifier.cache_buckets = (192,), ()
    config.verifier.prompt_buckets = (832,)
    config.verifier.row_buckets = (16, 32, 64)  # its prompts are long, and are read all at once
    config.generator.sft.pack_length, config.verifier.sft.pack_length = 1024, 1600
    config.generator.sft.steps = config.verifier.sft.steps = 128
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 16, 8
    config.rl.warmup_steps, config.rl.generator_steps = 10, 90
    config.rl.alpha_initial = 0.5
    config.eval.every, config.eval.problems, config.eval.pool = 15, 256, 48
    config.checkpoint.every = 10
    config.ablation.arms = tuple(n for n in config.ablation.arms if not ARMS[n].needs_gold_steps)
    return config
