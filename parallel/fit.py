"""Whether a model fits a layout: what each degree must divide. Needs no weights and no process group."""

from __future__ import annotations

from dataclasses import dataclass, field

from archon.parallel.context import ulysses_repeat
from archon.parallel.layout import ModelSizes, ParallelLayout, nearest_layouts
from archon.parallel.pipeline import configured_stages
from archon.schema.config import PipelineConfig
from archon.schema.errors import LayoutError


@dataclass(frozen=True)
class Fit:
    """A model and the options that decide what a layout asks of it."""

    sizes: ModelSizes
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context_parallel: str = "auto"

    def check(self, layout: ParallelLayout) -> None:
        """Raises LayoutError with the first broken rule and the nearest layouts of as many ranks that break none."""
        rule = self.broken_rule(layout)
        if rule is None:
            return
        near = nearest_layouts(layout, layout.world_size, fits=lambda other: self.broken_rule(other) is None)
        raise LayoutError(
            f"layout {layout}: {rule}; nearest layouts that this model fits: {', '.join(map(str, near)) or 'none'}"
        )

    def broken_rule(self, layout: ParallelLayout) -> str | None:
        """What the model cannot do, or None. Where `tp` exceeds the key heads, neighbours share one."""
        sizes, tp = self.sizes, layout.tp
        if sizes.heads % tp:
            return f"tp = {tp} does not divide the {sizes.heads} attention heads"
        if sizes.key_heads % tp and tp % sizes.key_heads:
            return f"tp = {tp} neither divides the {sizes.key_heads} key heads nor is a multiple of them"
        if sizes.vocab % tp:
            return f"tp = {tp} does not divide the vocabulary of {sizes.vocab}"
        for hidden in sizes.hidden:
            if hidden % tp:
                return f"tp = {tp} does not divide the {hidden} hidden features of a feed-forward network"
        return self._experts(layout) or self._heads_over_ranks(layout) or self._stages(layout)

    def _experts(self, layout: ParallelLayout) -> str | None:
        ep, etp, sizes = layout.ep, layout.etp, self.sizes
        if not sizes.experts:
            return f"ep = {ep} and etp = {etp} lay out experts, and the model has none" if ep * etp > 1 else None
        if sizes.experts % ep:
            return f"ep = {ep} does not divide the {sizes.experts} experts"
        if sizes.expert_hidden % etp:
            return f"etp = {etp} does not divide the {sizes.expert_hidden} hidden features of an expert"
        return None

    def _heads_over_ranks(self, layout: ParallelLayout) -> str | None:
        try:
            if layout.cp > 1 and self.context_parallel == "ulysses":
                ulysses_repeat(self.sizes.heads // layout.tp, max(1, self.sizes.key_heads // layout.tp), layout.cp)
        except LayoutError as error:
            return str(error)
        return None

    def _stages(self, layout: ParallelLayout) -> str | None:
        try:
            if layout.pp > 1:
                configured_stages(self.pipeline, layout.pp, self.sizes.layers)
        except LayoutError as error:
            return str(error)
        return None
