"""Checkpoints: import and export of Hugging Face folders, the crash-safe native format, and conversion."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "hf_io": (
            "load_model",
            "load_tokenizer",
            "read_hf_config",
            "save_model",
        ),
        "native": (
            "agree_on_latest",
            "open_state",
            "find_checkpoint",
        ),
    },
)
