"""Every key of the configuration with its default and meaning. Config files start from `default_config()`."""

from ml_collections import ConfigDict

from tango_jax.arms import ARMS, DEFAULT_ARM


def optimizer_config(lr: float) -> ConfigDict:
    return ConfigDict(
        {
            "lr": lr,  # peak learning rate
            "schedule": "constant",  # constant or cosine
            "warmup_steps": 0,  # linear warm-up
            "decay_steps": 0,  # cosine: the update where it reaches zero; in stage 1, 0 means sft.steps
            "weight_decay": 0.01,
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-8,
            "clip_norm": 1.0,  # global gradient norm
        }
    )


def model_config() -> ConfigDict:
    """Architecture and numerics of a role without a checkpoint: fields of transformer.ModelConfig."""
    return ConfigDict(
        {
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
            # Matmuls; bfloat16 on accelerators. With float32 GPUs multiply in TF32 and TPUs in bfloat16, unless the
            # environment has JAX_DEFAULT_MATMUL_PRECISION=highest (which cuDNN and splash attention do not read).
            "compute_dtype": "float32",
            # Output projection. float32 is multiplied in full on every platform and keeps sampler and trainer log-probs
            # together; on an A100 that is 16 times slower than bfloat16, which accumulates in float32, too.
            "head_dtype": "float32",
            "remat": "full",  # none, dots (keep matmul results), full (keep each layer's input only)
            "unroll": False,  # unroll the training scan over layers: quicker for small models, longer compiles
            # For whole sequences: xla, cudnn (NVIDIA GPUs, 16-bit compute_dtype), splash (TPUs); auto: what the devices
            # have, or else xla. May change when a run is resumed.
            "attention": "auto",
        }
    )


def sft_config() -> ConfigDict:
    """Stage 1 of a role."""
    return ConfigDict(
        {
            "steps": 0,  # 0: no stage 1
            "start": "fresh",  # fresh, or generator: the verifier's stage 1 continues from the generator's
            "batch_size": 64,  # sequences
            "pack_length": 0,  # tokens of a packed row; 0 means max_prompt + max_response
            "rows_per_micro_batch": 4,
            "eval_every": 100,
            "eval_examples": 64,  # held-out examples
            # Stage 1 fails if it ends above this loss per token, and `init_from` refuses one that did; 0: no gate.
            "max_heldout_loss": 0.0,
            "checkpoint_every": 200,
            "optimizer": optimizer_config(5e-6),
        }
    )


def role_config() -> ConfigDict:
    """Settings of one policy, those published (arXiv 2505.15034); generator and verifier have identical keys."""
    return ConfigDict(
        {
            # models/transformer.py ModelConfig; vocab_size comes from the tokenizer. With a `checkpoint`, all but the
            # numerics (dtypes, remat, unroll, attention) comes from there.
            "model": model_config(),
            # To start from: a folder, hub id (owner/name@commit), .gguf file or workdir; empty: `model` from scratch.
            "checkpoint": "",
            "use_chat": False,  # prompts as a user's turn in the checkpoint's chat template; False: raw, as published
            # Workdir of a run whose stage-1 checkpoint to start from, finished and within its gate; empty: run stage 1
            # here.
            "init_from": "",
            # A reward function of your own, FILE.py:name or package.module:name (rl/credit.py); empty: the usual one.
            "reward": "",
            "template": "math",  # text/templates.py, or a path to a text file
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
            "sft": sft_config(),
            # Devices of the job by axis (sharding.py); -1: what the others leave. May change when a run is resumed.
            "mesh": {
                "data": 1,  # training state is replicated over it
                "fsdp": -1,  # parameters, gradients and optimizer state are sharded over it; rows too
                "tensor": 1,  # heads and mlp width are split over it; devices of one process
                "decode_tensor": 1,  # devices of one process that share a copy of the weights for sampling
                # True: the optimizer state waits in host memory between the role's updates, its reference policy always
                "offload": False,
                # float32 or bfloat16: gradients summed over fsdp. bfloat16 halves what is sent and rounds every share.
                "grad_reduce_dtype": "float32",
            },
        }
    )


def task_config() -> ConfigDict:
    """What is learned: the synthetic task, or problems from files."""
    return ConfigDict(
        {
            # last_letter (synthetic), math (problems from files), or a function of your own from the config to a Task
            # (tasks/task.py): FILE.py:name or package.module:name.
            "name": "last_letter",
            "data_seed": 0,  # SFT text, test problems and the fixed pool; RL problems also depend on `seed`
            "min_steps": 2,  # fewer step blocks cost format score; 3 for math
            # math: problem files (JSONL, JSON, parquet), hub ids (data/rows.py) or names in data/problem_sets.py
            "train": "",
            "test": "",  # empty: evaluate on the problems that `validation` sets aside
            "row_format": "",  # a name in data/row_formats.py; empty: by the keys of the first row
            # Training problems set aside, at least so many and by whole questions; those of `stage_one` for held-out
            # loss and fixed pool.
            "validation": 200,
            # Text to imitate: "gsm8k" (worked answers of `train`), or a file of rows with question, tagged solution
            # and, for the verifier's stage 1, verification; or a workdir of stage 0, for its train.parquet. A
            # validation.parquet beside a train.parquet takes the place of `validation`: the held-out loss is measured
            # on it. Empty: none, sft.steps is 0.
            "stage_one": "",
            # last_letter
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
        }
    )


def alarm_config() -> ConfigDict:
    """When a run warns (alarms.py, whose messages name these keys); it never stops for an alarm. These may change when
    a run is resumed."""
    return ConfigDict(
        {
            "window": 5,  # turns that are averaged; with fewer only log-prob gaps, first KL and the grader can ring
            "margin": 0.9,  # an alarm is over when what it saw is inside the limit by this share of it
            "verdict_rate": 0.95,  # share of one verdict; rings where the balanced accuracy is also below the next
            "verdict_accuracy": 0.6,
            "truncation": 0.1,  # share of responses that end at the length limit
            "shortened": 0.1,  # share of solutions that are cut to fit the verifier's prompt
            "logprob_gap": 0.02,  # nats between sampler and trainer, mean; float32 (in full, see
            # compute_dtype) has 3e-7, bfloat16 about 2e-4
            "logprob_gap_share": 0.02,  # of tokens whose probabilities differ by more than 10 %
            "first_kl": 0.01,  # nats per token at a role's first update, where it should be 0
            "kl": 0.5,  # nats per token
            "entropy_low": 0.1,  # of the mean over the first `window` turns of the role
            "entropy_high": 3.0,
            "steps_low": 0.5,  # of the mean over the first `window` turns
            "steps_high": 1.5,
            "grader_failures": 0.01,  # share of answers with an error or a timeout
            "groups_without_signal": 0.95,  # share of groups in which all samples have the same reward
            "still_kl": 1e-6,  # a role whose KL is below this in a window after its first does not move
        }
    )


def default_config() -> ConfigDict:
    config = ConfigDict(
        {
            "seed": 0,
            "arm": DEFAULT_ARM,  # see arms.py
            "task": task_config(),
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
            # Stage 0 (`python -m tango_jax.generate`): generator.checkpoint is the teacher that solves task.train.
            "generate": {
                "samples": 1,  # solutions per problem
                "temperature": 0.1,
                "top_p": 0.5,
                "problems": 0,  # how many to solve, drawn by `seed`; 0: all
                "shard_problems": 256,  # written at once: what an interruption costs at most
                # What is kept of the solutions that are whole and tagged. These may change when a command is repeated:
                # the solutions of before are filtered anew.
                "keep": {
                    "min_format": 0.0,  # lowest format score, 0 to 1
                    "only_correct": False,  # True: none whose answer the grader rejects
                    "best": 0,  # the best so many of a problem: correct ones first, then by format score; 0: all
                    # Of the questions, drawn by `seed`, into validation.parquet, which stage 1 measures its loss on.
                    "validation_share": 0.02,
                },
            },
            "eval": {
                "every": 10,  # generator steps
                "problems": 200,  # held-out problems for the generator, greedy
                "pool": 200,  # fixed solutions for the verifier, greedy
            },
            "checkpoint": {"every": 10, "keep": 2},  # turns between saves; how many to keep
            # WORKDIR/rollouts: every rollout with its judgements, rewards and advantages, for `tango_jax.report`.
            "rollouts": {
                "every": 5,  # turns of a role between dumps; 0: none
                # Of a run. When it is reached, every second dumped turn is deleted and half as many are written.
                "max_mb": 200.0,
            },
            # Several processes (hosts.py). These may change when a run is resumed.
            "distributed": {
                "enabled": False,  # True: ask SLURM, Cloud TPU, GKE or OpenMPI; the JAX_* variables need no switch
                "heartbeat_s": 60,  # a process that is silent for so long ends the job
                "connect_s": 300,  # how long to wait for the others at the start
            },
            "alarms": alarm_config(),
            # Beside metrics.jsonl, with the same names; each needs a package of its own. These may change, too.
            "loggers": {
                "tensorboard": False,  # event files in <workdir>/tensorboard
                "wandb": "",  # Weights & Biases: the project; empty: off. Its own WANDB_* variables say the rest
            },
            "compile_cache": "~/.cache/tango_jax/xla",  # compiled programs are reused across runs; empty: off
            "transcripts": 6,  # annotated examples in transcripts.md
            "ablation": {"arms": tuple(ARMS), "seeds": (0, 1, 2)},
        }
    )
    return config.lock()
