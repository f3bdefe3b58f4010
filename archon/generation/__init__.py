"""Generation in this process: continuous batching over a paged cache, with the modules that train."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "engine": ("InProcessEngine",),
        "replica": ("fingerprint",),
        "types": (
            "GenerationHyperparameters",
            "InferenceEngine",
            "ModelRequest",
            "ModelResponse",
        ),
    },
)
