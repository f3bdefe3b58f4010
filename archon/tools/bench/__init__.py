"""Benchmarks of parallel layouts: real training steps, each configuration in separate processes."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "config": ("Point", "SweepConfig"),
        "table": ("compare_records",),
        "bench_record": ("BenchRecord", "BenchRow", "read_record"),
        "sweep": ("run_sweep",),
    },
)
