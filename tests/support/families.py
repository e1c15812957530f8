"""What families have otherwise than Llama, as fields of ModelConfig, for small models of them."""

from tango_jax.models.rotary import RopeScaling
from tango_jax.models.transformer import LayerKind

FAMILIES = {
    "smollm3": dict(pattern=(LayerKind(), LayerKind(rope_base=0.0))),
    "gemma3_text": dict(
        pattern=(LayerKind(window=4, rope_base=100.0), LayerKind()), qk_norm=True, norm_places=("before", "after"),
        norm_offset=1.0, activation="gelu", scaled_embedding=True, query_width=6.0, rope_scaling=RopeScaling(8.0),
    ),
    "olmo2": dict(qk_norm_whole=True, norm_places=("after",), norm_offset=0.0, tied_head=False),
}
