"""Parallel layouts: how a model is distributed over processes. Import it as `archon.parallel`.

Public names are imported on first use, so that a layout string can be checked without torch.distributed.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "debug": ("check_tensor_consistency", "patch_dist_group_timeout"),
        "dims": ("ArchonParallelDims",),
        "layout": ("ParallelLayout", "parse_layout"),
        "resolve": ("ResolvedLayout", "resolve_layout"),
        "decoder": ("parallelize_decoder",),
    },
    expected="archon.parallel",
)
