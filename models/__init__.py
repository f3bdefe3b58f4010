"""The zoo: one file a family, shared layers beside them. Import it as `archon.models`.

Public names are loaded on first use, so that `archon models` can list families without building anything.
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
        "base": ("BaseArchonModel",),
        "args": ("BaseModelArgs",),
        "state_dict": ("BaseStateDictAdapter", "NativeTarget"),
        "head": ("LMHead", "TokenScores", "WeightedLoss"),
        "layers.rope": ("RopeConfig",),
    },
    expected="archon.models",
)
