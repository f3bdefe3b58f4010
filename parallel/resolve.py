"""The one way from a layout string to a layout that a model can be trained in."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from archon.parallel.compile import compile_enabled
from archon.parallel.constraints import check_config, context_parallel_kind, violation
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.layout import ModelSizes, ParallelLayout, nearest_layouts, parse_layout
from archon.parallel.pipeline import StagePlan, configured_stages
from archon.schema.config import ContextParallelKind, EngineConfig
from archon.schema.errors import LayoutError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedLayout:
    """A layout in which one model can be trained as one configuration says: no rule is left to check.

    `stages` are those of the pipeline, None without one; `compiled` is whether blocks are compiled on this device.
    """

    layout: ParallelLayout
    dims: ArchonParallelDims
    context_parallel: ContextParallelKind
    stages: StagePlan | None
    compiled: bool

    def __str__(self) -> str:
        return str(self.layout)


def resolve_layout(
    config: EngineConfig, sizes: ModelSizes, device_type: str = "cpu", *, attends_gathered: bool = True
) -> ResolvedLayout:
    """Returns `config.layout` for a model of `sizes`, before any process group is made.

    `attends_gathered` says whether the attention backend can attend to keys gathered from other ranks.

    Raises LayoutError with the nearest layouts that the model fits, for a string that cannot be read and sizes that a
    degree does not divide; ConfigError for options that the layout or one another excludes.
    """
    layout = parse_layout(config.layout)
    require_fit(layout, sizes, config)
    dims = layout.dims(device_type)
    kind = context_parallel_kind(config.context_parallel, layout.cp, layout.tp, sizes.heads, sizes.key_heads)
    check_config(config, dims, sizes.experts > 0, kind, attends_gathered)
    if dims.cp_enabled and config.context_parallel == "auto":
        logger.info("context parallelism over %d ranks: %s", layout.cp, kind)
    stages = configured_stages(config.pipeline, layout.pp, sizes.layers) if dims.pp_enabled else None
    return ResolvedLayout(layout, dims, kind, stages, compile_enabled(config.compile, device_type))


def require_fit(layout: ParallelLayout, sizes: ModelSizes, config: EngineConfig) -> None:
    """Raises LayoutError with the first broken rule and the nearest layouts of as many ranks that break none."""

    def broken(other: ParallelLayout) -> str | None:
        return violation(other, sizes, config.pipeline, config.context_parallel)

    rule = broken(layout)
    if rule is None:
        return
    near = nearest_layouts(layout, layout.world_size, fits=lambda other: broken(other) is None)
    raise LayoutError(
        f"layout {layout}: {rule}; nearest layouts that this model fits: {', '.join(map(str, near)) or 'none'}"
    )
