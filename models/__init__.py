"""Model families and shared layers; import them from `archon.models`.

Public names load on first use, which keeps the import light.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "spec": (
            "ModelSpec",
            "get_model_spec",
            "get_supported_model_types",
            "is_supported_model",
            "register_model_spec",
        ),
        "attention.meta": ("AttentionMeta", "PackedAttention"),
        "attention.backend": ("AttentionBackend",),
        "attention.registry": ("register_attention_backend",),
        "attention.spec": ("AttentionSpec",),
        "base": ("BaseArchonModel",),
        "args.base": ("BaseModelArgs",),
        "hf.state_dict": ("BaseStateDictAdapter", "NativeTarget"),
        "layers.head": ("LMHead", "TokenScores", "WeightedLoss"),
        "layers.rope": ("RopeConfig",),
    },
    expected="archon.models",
)
