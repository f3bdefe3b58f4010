"""The engine: builds one model in a layout, trains it on packed batches, and saves its state."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "engine": ("ArchonEngine",),
        "batch": ("PackedBatch", "pack"),
        "loss": ("CrossEntropyLoss", "LossFn", "LossWeightFn", "WeightedTokenLoss", "loss_token_count"),
    },
)
