"""The keys of one policy, `generator.*` or `verifier.*`, with the same defaults for both. ROLE stands for either."""

from tango_jax.runtime.keys import (
    COUNT,
    COUNT_OR_NONE,
    DEVICES,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_ABOVE_ZERO,
    SHARE_BELOW_ONE,
    TRAINED_TEMPERATURE,
    WEIGHT,
    Change,
    Group,
    Key,
    OneOf,
)

# Gradients below 6e-8 vanish in float16.
DTYPE = OneOf(("float32", "bfloat16"), ": float16 needs loss scaling, which is not supported")
SAMPLE_DTYPE = OneOf(("", "int8"))


def optimizer_keys(lr: float) -> Group:
    return {
        "lr": Key(lr, POSITIVE, "Peak learning rate of AdamW."),
        "warmup_steps": Key(0, COUNT_OR_NONE, "Updates of the linear warm-up. Only this role's updates count, even if "
                            "one policy has both roles."),
        "lora_lr": Key(0.0, NOT_NEGATIVE, "Peak learning rate where adapters are trained; 0: ten times lr, at any rank "
                       "(LoRA Without Regret, Schulman et al., 2025)."),
    }


LORA: Group = {
    "rank": Key(0, COUNT_OR_NONE, "Rank of the adapters on the frozen matrices of the layers; 0: all parameters are "
                "trained."),
    "alpha": Key(32.0, POSITIVE, "An adapter's product is multiplied by alpha / rank."),
    "targets": Key((), OneOf(("q", "k", "v", "o", "gate", "up", "down")), "Matrices of a layer that get an adapter; "
                   "empty: all seven."),
    "base_dtype": Key("", OneOf(("", "float32", "bfloat16", "int8")), "Type of the frozen base. Roles with the same "
                      "checkpoint share the base. int8: with a scale for each output of a layer's matrix. Empty: "
                      "compute_dtype."),
}

MODEL: Group = {
    "width": Key(128, COUNT, "Width of the residual stream."),
    "num_layers": Key(3, COUNT, "Number of layers."),
    "num_heads": Key(4, COUNT, "Attention heads of queries; width / num_heads is the width of each."),
    "num_kv_heads": Key(2, COUNT, "Attention heads of keys and values."),
    "mlp_width": Key(512, COUNT, "Width of the MLP's hidden layer."),
    "qk_norm": Key(False, None, "Whether queries and keys are normalised, as in Qwen3."),
    "param_dtype": Key("float32", DTYPE, "Type of the master weights and of Adam's moments."),
    "compute_dtype": Key("float32", DTYPE, "Type of matrix products; use bfloat16 on accelerators. With float32, GPUs "
                         "multiply in TF32 and TPUs in bfloat16, unless the environment sets "
                         "JAX_DEFAULT_MATMUL_PRECISION=highest (which cuDNN and splash attention ignore)."),
    "head_precision": Key("highest", OneOf(("highest", "bfloat16_x3", "bfloat16")), "Precision of the output "
                          "projection, which accumulates in float32. highest: all 24 bits of float32 on every "
                          "platform; on an A100 at a sixteenth of bfloat16's speed. bfloat16_x3: three products of "
                          "bfloat16, 16 bits at a third of bfloat16's speed (24 bits on CPUs); NVIDIA GPUs need "
                          "compute capability 8.0 or more. bfloat16: the log-probs of sampler and trainer differ "
                          "more."),
    "remat": Key("full", OneOf(("none", "dots", "full")), "What the backward pass of an update computes again. none: "
                 "nothing; dots: all but the results of the layers' matrices; full: all but the input of each layer.",
                 Change.ROUNDING),
    "unroll": Key(False, None, "Unroll the training scan over layers: faster for small models, slower to compile.",
                  Change.ROUNDING),
    "attention": Key("auto", OneOf(("auto", "xla", "cudnn", "splash")), "Attention over whole sequences: xla, cudnn "
                     "(NVIDIA GPUs, 16-bit compute_dtype) or splash (TPUs); auto: what the devices support, otherwise "
                     "xla.", Change.HARDWARE),
    "decode_attention": Key("xla", OneOf(("auto", "xla", "cudnn", "paged")), "Attention of decode steps. xla reads "
                            "caches whole. cudnn (NVIDIA GPUs, 16-bit compute_dtype) and paged (TPUs, bfloat16, a "
                            "head_dim in steps of 128, buckets in steps of 16) read only the filled part. Neither has "
                            "ever run on its device, so xla is the default. auto: what the devices support, otherwise "
                            "xla.", Change.HARDWARE),
    "sample_cache_dtype": Key("", SAMPLE_DTYPE, "Type of the KV cache, in runs and tango_jax.generate: int8, with a "
                              "scale for each token and head, or empty for compute_dtype. With int8, the log-probs of "
                              "sampler and trainer differ, and loss.importance_cap must be above 0."),
    "sample_weight_dtype": Key("", SAMPLE_DTYPE, "Type of the layers' matrices while sampling: int8, with a scale for "
                               "each output, or empty for compute_dtype. Embedding and head stay as they are. int8 "
                               "needs loss.importance_cap above 0, too."),
    "lora": LORA,
}

SFT: Group = {
    "steps": Key(0, COUNT_OR_NONE, "Updates of stage 1; 0: no stage 1."),
    "start": Key("fresh", OneOf(("fresh", "generator")), "What stage 1 starts from. fresh: the role's initial weights; "
                 "generator: the verifier's stage 1 continues from the generator's."),
    "full": Key(False, None, "With adapters: stage 1 trains all parameters, and its result is the frozen base."),
    "batch_size": Key(64, COUNT, "Sequences of an update."),
    "pack_length": Key(0, COUNT_OR_NONE, "Tokens of a packed row; 0: max_prompt + max_response.", Change.ROUNDING),
    "rows_per_micro_batch": Key(4, COUNT, "Packed rows of a forward and backward pass.", Change.ROUNDING),
    "eval_every": Key(100, COUNT, "Updates between held-out losses.", Change.ROUNDING),
    "eval_examples": Key(64, COUNT, "Held-out examples.", Change.ROUNDING),
    "max_heldout_loss": Key(0.0, NOT_NEGATIVE, "Stage 1 fails if its final held-out loss per token is above this. "
                            "init_from rejects a stage 1 that failed. 0: no limit.", Change.ROUNDING),
    "checkpoint_every": Key(200, COUNT, "Updates between checkpoints. One is also saved every two minutes.",
                            Change.ROUNDING),
    "optimizer": optimizer_keys(5e-6) | {
        "schedule": Key("constant", OneOf(("constant", "cosine")), "The learning rate after its warm-up; cosine: it "
                        "falls to zero at sft.steps."),
        "b2": Key(0.999, SHARE_BELOW_ONE, "Decay of the second moment."),
    },
}

LOSS: Group = {
    "algorithm": Key("grpo", None, "How rewards become advantages: grpo, rloo, reinforce_pp, or FILE.py:name of your "
                     "own Algorithm (rl/algorithms.py)."),
    "term": Key("", None, "FILE.py:name of a function whose loss per token is added (rl/loss_term.py). Empty: none."),
    "use_std": Key(True, None, "With grpo, divide by the standard deviation; False: subtract the mean only (Dr. "
                   "GRPO)."),
    "step_norm": Key("elements", OneOf(("elements", "solutions", "minimum", "among_equals", "first_error")), "How step "
                     "rewards become advantages (rl/step_norm.py). elements: as published; once most steps are "
                     "approved, it favours few steps. solutions: by the share of approved steps. minimum: by the worst "
                     "step to come. among_equals: as solutions, with right and wrong solutions apart. first_error: by "
                     "the steps before the first rejected one."),
    "aggregation": Key("token_mean", OneOf(("token_mean", "seq_mean", "seq_sum_norm")), "How the losses of tokens "
                       "become one. token_mean: the mean over tokens; seq_mean: the mean over sequences of each "
                       "sequence's mean; seq_sum_norm: the mean over sequences of each sum / max_response."),
    "ratio": Key("token", OneOf(("token", "sequence")), "Importance ratio of each token, or of a sequence (GSPO)."),
    "clip_low": Key(0.2, SHARE, "The ratio is clipped from below at 1 - clip_low."),
    "clip_high": Key(0.2, NOT_NEGATIVE, "The ratio is clipped from above at 1 + clip_high."),
    "kl_coef": Key(0.001, NOT_NEGATIVE, "Weight of the KL to the reference policy; 0: no KL and no reference."),
    "kl_kind": Key("k3", OneOf(("k1", "k2", "k3")), "Estimator of the KL: k1, k2 (mse) or k3 (low_var)."),
    "entropy_coef": Key(0.001, NOT_NEGATIVE, "Weight of the entropy bonus."),
    "importance_cap": Key(0.0, NOT_NEGATIVE, "Cap of the importance weights of the trainer's log-probs against the "
                          "sampler's; 0: no such weights."),
    "mask_overlong": Key(False, None, "Mask truncated responses out of the loss."),
    "minibatches": Key(1, COUNT, "Updates of a batch in each epoch."),
    "epochs": Key(1, COUNT, "How often a batch is used."),
}

MESH: Group = {
    "data": Key(1, DEVICES, "Devices over which the training state is replicated; -1: all remaining devices.",
                Change.HARDWARE),
    "fsdp": Key(-1, DEVICES, "Devices over which parameters, gradients, optimizer state and rows are split.",
                Change.HARDWARE),
    "tensor": Key(1, DEVICES, "Devices of one process over which attention heads and the MLP's width are split.",
                  Change.HARDWARE),
    "decode_tensor": Key(1, COUNT, "Devices of one process that share a copy of the weights for sampling.",
                         Change.HARDWARE),
    "offload": Key(False, None, "Keep the role's reference policy in host memory, and between updates its optimizer "
                   "state, too.", Change.HARDWARE),
    "grad_reduce_dtype": Key("float32", DTYPE, "Type in which gradients are reduced over fsdp. bfloat16 halves the "
                             "traffic, but rounds what every device contributes.", Change.HARDWARE),
}

ROLE: Group = {
    # Fields of ModelConfig. A `checkpoint` sets all but the numerics (dtypes, remat, unroll, attentions).
    "model": MODEL,
    "checkpoint": Key("", None, "Initial weights: a folder, hub id (owner/name@commit), .gguf file or workdir. Empty: "
                      "a model from scratch with the sizes in ROLE.model.*."),
    "adapter": Key("", None, "Folder of a PEFT adapter of the checkpoint, to start from; model.lora.* must match it. "
                   "Empty: fresh adapters if model.lora.rank is above 0. verifier.adapter=generator: one policy has "
                   "both roles, with or without adapters, and turns of either role update the same parameters."),
    "use_chat": Key(False, None, "Apply the checkpoint's chat template to prompts; False: raw prompts, as published."),
    "init_from": Key("", None, "Workdir of a run: start from its stage-1 checkpoint, which must be finished and within "
                     "its sft.max_heldout_loss. Empty: run stage 1 here.", Change.PLACE),
    "rewards": Key((), None, "Your functions that score one response, FILE.py:name or package.module:name. Their "
                   "numbers are added to the usual reward. The generator gets only these numbers if rl.outcome_weight "
                   "and rl.format_weight are 0 (rl/own_reward.py). Empty: none."),
    "reward_weights": Key((), WEIGHT, "Weights of rewards, one for each function. 0: it is only logged. "
                          "Empty: 1 each."),
    "template": Key("math", None, "The prompt: a name in text/templates.py, the path of a text file, or a text with "
                    "{problem} in it. A process reward model takes trl_prm, qwen_prm, or a text with {step}."),
    "stop_at_first_error": Key(False, None, "The verifier stops at the first step that it judges INCORRECT, and the "
                               "verdict follows; later steps are not judged (method/rewards.py, grading/verdict.py). "
                               "Stage 1's verifications end there. Only for the verifier; its template must ask for "
                               "it: math_first_error, plain, or your own. False: all steps are judged, as "
                               "published."),
    "max_prompt": Key(2048, COUNT, "Tokens of the longest prompt."),
    "max_response": Key(2048, COUNT, "Tokens that a response may have."),
    "prompt_buckets": Key((), COUNT, "Lengths to which prompts are padded; max_prompt is always the last.",
                          Change.ROUNDING),
    "cache_buckets": Key((), COUNT, "Sizes through which the KV cache of new tokens grows; max_response is always the "
                         "last.", Change.ROUNDING),
    "row_buckets": Key((80,), COUNT, "Rows of a decode batch, which shrinks through these sizes as rows finish.",
                       Change.ROUNDING),
    "cache_tokens": Key(0, COUNT_OR_NONE, "Tokens, prompts included, whose keys and values a device (or a group of "
                        "decode_tensor devices) may hold: rows x columns stays within it. A row's columns hold its "
                        "prompt and its new tokens, and grow with the cache buckets, to max_prompt + max_response for "
                        "the last. At first as many rows run as fit with few columns; fewer go on with more, and the "
                        "others wait in host memory. Waiting prompts start as rows end. Each number of columns, and "
                        "each row bucket that fits the last, has programs of its own: name few. 0: no limit: any row "
                        "bucket at any length, one batch after the other.", Change.ROUNDING),
    "temperature": Key(1.0, TRAINED_TEMPERATURE, "Sampling temperature in training."),
    "top_p": Key(1.0, SHARE_ABOVE_ZERO, "Nucleus sampling. Below 1, the sampling distribution differs from the trained "
                 "one."),
    "top_k": Key(0, COUNT_OR_NONE, "Top-k sampling; 0: off."),
    "pack_length": Key(0, COUNT_OR_NONE, "Tokens of a packed row; 0: as many as the longest sequence needs. Longer "
                       "rows pad less.", Change.ROUNDING),
    "rows_per_micro_batch": Key(4, COUNT, "Packed rows of a forward and backward pass (gradient accumulation).",
                                Change.ROUNDING),
    "prompts_per_micro_batch": Key(2, COUNT_OR_NONE, "Prompts beside the rows of a micro-batch; a row holds responses "
                                   "to one of them. 0: rows hold the prompts, each before its responses, as many as "
                                   "fit in pack_length tokens. That pads less where lengths differ, but attention "
                                   "computes more; long rows need a kernel (model.attention).", Change.ROUNDING),
    "logp_chunk": Key(0, COUNT_OR_NONE, "Tokens whose logits are materialised at once; 0: all of the "
                      "micro-batch.", Change.ROUNDING),
    "loss": LOSS,
    "optimizer": optimizer_keys(1e-6) | {
        "weight_decay": Key(0.01, NOT_NEGATIVE, "Weight decay of AdamW, times the learning rate. Adapters have none."),
        "clip_norm": Key(1.0, POSITIVE, "Largest global norm of a gradient; a larger one is scaled down."),
    },
    "sft": SFT,
    "mesh": MESH,
}
