"""What the tests of import and export share: load a folder, run it, compare trees, shard a tree."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from tango_jax.models import transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.weights import hf_layout
from tango_jax.weights.from_hf import load_hf, model_config_from_hf

TOLERANCE = 1e-4  # of logits against PyTorch's


def load(folder, **numerics):
    config = model_config_from_hf(folder, **numerics)
    return config, load_hf(folder, config)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, inputs):
    """Logits [B, T, V] of one batch of hf_cases.Inputs."""
    attend_fn = make_packed_attention(inputs.is_token_BT.astype(jnp.int32), windows=config.windows)
    x_BTD = transformer.forward(config, params, inputs.token_BT, inputs.position_BT, attend_fn)
    head_DV = transformer.head_matrix(config, params)
    return transformer.logits_from_hidden(config, params["final_norm"], head_DV, x_BTD)


def assert_equal_trees(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), err_msg=str(path))


def add_adapters(model, folder):
    """A torch model with the adapters of a folder in it, by the formula that peft documents: W x + lora_alpha / r *
    lora_B lora_A x."""
    import torch

    settings = json.loads((Path(folder) / "adapter_config.json").read_text())
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    for name, module in model.named_modules():
        if (key := f"base_model.model.{name}.lora_A.weight") in tensors:
            a, b = (torch.from_numpy(tensors.pop(key.replace("lora_A", part))) for part in ("lora_A", "lora_B"))
            module.weight.data += settings["lora_alpha"] / settings["r"] * b @ a
    assert not tensors
    return model


def shardings_of(config):
    """Four ways over two axes, also over the head dim, which the files have merged with the heads."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = {
        "embed": ("a", "b"), "head": ("a", "b"), "layers/down": (None, "a"), "layers/q_bias": (None, "b"),
        "layers/q": (None, "b", "a"), "layers/k": (None, None, "b", "a"), "layers/v": ("b", "a"),
        "layers/o": (None, "a", None, "b"),
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, PartitionSpec(*specs.get(hf_layout.path_name(path), ()))),
        hf_layout.abstract_params(config),
    )
