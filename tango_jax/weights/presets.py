"""Published config.json contents of known checkpoints, so that `tango_jax.plan` downloads nothing."""

import re

from tango_jax.models.transformer import ModelConfig
from tango_jax.weights.from_hf import model_config_from_json
from tango_jax.weights.hf_layout import PROCESS_REWARD_MODEL

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "attention_dropout": 0.0,
    "use_sliding_window": False, "rms_norm_eps": 1e-06,
}
_QWEN2_7B = _QWEN2 | {
    "num_hidden_layers": 28, "max_window_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}
_QWEN2_SMALL = _QWEN2 | {
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1000000.0,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "mlp_bias": False, "rms_norm_eps": 1e-05,
}
_LLAMA_3_1 = _LLAMA | {
    "vocab_size": 128256, "tie_word_embeddings": False, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
_LLAMA_3_2 = _LLAMA_3_1 | {
    "tie_word_embeddings": True,
    "rope_scaling": _LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_dropout": 0.0,
    "attention_bias": False, "use_sliding_window": False, "rms_norm_eps": 1e-06, "vocab_size": 151936,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-06, "head_dim": 256,
    "query_pre_attn_scalar": 256, "vocab_size": 262144, "num_key_value_heads": 1,
    "sliding_window": 512, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
}
_OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "rms_norm_eps": 1e-06, "vocab_size": 100352, "tie_word_embeddings": False,
    "max_position_embeddings": 4096, "rope_theta": 500000,
}
# Owners that republish models under the same names.
COPIERS = ("unsloth", "mlx-community")
_VERSION = re.compile(r"(-(instruct|it|base|pt|bf16))+$")

def _sizes(layers: int, width: int, mlp_width: int, heads: int, **more) -> dict:
    return {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": mlp_width,
            "num_attention_heads": heads} | more


CONFIG_JSON = {
    "Qwen/Qwen2.5-Math-7B": _QWEN2_7B | {"max_position_embeddings": 4096, "rope_theta": 10000},
    "Qwen/Qwen2.5-7B": _QWEN2_7B | {"max_position_embeddings": 131072, "rope_theta": 1000000.0},
    "Qwen/Qwen2.5-0.5B": _QWEN2_SMALL | _sizes(24, 896, 4864, 14, max_window_layers=24, max_position_embeddings=32768),
    "Qwen/Qwen2.5-1.5B": _QWEN2_SMALL | _sizes(
        28, 1536, 8960, 12, max_window_layers=28, max_position_embeddings=131072),
    "Qwen/Qwen2.5-3B": _QWEN2_SMALL | _sizes(36, 2048, 11008, 16, max_window_layers=36, max_position_embeddings=32768),
    "Qwen/Qwen3-0.6B": _QWEN3 | _sizes(28, 1024, 3072, 16),
    "Qwen/Qwen3-1.7B": _QWEN3 | _sizes(28, 2048, 6144, 16),
    "Qwen/Qwen3-4B": _QWEN3 | _sizes(36, 2560, 9728, 32),
    "Qwen/Qwen3-8B": _QWEN3 | _sizes(36, 4096, 12288, 32, tie_word_embeddings=False),
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_3_2 | _sizes(16, 2048, 8192, 32, head_dim=64),
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_3_2 | _sizes(28, 3072, 8192, 24, head_dim=128),
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_1 | _sizes(32, 4096, 14336, 32),
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_3_1 | _sizes(80, 8192, 28672, 64),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _LLAMA | _sizes(
        30, 576, 1536, 9, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
        max_position_embeddings=8192, rope_theta=100000),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _LLAMA | _sizes(
        32, 960, 2560, 15, num_key_value_heads=5, vocab_size=49152, tie_word_embeddings=True,
        max_position_embeddings=8192, rope_theta=100000),
    "HuggingFaceTB/SmolLM3-3B": _LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"} | _sizes(
        36, 2048, 11008, 16, num_key_value_heads=4, vocab_size=128256, tie_word_embeddings=True,
        max_position_embeddings=65536, rope_theta=5000000.0, rms_norm_eps=1e-06, no_rope_layer_interval=4),
    "allenai/OLMo-2-0425-1B-Instruct": _OLMO2 | _sizes(16, 2048, 8192, 16, num_key_value_heads=16),
    "allenai/OLMo-2-1124-7B-Instruct": _OLMO2 | _sizes(32, 4096, 11008, 32, num_key_value_heads=32),
    "google/gemma-3-270m-it": _GEMMA3 | _sizes(18, 640, 2048, 4),
    "google/gemma-3-1b-it": _GEMMA3 | _sizes(26, 1152, 6912, 4),
    "google/gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240,
            "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
}


_QWEN_PRM = _QWEN2_7B | {
    "architectures": [PROCESS_REWARD_MODEL], "max_position_embeddings": 4096, "rope_theta": 10000,
    "rms_norm_eps": 1e-05}
# Process reward models, which can only be a verifier.
REWARD_MODELS = {
    "Qwen/Qwen2.5-Math-PRM-7B": _QWEN_PRM,
    "Qwen/Qwen2.5-Math-7B-PRM800K": _QWEN_PRM,
    "Qwen/Qwen2.5-Math-PRM-72B": _QWEN_PRM | _sizes(80, 8192, 29568, 64, num_key_value_heads=8, max_window_layers=80),
}


def known_name(name: str) -> str | None:
    """The checkpoint with this hub id's sizes: a base model, its owner's tunings, copies by COPIERS. None: unknown."""
    owner, model = _owner_and_sizes(name)
    return next((known for known in CONFIG_JSON | REWARD_MODELS if _owner_and_sizes(known)[1] == model
                 and (owner in COPIERS or owner == _owner_and_sizes(known)[0])), None)


def _owner_and_sizes(name: str) -> tuple[str, str]:
    owner, _, model = name.lower().partition("/")
    return owner, _VERSION.sub("", model)


def preset_model(name: str, **numerics) -> ModelConfig:
    """The ModelConfig of a checkpoint in the table, or ValueError. `numerics`: source.NUMERICS."""
    known = known_name(name)
    if known is None:
        raise ValueError(
            f"no preset sizes for {name}: give a folder that contains its config.json (weights are not read), or one "
            f"of {', '.join(CONFIG_JSON | REWARD_MODELS)}"
        )
    return model_config_from_json((CONFIG_JSON | REWARD_MODELS)[known], f"config.json of {known}", **numerics)
