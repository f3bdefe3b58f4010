"""In-process generation: continuous batching over a paged key-value cache, with the same modules as training."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "inprocess": ("InProcessEngine",),
        "replica": ("fingerprint",),
        "types": ("GenerationHyperparameters", "InferenceEngine", "ModelRequest", "ModelResponse"),
    },
)
