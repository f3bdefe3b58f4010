"""Parallel layouts measured side by side: real training steps, each point in processes of its own."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "config": ("Point", "SweepConfig"),
        "compare": ("compare_records",),
        "record": ("BenchRecord", "Row", "read_record"),
        "sweep": ("run_sweep",),
    },
)
