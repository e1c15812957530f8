"""SmolLM2-360M-Instruct in both roles on GSM8K, with adapters on one frozen base: a first hour on one GPU of 24 GB.

Not run on a device yet. What a run must show was written before any.

Command:   python -m tango_jax.train --config=configs/smollm2_gpu.py --workdir=runs/smollm2_gpu
           The baseline from the same stage 1: with --workdir=runs/smollm2_gpu_grpo, add --config.arm=grpo
           --config.generator.init_from=runs/smollm2_gpu --config.verifier.init_from=runs/smollm2_gpu
           To use local files instead of the hub, see qwen2_5_lora.py.
Hardware:  an L4, A10G or RTX 4090 of 24 GB; by arithmetic 14.6 of the 20.9 GiB that programs may use on an L4. This
           compiles it for the card, and prints memory and times:
               python -m tango_jax.plan --config=configs/smollm2_gpu.py --target=l4:1
Time:      predicted by arithmetic, not measured (tango_jax/planning/README.md): 132 turns, evaluations included, take
           43 minutes on an L4 (33 to 71), 35 on an A10G (26 to 60), 18 on an RTX 4090 (14 to 30). Stage 1 of both roles
           adds one to seven minutes, and compiling a few.
Expected:  unknown. It must show (1) a log-prob gap without an alarm; (2) a generator whose format score is at least 0.8
           in its first turns, after stage 1; (3) a greedy accuracy on 512 test problems that ends above its value
           before the first turn, by more than the interval of the report; (4) an outcome F1 of the verifier on the
           fixed pool that ends above its first value. If (3) fails, look at the share of groups without signal first:
           the model may solve too few problems.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped


def get_config() -> ConfigDict:
    """As qwen2_5_lora, for a smaller model and an hour."""
    config = load_shipped("qwen2_5_lora")
    config.task.min_steps = 2
    for role in (config.generator, config.verifier):
        role.checkpoint = "HuggingFaceTB/SmolLM2-360M-Instruct"
        role.optimizer.lora_lr = 3e-5
        role.sft.eval_every, role.sft.eval_examples, role.sft.checkpoint_every = 40, 32, 100
        role.sft.optimizer.warmup_steps = 10
    config.generator.max_response, config.verifier.max_response = 256, 320
    config.verifier.max_prompt, config.verifier.prompt_buckets = 864, ()
    config.generator.row_buckets, config.generator.cache_buckets = (64, 128, 256), (128,)
    config.verifier.row_buckets, config.verifier.cache_buckets = (32, 64, 128), (160,)
    config.generator.rows_per_micro_batch, config.verifier.rows_per_micro_batch = 4, 2
    config.verifier.sft.pack_length = 1536
    config.generator.sft.steps = config.verifier.sft.steps = 200
    config.rl.prompts_per_step, config.rl.warmup_steps = 32, 12
    config.eval.problems, config.eval.pool = 512, 64
    return config
