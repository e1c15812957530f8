"""Every key of the configuration with its default and meaning. Config files start from `default_config()`."""

from typing import Any

import ml_collections

from tango_jax.arms import ARMS, DEFAULT_ARM

NAMES_A_FUNCTION = "a setting takes the name of a function, FILE.py:name or package.module:name"


class ConfigDict(ml_collections.ConfigDict):
    """A group of keys, which says in one line what a key takes where a function is assigned to it."""

    def __setitem__(self, key: str, value: Any) -> None:
        if callable(value) and not isinstance(value, ml_collections.FieldReference):
            name = getattr(value, "__name__", type(value).__name__)
            raise ValueError(f"{key}={name}: {NAMES_A_FUNCTION}, not the function itself")
        super().__setitem__(key, value)


def optimizer_config(lr: float) -> ConfigDict:
    return ConfigDict(
        {
            "lr": lr,  # peak learning rate
            "schedule": "constant",  # constant or cosine
            "warmup_steps": 0,  # linear warm-up
            "decay_steps": 0,  # cosine: the update at which it reaches zero; in stage 1, 0 means sft.steps
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
            # Matmuls; use bfloat16 on accelerators. With float32, GPUs multiply in TF32 and TPUs in bfloat16, unless
            # the environment sets JAX_DEFAULT_MATMUL_PRECISION=highest (which cuDNN and splash attention ignore).
            "compute_dtype": "float32",
            # Output projection. float32 keeps log-probs of sampler and trainer close; either accumulates in float32.
            "head_dtype": "float32",
            # Products of a float32 head. highest: all 24 bits on every platform, on an A100 at a sixteenth of the speed
            # of bfloat16; bfloat16_x3: three products of bfloat16, 16 bits at a third of that speed (all 24 on CPUs);
            # NVIDIA GPUs before compute capability 8.0 cannot.
            "head_precision": "highest",
            "remat": "full",  # none, dots (keep matmul results), full (keep only each layer's input)
            "unroll": False,  # unroll the training scan over layers: faster for small models, slower to compile
            # Attention over whole sequences: xla, cudnn (NVIDIA GPUs, 16-bit compute_dtype), splash (TPUs); auto:
            # whatever the devices support, otherwise xla. May change when a run is resumed.
            "attention": "auto",
            # Attention of decode steps: xla reads both buckets of the cache whole; cudnn (NVIDIA GPUs, 16-bit
            # compute_dtype) and paged (TPUs, bfloat16, a head_dim in steps of 128, buckets in steps of 16) read no more
            # than is there. Neither has ever run on its device, so that xla is the default. They need cache_tokens=0.
            # auto: whatever the devices support, otherwise xla. May change when a run is resumed.
            "decode_attention": "xla",
            # Sampling in smaller numbers, by runs and by tango_jax.generate: int8, or empty for compute_dtype. Keys and
            # values have a scale per token and head, matrices of the layers one per output; embedding and head stay as
            # they are. The log-probs of sampler and trainer then differ, for which loss.importance_cap must be above 0.
            "sample_cache_dtype": "",
            "sample_weight_dtype": "",
        }
    )


def sft_config() -> ConfigDict:
    """Settings of stage 1 of a role."""
    return ConfigDict(
        {
            "steps": 0,  # 0: no stage 1
            "start": "fresh",  # fresh, or generator: the verifier's stage 1 continues from the generator's
            "batch_size": 64,  # sequences
            "pack_length": 0,  # tokens per packed row; 0 means max_prompt + max_response
            "rows_per_micro_batch": 4,
            "eval_every": 100,
            "eval_examples": 64,  # held-out examples
            # Stage 1 fails if its final loss per token is above this, and `init_from` rejects one that failed; 0: no
            # gate.
            "max_heldout_loss": 0.0,
            "checkpoint_every": 200,
            "optimizer": optimizer_config(5e-6),
        }
    )


def loss_config() -> ConfigDict:
    """Advantages and policy loss of a role."""
    return ConfigDict(
        {
            # grpo, rloo, reinforce_pp, or FILE.py:name of an Algorithm of your own (rl/algorithms.py)
            "algorithm": "grpo",
            "term": "",  # a function whose loss per token is added, FILE.py:name (rl/own_method.py). Empty: none
            "use_std": True,  # False: subtract the mean only (Dr. GRPO)
            "step_scale": 10.0,  # RLOO's factor on step advantages
            "aggregation": "token_mean",  # token_mean, seq_mean, seq_sum_norm
            "ratio": "token",  # token, or sequence (GSPO)
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.001,  # beta; with 0 there is no reference policy
            "kl_kind": "k3",  # k1, k2 (mse), k3 (low_var)
            "entropy_coef": 0.001,
            "importance_cap": 0.0,  # cap of truncated importance weights w.r.t. the sampler's log-probs; 0: off
            "mask_overlong": False,  # mask truncated responses out of the loss
            "minibatches": 1,  # updates per batch and epoch
            "epochs": 1,
        }
    )


def role_config() -> ConfigDict:
    """Settings of one policy, as published (arXiv 2505.15034); generator and verifier have identical keys."""
    return ConfigDict(
        {
            # models/transformer.py ModelConfig; vocab_size comes from the tokenizer. With a `checkpoint`, everything
            # except the numerics (dtypes, remat, unroll, attentions) is read from it.
            "model": model_config(),
            # Initial weights: a folder, hub id (owner/name@commit), .gguf file or workdir; empty: `model` from scratch.
            "checkpoint": "",
            "use_chat": False,  # apply the checkpoint's chat template to prompts; False: raw prompts, as published
            # Workdir of a run whose stage-1 checkpoint to start from; it must be finished and within its gate. Empty:
            # run stage 1 here.
            "init_from": "",
            # A function that scores one response, FILE.py:name or package.module:name; its number is added to the usual
            # reward, or takes its place where the weights in `rl` are 0 (see rl/own_reward.py). Empty: none.
            "reward": "",
            "reward_timeout_s": 60,  # seconds that the function may take for one response; 0: no limit
            "template": "math",  # a name in text/templates.py, the path of a text file, or a text with {problem} in it
            "max_prompt": 2048,  # tokens
            "max_response": 2048,  # tokens
            "prompt_buckets": (),  # lengths that prompts are padded to; max_prompt is always added as the last
            "cache_buckets": (),  # sizes through which the KV cache of new tokens grows; max_response is always last
            "row_buckets": (80,),  # rows of a decode batch; it shrinks through these sizes as rows finish
            # Tokens, prompts included, whose keys and values a device (or a group of decode_tensor devices) may hold:
            # rows x (prompt bucket + cache bucket) stays within it. Many rows then start in the first cache bucket, and
            # fewer go on in a larger one, while the others wait in host memory. Prompts are read in chunks, the longest
            # first, each chunk in a bucket of its own; those that wait start as rows end. Row buckets in steps of a
            # quarter or less keep most of the budget in use. 0: any row bucket, however long its rows get, one batch
            # after the other.
            "cache_tokens": 0,
            "temperature": 1.0,
            "top_p": 1.0,  # below 1, the sampling distribution differs from the trained one
            "top_k": 0,  # 0: off
            "share_prompts": True,  # in training, process a prompt once for all its responses instead of once each
            "pack_length": 0,  # tokens per packed row; 0: as many as the longest sequence needs
            "rows_per_micro_batch": 4,  # packed rows per forward and backward pass (gradient accumulation)
            "prompts_per_micro_batch": 2,  # with shared prompts: the number of prompts that these rows may belong to
            "logp_chunk": 0,  # tokens whose logits are materialised at once; 0 means the whole micro-batch
            "loss": loss_config(),
            "optimizer": optimizer_config(1e-6),
            "sft": sft_config(),
            # Devices of the job by mesh axis (sharding.py); -1: all remaining devices. May change when a run is
            # resumed.
            "mesh": {
                "data": 1,  # replicates the training state
                "fsdp": -1,  # shards parameters, gradients, optimizer state and rows
                "tensor": 1,  # splits attention heads and MLP width; devices of one process
                "decode_tensor": 1,  # devices of one process that share a copy of the weights for sampling
                # True: keep the role's reference policy in host memory, and between updates also its optimizer state.
                "offload": False,
                # dtype of the gradient reduction over fsdp, float32 or bfloat16. bfloat16 halves the traffic but rounds
                # every device's contribution.
                "grad_reduce_dtype": "float32",
            },
        }
    )


def task_config() -> ConfigDict:
    """The task: a synthetic one, or problems from files."""
    return ConfigDict(
        {
            # last_letter or state_tracking (synthetic), math (problems from files), or a custom function from the
            # config to a Task (tasks/task.py): FILE.py:name or package.module:name.
            "name": "last_letter",
            "data_seed": 0,  # seed of SFT text, test problems and fixed pool; RL problems also depend on `seed`
            # A function (problem, answer) -> bool, FILE.py:name or package.module:name, that decides whether an answer
            # is right (tasks/own_grader.py). Empty: it is compared with the problem's.
            "grader": "",
            "grader_timeout_s": 60,  # seconds that the function may take for one answer; 0: no limit
            "min_steps": 2,  # fewer step blocks reduce the format score; use 3 for math
            # math: problem files (JSONL, JSON, parquet), hub ids (data/rows.py) or names in data/problem_sets.py
            "train": "",
            # Empty: evaluate on the problems set aside by `validation`. Questions of `test` are not trained on, unless
            # it is the same file as `train`.
            "test": "",
            "row_format": "",  # a name in data/row_formats.py; empty: detected from the keys of the first row
            # At least this many training problems are set aside, by whole questions; those of `stage_one` serve for the
            # held-out loss and the fixed pool.
            "validation": 200,
            # Text to imitate: "gsm8k" (worked answers of `train`); a file whose rows have question, tagged solution
            # and, for the verifier's stage 1, verification; or a workdir of stage 0, for its train.parquet. A
            # validation.parquet beside a train.parquet takes the place of `validation`: the held-out loss is measured
            # on it. Empty: none, and sft.steps must be 0.
            "stage_one": "",
            # last_letter
            "sft_words": (2, 8),
            "sft_letters": (3, 8),
            "rl_words": (2, 6),
            "rl_letters": (3, 10),
            # Words of the problems on which the verifier is trained, also in its warm-up; empty: those of rl_words. On
            # problems that the generator nearly always gets wrong, verdicts would have little to learn from.
            "verifier_words": (),
            "test_words": (2, 8),  # empty: those of rl_words
            "test_letters": (3, 10),
            # state_tracking
            "sft_swaps": (2, 8),
            "rl_swaps": (2, 8),
            "verifier_swaps": (),  # as verifier_words
            "test_swaps": (2, 8),  # empty: those of rl_swaps
            "strict_steps": False,  # True: label steps by the true state, not by the transition (state_tracking.py)
            # last_letter and state_tracking
            "hard_error": 0.6,  # the teacher's error rate on words that end in a hard letter, and on hard swaps
            "easy_error": 0.02,
            "reading_error": 0.55,  # how often the verifier's teacher misreads a hard letter or swap
            "claim_noise": 0.15,  # how often steps in the verifier's stage 1 name a random letter or state
        }
    )


def rl_config() -> ConfigDict:
    """Schedule of the turns, sizes of a turn's batch, and weights of the rewards."""
    return ConfigDict(
        {
            "generator_steps": 300,
            "warmup_steps": 40,  # verifier turns before the first generator turn
            "generator_turns_per_cycle": 3,  # N_g
            "verifier_turns_per_cycle": 1,  # N_v
            "prompts_per_step": 256,
            "samples_per_prompt": 5,  # M
            "verifications_per_solution": 1,  # n_inference
            "alpha_initial": 0.1,
            "alpha_final": 1e-3,
            # exponential, linear, cosine, none (constant), signal (alpha_final plus the rest times the share of groups
            # whose answers are all right or all wrong, by the grade alone, whatever else the reward has; with
            # reinforce_pp, which compares the samples of a batch, all groups count where the whole batch is so)
            "alpha_schedule": "exponential",
            # Which groups of solutions get step rewards, and so are judged by the verifier: all (as published); silent,
            # those whose outcomes give no advantage; failed, those without a right solution. See rl/trust.py.
            "judge": "all",
            # How far the verifier is believed: the likelihood ratios of its verdict CORRECT at which step rewards have
            # no weight and all of it, such as (8.0, 14.0). Empty: it is believed (as published). See rl/trust.py.
            "trust": (),
            # Dynamic sampling (DAPO, arXiv 2503.14476): groups without signal (all samples have the same reward) are
            # replaced by those of further problems, from this many further batches at most. The next turn begins
            # behind all of them, drawn or not, so that arms get the same problems. 0: off.
            "dynamic_sampling": 0,
            "outcome_weight": 1.0,  # weight of the grade in the generator's reward
            "format_weight": 0.0,  # weight of the generator's format score in the reward; it is logged in any case
            "correctness_weight": 1.0,  # weight of agreeing with the grader in the verifier's reward
            "gamma": 0.8,  # weight of the verifier's format score in the reward
            "label_count_decay": 0.8,  # decay of the EMA of correct and incorrect solution counts
        }
    )


def alarm_config() -> ConfigDict:
    """Limits of the alarms (alarms.py, whose messages name these keys).

    An alarm is only a warning and never stops a run. These settings may change when a run is resumed.
    """
    return ConfigDict(
        {
            "window": 5,  # turns to average over; with fewer, only log-prob gap, first KL and grader alarms are raised
            "margin": 0.9,  # an alarm clears when its value is inside the limit by this margin (a factor)
            "verdict_rate": 0.95,  # share of one verdict; raised only if balanced accuracy is also below the next limit
            "verdict_accuracy": 0.6,
            # Share of the right verdicts that come with a wrong judgement of a step; raised only if balanced accuracy
            # is at least the limit before. For tasks with step labels.
            "wrong_steps": 0.5,
            "misaligned": 0.3,  # share of the verifications whose judgements are more or fewer than the steps
            "truncation": 0.1,  # share of responses that reach the length limit
            "shortened": 0.1,  # share of solutions that are cut to fit the verifier's prompt
            # Mean gap in nats between sampler and trainer log-probs; it is 3e-7 in full float32 (see compute_dtype) and
            # about 2e-4 in bfloat16.
            "logprob_gap": 0.02,
            "logprob_gap_share": 0.02,  # share of tokens whose probabilities differ by more than 10 %
            "first_kl": 0.01,  # nats per token at a role's first update, where it should be 0
            "kl": 0.5,  # nats per token
            "entropy_low": 0.1,  # relative to the mean over the role's first `window` turns
            "entropy_high": 3.0,
            "steps_low": 0.5,  # relative to the mean over the first `window` turns
            "steps_high": 1.5,
            "grader_failures": 0.01,  # share of answers for which the grader fails or times out
            "groups_without_signal": 0.95,  # share of groups in which all samples have the same reward
            "still_kl": 1e-6,  # a role is not learning if its KL stays below this for a window after its first window
        }
    )


def ablation_config() -> ConfigDict:
    """Which runs an experiment consists of (`python -m tango_jax.ablate`).

    A run depends on none of these: arms, seeds and cells can be added to an existing experiment.
    """
    return ConfigDict(
        {
            "arms": tuple(name for name, arm in ARMS.items() if not arm.needs_curriculum),
            "seeds": (0, 1, 2),
            # Settings to try, all combinations of them; each value is a cell of the grid. An axis is a config key with
            # its values, {"task.rl_words": [(4, 4), (8, 8)]}, or a name with labelled settings, {"words": {"4":
            # {"task.rl_words": (4, 4), "task.test_words": (4, 4)}, "8": ...}}, which may include ablation.arms and
            # ablation.seeds. Empty: one cell. See ablation/grid.py.
            "grid": {},
            "workers": 1,  # runs at a time; above 1, each in a process of its own with its share of the CPU cores
        },
        convert_dict=False,  # `grid` is no group of settings: its keys are names of settings
    )


def default_config() -> ConfigDict:
    config = ConfigDict(
        {
            "seed": 0,
            "arm": DEFAULT_ARM,  # a name in arms.py, or an Arm of your own, FILE.py:name (tasks/own_arm.py)
            "notes": "",  # lines to log at the start: config files say here how they chose values
            "task": task_config(),
            "generator": role_config(),
            "verifier": role_config(),
            "rl": rl_config(),
            # Stage 0 (`python -m tango_jax.generate`): generator.checkpoint is the teacher that solves task.train.
            "generate": {
                "samples": 1,  # solutions per problem
                "temperature": 0.1,
                "top_p": 0.5,
                "problems": 0,  # number of problems to solve, drawn at random with `seed`; 0: all
                "shard_problems": 256,  # problems per shard, written at once; an interruption loses at most one shard
                # Filters on the solutions that are complete and tagged. These may change when a command is repeated:
                # the existing solutions are then filtered again.
                "keep": {
                    "min_format": 0.0,  # lowest format score, 0 to 1
                    "only_correct": False,  # True: drop solutions whose answer the grader rejects
                    "best": 0,  # keep only this many per problem: correct ones first, then by format score; 0: all
                    # Share of questions, drawn with `seed`, that go to validation.parquet, on which stage 1 measures
                    # its loss.
                    "validation_share": 0.02,
                },
            },
            "eval": {
                "every": 10,  # generator steps
                "problems": 200,  # held-out problems for the generator, decoded greedily
                "pool": 200,  # fixed solutions for the verifier, judged greedily
            },
            "checkpoint": {"every": 10, "keep": 2},  # turns between saves; number of checkpoints to keep
            # WORKDIR/rollouts: complete rollouts with judgements, rewards and advantages, for `tango_jax.report`.
            "rollouts": {
                "every": 5,  # turns of a role between dumps; 0: no dumps
                # Held-out problems whose greedy solutions are dumped at every evaluation, always the first ones, to be
                # compared over a run and between runs; 0: none.
                "eval_problems": 12,
                # Size limit per run. When it is reached, every second dump is deleted, and half as many are written
                # from then on.
                "max_mb": 200.0,
            },
            # Multi-process runs (hosts.py). These may change when a run is resumed.
            "distributed": {
                # True, or TANGO_DISTRIBUTED=1 in the environment: detect SLURM, Cloud TPU, GKE or OpenMPI; not needed
                # with the JAX_* variables.
                "enabled": False,
                "heartbeat_s": 60,  # the job ends if a process is silent for this long
                "connect_s": 300,  # how long to wait for the other processes at the start
            },
            "alarms": alarm_config(),
            # Loggers besides metrics.jsonl, with the same metric names; each needs its own package. These may change,
            # too.
            "loggers": {
                "tensorboard": False,  # event files in <workdir>/tensorboard
                "wandb": "",  # Weights & Biases project; empty: off. WANDB_* variables configure the rest
            },
            "compile_cache": "~/.cache/tango_jax/xla",  # persistent compilation cache, shared by all runs; empty: off
            # A table of evaluations, as tango_jax.ablate writes them: when the run ends, it is drawn beside the runs
            # in it of other arms with the same task, task.data_seed and seed, made without a grid (comparison.png).
            # Empty: none. It may change.
            "compare_with": "",
            "transcripts": 6,  # annotated examples in transcripts.md
            "ablation": ablation_config(),
        }
    )
    return config.lock()
