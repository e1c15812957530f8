"""The published setting (arXiv 2505.15034): Qwen2.5-Math-7B generates, Qwen2.5-7B verifies, on Eurus-2 problems.

Command:   First run stage 1 of the generator. Its text is a file of tagged solutions (rows with `question` and
           `solution`; the paper's file is not published) or a workdir of stage 0 (configs/llama3_1_70b_teacher.py):
               python -m tango_jax.sft --config=configs/qwen2_5_math_7b.py --config.generator.init_from= \
                   --config.task.stage_one=TAGGED.parquet --workdir=runs/qwen2_5_math_7b_sft
           After all 800 steps, run reinforcement learning. It starts from that workdir (generator.init_from) and
           rejects it if it is unfinished:
               python -m tango_jax.train --config=configs/qwen2_5_math_7b.py --workdir=runs/qwen2_5_math_7b
           With --config.generator.sft.max_heldout_loss=LOSS in both, a stage 1 that ends above LOSS is rejected, too.
           Append :rloo or :reinforce_pp to the file name for that algorithm with its published settings, e.g.
               python -m tango_jax.train --config=configs/qwen2_5_math_7b.py:rloo --workdir=runs/qwen2_5_math_7b_rloo
Hardware:  the paper used 4 nodes of 8 A100. Start one process per node (sbatch --ntasks-per-node=1
           launch/slurm.sbatch ...): `row_buckets` count the rows of one process. This prints the memory of a device:
               python -m tango_jax.plan --config=configs/qwen2_5_math_7b.py --target=a100-80gb:32
           or with --target=tpu-v5p:32. A checkpoint of both roles is 183 GB.
Time:      predicted, not measured, if the mean response has 0.3 of the maximum length: 8 to 13 hours on 32 A100, 6 to
           12 on 32 chips of a TPU v5p, a v5p-64 (tango_jax/planning/README.md). With int8 sampling in both roles
           (`model.sample_cache_dtype`, `model.sample_weight_dtype`): 6 to 10 hours on 32 A100, 5 to 9 on the v5p if
           the roles also share a mesh of fsdp 16 x tensor 2. Meshes and remat are the quickest that an older plan found
           for 32 A100 with int8.
Expected:  not reproduced. The paper reports the best generator of its size on five competition benchmarks and four
           out-of-domain tasks, and the best verifier of its size on ProcessBench.
"""

from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.method.arms import ARMS

ALGORITHMS = ("grpo", "rloo", "reinforce_pp")


def get_config(argument: str = "") -> ConfigDict:
    config = default_config()
    config.task.name, config.task.min_steps = "math", 3
    config.task.train, config.task.test = "eurus_train", "math500"
    config.generator.checkpoint = "Qwen/Qwen2.5-Math-7B"
    config.verifier.checkpoint = "Qwen/Qwen2.5-7B"
    for role in (config.generator, config.verifier):
        set_role(role)
    set_generator(config.generator)
    set_verifier(config.verifier)
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 256, 5
    # With 100 verifier turns between the generator's, 440 turns in all.
    config.rl.warmup_steps, config.rl.generator_steps = 40, 300
    config.rl.generator_turns_per_cycle, config.rl.verifier_turns_per_cycle = 3, 1
    config.rl.verifications_per_solution = 1
    config.rl.alpha_initial, config.rl.alpha_final, config.rl.alpha_schedule = 0.1, 1e-3, "exponential"
    config.rl.outcome_weight, config.rl.format_weight, config.rl.gamma = 1.0, 0.0, 0.8
    config.eval.every, config.eval.problems = 10, 500
    config.checkpoint.every = 50
    config.ablation.arms = tuple(n for n in config.ablation.arms if not ARMS[n].needs_gold_steps)
    set_algorithm(config, argument or "grpo")
    return config


def set_role(role: ConfigDict) -> None:
    """Settings that both roles have in common."""
    role.template = "math"
    role.model.param_dtype, role.model.compute_dtype, role.model.remat = "float32", "bfloat16", "dots"
    role.model.head_precision = "bfloat16_x3"  # finer than the hidden states by eight bits
    role.logp_chunk = 2048  # 152k float32 logits per token: 1.2 GB per chunk, 5 GB for a whole micro-batch
    role.temperature, role.top_p, role.top_k = 1.0, 1.0, 0
    role.loss.aggregation = "token_mean"  # as in the published code; the paper's equation is seq_mean
    role.loss.clip_low = role.loss.clip_high = 0.2
    role.loss.kl_coef, role.loss.minibatches, role.loss.epochs = 0.001, 1, 1
    role.optimizer.lr, role.optimizer.warmup_steps, role.optimizer.clip_norm = 1e-6, 0, 1.0
    # Train states are split over all devices, which leaves room for the matmul results that `remat` keeps (on fewer
    # devices, ask the plan: remat=full needs less); parameters are gathered while the products of a micro-batch run.
    # Four devices share a copy of the sampling weights (4 GiB each): each then reads a quarter of them in a step, for
    # four times the rows.
    role.mesh.data, role.mesh.fsdp, role.mesh.decode_tensor = 1, -1, 4
    # A process of 8 devices samples 320 rows in a phase. They start together, and batches shrink in small steps.
    role.row_buckets = (16, 32, 64, 112, 160, 208, 256, 320)
    # Rows of 8,192 tokens hold two or three problems with their responses.
    role.pack_length, role.rows_per_micro_batch, role.prompts_per_micro_batch = 8192, 1, 0


def set_generator(role: ConfigDict) -> None:
    """Lengths, batch sizes and stage 1 of the generator."""
    # Together they use all 4096 positions of Qwen2.5-Math-7B: neither can be raised without lowering the other.
    role.max_prompt, role.max_response = 2048, 2048
    # Few sizes, so that few programs are compiled. By the plan a turn takes 1 % longer than with five and four sizes.
    role.prompt_buckets, role.cache_buckets = (512, 1024), (512, 1024)
    role.cache_tokens = 160 * (2048 + 2048)  # of four devices: room for all rows at their longest, 9 GB on each
    role.init_from = "runs/qwen2_5_math_7b_sft"
    role.sft.steps, role.sft.batch_size, role.sft.pack_length = 800, 64, 4096
    role.sft.rows_per_micro_batch = 2
    role.sft.optimizer.lr, role.sft.optimizer.schedule = 5e-6, "cosine"
    role.sft.optimizer.warmup_steps = 80  # a tenth of the steps


def set_verifier(role: ConfigDict) -> None:
    """Lengths and batch sizes of the verifier, which has no stage 1."""
    role.mesh.tensor, role.rows_per_micro_batch = 4, 2  # they share what `remat` keeps of its rows
    role.max_prompt, role.max_response = 4096, 4096
    role.prompt_buckets, role.cache_buckets = (1024, 2048), (1024, 2048)
    role.cache_tokens = 160 * (4096 + 4096)  # by the same arithmetic, 19 GB
    role.sft.steps = 0


def set_algorithm(config: ConfigDict, algorithm: str) -> None:
    """Set the algorithm of both roles, with the settings that the paper changes for REINFORCE++."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no published setting for {algorithm!r}: write nothing or one of {', '.join(ALGORITHMS)}")
    is_reinforce_pp = algorithm == "reinforce_pp"
    for role in (config.generator, config.verifier):
        role.loss.algorithm = algorithm
        role.loss.kl_kind = "k2" if is_reinforce_pp else "k3"  # verl's names: mse, low_var
        role.loss.entropy_coef = 0.0 if is_reinforce_pp else 0.001
    config.rl.alpha_initial = 0.5 if is_reinforce_pp else 0.1
