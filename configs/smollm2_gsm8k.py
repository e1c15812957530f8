"""SmolLM2-135M-Instruct in both roles on GSM8K: the whole method on a pretrained model, on a small GPU or a CPU.

Command:   python -m tango_jax.train --config=configs/smollm2_gsm8k.py --workdir=runs/smollm2_gsm8k
           To use local files instead of the hub, add --config.task.train=TRAIN.jsonl --config.task.test=TEST.jsonl
           --config.generator.checkpoint=MODEL.gguf --config.verifier.checkpoint=MODEL.gguf
Hardware:  a CPU with 16 GiB of memory (12.2 GiB were used at the peak) and 15 GB of disk for the checkpoints; or any
           GPU with 16 GB.
Time:      an hour and a half on two CPU cores of a busy machine: 22 and 30 minutes for stage 1 of the two roles, 4 for
           compilation, two and a half for each of nine turns, two for each of four evaluations. Not run on a GPU.
Expected:  everything runs, with finite metrics and a log-prob gap below 1e-3. A model of this size solves at most a few
           percent of GSM8K, and two cycles do not change that.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.method.arms import ARMS


def get_config() -> ConfigDict:
    config = default_config()
    config.task.name = "math"
    config.task.train, config.task.test = "hub:openai/gsm8k:main/train", "hub:openai/gsm8k:main/test"
    config.task.stage_one = "gsm8k"
    config.task.validation, config.task.min_steps = 64, 3
    for role in (config.generator, config.verifier):
        role.checkpoint = "HuggingFaceTB/SmolLM2-135M-Instruct"
        role.template = "math"
        role.logp_chunk = 128  # the logits of a whole row would need 50k floats per token, several times over
        role.row_buckets, role.cache_buckets = (8, 16), (128,)
        role.rows_per_micro_batch, role.prompts_per_micro_batch = 4, 1
        role.optimizer.lr = 1e-6
        role.sft.eval_every, role.sft.eval_examples, role.sft.checkpoint_every = 16, 8, 16
        role.sft.rows_per_micro_batch = 1
        role.sft.optimizer.lr, role.sft.optimizer.schedule, role.sft.optimizer.warmup_steps = 5e-5, "cosine", 4
    # The longest question gives a prompt of 305 tokens; the verifier's has 378 to 589 tokens without the solution.
    config.generator.max_prompt, config.generator.max_response = 320, 256
    config.generator.sft.pack_length = 1024
    config.generator.sft.steps, config.generator.sft.batch_size = 32, 8
    config.verifier.max_prompt, config.verifier.max_response = 832, 320
    config.verifier.sft.pack_length = 1536
    config.verifier.sft.steps, config.verifier.sft.batch_size = 24, 4  # the verifier's examples are three times as long
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 4, 4
    config.rl.warmup_steps, config.rl.generator_steps = 1, 6
    config.rl.alpha_initial = 0.5
    config.eval.every, config.eval.problems, config.eval.pool = 6, 16, 8
    config.checkpoint.every, config.checkpoint.keep = 2, 1
    config.ablation.arms = tuple(n for n in config.ablation.arms if not ARMS[n].needs_gold_steps)
    return config
