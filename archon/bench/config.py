"""What a sweep measures: layouts × shapes × micro-batches × recomputation × compilation × dtypes, as points."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from archon.bench.shapes import Shape, even_shape, parse_shape
from archon.schema.config import MAX_SECONDS, ActivationCheckpointConfig, ComputeDtype, EngineConfig, StrictModel
from archon.schema.errors import ConfigError, UserError

Recompute = Annotated[str, AfterValidator(lambda name: ActivationCheckpointConfig.named(name).name)]
"""A recompute policy by its name, as `archon plan` prints it."""
# Of an engine's fields, those that a point or the sweep itself sets.
SET_HERE = frozenset(
    {"path", "layout", "dtype", "max_tokens_per_mb", "compile", "activation_checkpoint", "timeout_s", "device"}
    | {"init_from_scratch", "is_critic", "optimizer", "stall_s"}
)


class Point(StrictModel):
    """One measurement."""

    layout: str
    shape: Shape
    micro_batch: int = Field(ge=1, description="most tokens of a micro-batch")
    recompute: Recompute
    compile: bool
    dtype: ComputeDtype

    @property
    def same_loss(self) -> tuple[str, str]:
        """Points that share this compute the same loss, but for rounding."""
        return str(self.shape.lengths), self.dtype

    @property
    def refusal(self) -> str:
        """Why nothing can be measured; nothing where something can."""
        if max(self.shape.lengths) <= self.micro_batch:
            return ""
        return (
            f"documents of {max(self.shape.lengths)} tokens ({self.shape.name}) do not fit micro-batches of "
            f"{self.micro_batch}; raise --micro-batch"
        )

    @property
    def name(self) -> str:
        """On one line: what tells it from the others of a sweep."""
        rest = [self.shape.name, f"mb {self.micro_batch}", self.dtype]
        rest += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        rest += ["compiled"] if self.compile else []
        return " ".join([self.layout, *rest])


class SweepConfig(StrictModel):
    """A model and what is varied of it. The first layout is the one that the losses of the others are compared with."""

    model: str = Field(description="Hugging Face checkpoint folder, or a config.json")
    layouts: list[str] = Field(["d1"], min_length=1, description="parallel layouts")
    tokens: int = Field(8192, ge=2, description="tokens of a step, over all ranks, of documents that --seq makes")
    seq: list[int] = Field(default_factory=list, description="tokens of each document, one shape each")
    lengths: list[str] = Field(
        default_factory=list, description="ragged shapes: lengths (`700,90,13`), or uniform:LONGEST, lognormal:LONGEST"
    )
    micro_batch: list[int] = Field([16384], min_length=1, description="most tokens of a micro-batch")
    recompute: list[Recompute] = Field(["none"], min_length=1, description="recompute policies")
    compile: list[bool] = Field([False], min_length=1, description="torch.compile each block")
    dtype: list[ComputeDtype] = Field(["float32"], min_length=1, description="compute dtype")
    steps: int = Field(5, ge=1, description="timed steps")
    warmup: int = Field(2, ge=2, description="steps before them; the first two are checked")
    device: str = Field("auto", description="auto | cpu | cuda")
    threads: int | None = Field(None, ge=1, description="threads of a process; null shares out the cores")
    peak_tflops: float | None = Field(None, gt=0, description="TFLOP/s of a device, for MFU")
    time_limit_s: float = Field(600.0, gt=0, le=MAX_SECONDS, description="seconds a point may take")
    fresh: bool = Field(False, description="random weights although there are others")
    engine: dict[str, Any] = Field(default_factory=dict, description="further fields of EngineConfig")

    @model_validator(mode="after")
    def _engine_fields_are_free(self) -> SweepConfig:
        for name in self.engine:
            if name in SET_HERE:
                raise ValueError(f"engine.{name} is set by the sweep itself; leave it out")
        return self

    @property
    def folder(self) -> Path:
        """Of the model."""
        path = Path(self.model)
        return path.parent if path.name == "config.json" else path

    @property
    def random_weights(self) -> bool:
        """Whether weights are made rather than read."""
        return self.fresh or not any(self.folder.glob("*.safetensors"))

    def shapes(self) -> list[Shape]:
        """One for each document length and each ragged shape."""
        if not self.seq and not self.lengths:
            raise ConfigError("give document lengths: --seq 1024, or --lengths 700,90,13 or lognormal:1024")
        return [even_shape(length, self.tokens) for length in self.seq] + [
            parse_shape(text, self.tokens) for text in self.lengths
        ]

    def points(self) -> list[Point]:
        """All of them, those that must agree one after the other; what none of them could honour is refused."""
        from archon.parallel.layout import parse_layout

        layouts = [str(parse_layout(layout)) for layout in self.layouts]
        points = list(self._points(layouts))
        reasons = [self.refusal(point) for point in points]
        if all(reasons):
            raise ConfigError(reasons[0])
        return points

    def refusal(self, point: Point) -> str:
        """Why a point cannot be measured, as far as that is seen without starting it; nothing where it can."""
        from archon.engine.build import resolve_device

        try:
            resolve_device(self.engine_config(point).device)
        except UserError as error:
            return str(error)
        return point.refusal

    def _points(self, layouts: list[str]) -> Iterator[Point]:
        varied = product(self.shapes(), self.dtype, self.micro_batch, self.recompute, self.compile, layouts)
        for shape, dtype, micro_batch, recompute, compiled, layout in varied:
            yield Point(
                layout=layout,
                shape=shape,
                micro_batch=micro_batch,
                recompute=recompute,
                compile=compiled,
                dtype=dtype,
            )

    def engine_config(self, point: Point) -> EngineConfig:
        """What a rank of `point` builds. Common beginnings are not shared: what a layout computes must not depend on
        them."""
        given = {
            "path": str(self.folder),
            "layout": point.layout,
            "device": self.device,
            "dtype": point.dtype,
            "max_tokens_per_mb": point.micro_batch,
            "compile": point.compile,
            "activation_checkpoint": ActivationCheckpointConfig.named(point.recompute).model_dump(),
            "timeout_s": self.time_limit_s,
            "init_from_scratch": self.random_weights,
            "share_prefixes": False,
        }
        return EngineConfig.parse(given | self.engine, source="bench")
