"""archon: a model engine. A Hugging Face checkpoint in, a trained or reinforced one out, in any parallel layout.

Public names are loaded on first use, so that `import archon` and `archon --help` stay light.
"""

from archon.schema.kernel_caches import limit_kernel_caches
from archon.schema.lazy import lazy_exports

__version__ = "0.1.0"

limit_kernel_caches()

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "engine": ("ArchonEngine",),
        "schema.config": ("EngineConfig",),
        "checkpoint.hf_io": ("load_model", "save_model"),
        "models": ("get_model_spec",),
        "parallel": ("ArchonParallelDims",),
    },
)
__all__ = ["__version__", *__all__]
