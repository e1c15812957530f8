"""GSM8K with GRPO and adapters of rank 32 on Qwen2.5-0.5B-Instruct or 1.5B-Instruct, beside a published result of verl.

Not run so far: 1.5B has been compiled for an H100 and an L4, and nothing here is a result of tango_jax. verl publishes
54.3 % of the test problems solved for 0.5B and 77.9 % for 1.5B (docs/algo/baseline.md, GRPO-LoRA), from 36.4 % for the
0.5B model as it is. These settings are those of its two logs: 64 problems x 5 solutions, one update of each batch, one
pass over the 7,473 problems (116 steps), a constant learning rate of 3e-5, rank and alpha 32 on all matrices, a KL loss
(k3) of 0.001, an entropy bonus of 0.001, prompts of 512 and responses of 1,024 tokens, greedy tests.

What differs from verl: the prompt asks for tagged steps and a boxed answer instead of `####`, and the reward includes
that format. So there is a short stage 1 on the worked answers, and the KL is against its result. Problems come in a
random order, adapters have no weight decay, and computing and kernels are others. Compare the gain since the evaluation
before the first turn, too.

Command:   python -m tango_jax.train --config=configs/qwen2_5_gsm8k.py --workdir=runs/qwen2_5_gsm8k
           --config=configs/qwen2_5_gsm8k.py:1_5b trains 1.5B. :0_5b-tango and :1_5b-tango train a verifier, too, for
           as many steps of the generator. To use local files instead of the hub, see qwen2_5_lora.py.
Hardware:  an L4, A10G or RTX 4090 of 24 GB, or one H100 or A100. 1.5B needs 20.3 of the 20.9 GiB that programs may use
           on an L4, and as much on an H100. This prints memory and times:
               python -m tango_jax.plan --config=configs/qwen2_5_gsm8k.py:1_5b --target=h100:1
Time:      predicted, not measured (tango_jax/planning/README.md), for 1.5B with GRPO: a turn of 15 to 26 s on an H100
           and of 111 to 242 s on an L4, with its part of the evaluations; 116 turns in 29 to 49 minutes and in 3.6 to
           7.8 hours. Stage 1 is not counted.
Expected:  unknown. Above the first evaluation, and near verl's figure if the format costs nothing.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.method.arms import ARMS

MODELS = {"0_5b": "Qwen/Qwen2.5-0.5B-Instruct", "1_5b": "Qwen/Qwen2.5-1.5B-Instruct"}
VARIANTS = {f"{size}{ending}": (size, arm) for size in MODELS for ending, arm in (("", "grpo"), ("-tango", "tango"))}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: a size, and with -tango the method instead of its baseline."""
    variant = argument or "0_5b"
    if variant not in VARIANTS:
        raise ValueError(f"there is no variant {variant!r}: choose one of {', '.join(VARIANTS)}")
    size, arm = VARIANTS[variant]
    config = default_config()
    config.arm = arm
    config.task.name = "math"
    config.task.train, config.task.test = "hub:openai/gsm8k:main/train", "hub:openai/gsm8k:main/test"
    config.task.stage_one = "gsm8k"
    config.task.validation, config.task.min_steps = 64, 3
    for role in (config.generator, config.verifier):
        role.checkpoint, role.use_chat = MODELS[size], True
        role.model.lora.rank, role.model.lora.alpha = 32, 32.0
        role.template = "math"
        role.model.compute_dtype, role.model.remat, role.model.head_precision = "bfloat16", "full", "bfloat16_x3"
        role.logp_chunk = 512  # 152k float32 logits per token
        role.pack_length, role.rows_per_micro_batch, role.prompts_per_micro_batch = 4096, 1, 0
        role.cache_buckets = (512,)
        role.optimizer.lora_lr = 3e-5
        role.loss.kl_coef, role.loss.kl_kind, role.loss.entropy_coef = 0.001, "k3", 0.001
        role.sft.steps, role.sft.batch_size, role.sft.rows_per_micro_batch = 32, 16, 2
        role.sft.eval_every, role.sft.eval_examples, role.sft.checkpoint_every = 16, 16, 32
        role.sft.optimizer.lora_lr, role.sft.optimizer.schedule = 2e-4, "cosine"
        role.sft.optimizer.warmup_steps = 4
    config.generator.max_prompt, config.generator.max_response = 512, 1024
    config.generator.row_buckets = (20, 40, 80, 160)
    config.generator.sft.pack_length = 1024
    # Its prompt without the solution has 378 to 589 tokens.
    config.verifier.max_prompt, config.verifier.max_response = 1664, 1024
    config.verifier.prompt_buckets = (1088,)
    config.verifier.row_buckets = (20, 40)  # its prompts are long, and are read all at once
    config.verifier.sft.pack_length = 1600
    if arm == "grpo":
        config.verifier.sft.steps = 0  # no verifier is asked
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 64, 5
    config.rl.warmup_steps, config.rl.generator_steps = 10, 116
    config.rl.alpha_initial = 0.5
    config.eval.every, config.eval.problems, config.eval.pool = 29, 1319, 64  # all test problems
    config.checkpoint.every = 10
    # With `grpo`, no verifier has a stage 1.
    config.ablation.arms = tuple(n for n in config.ablation.arms if not ARMS[n].needs_gold_steps
                                 and not (arm == "grpo" and ARMS[n].uses_verifier))
    return config
