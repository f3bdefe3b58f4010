"""Checkpoints: Hugging Face folders in and out, the native format that survives `kill -9`, conversion."""

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
            "agreed_latest",
            "opened_state",
            "state_folder",
        ),
    },
)
