"""Points of a sweep: layouts × shapes × micro-batches × recomputation × compilation × dtypes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from archon.checkpoint.hub import model_folder
from archon.schema.capacity import rank_limit_error
from archon.schema.config import (
    EXPANDED,
    MAX_SECONDS,
    ActivationCheckpointConfig,
    ComputeDtype,
    EngineConfig,
    StrictModel,
)
from archon.schema.errors import ConfigError, UserError
from archon.tools.bench.shapes import Shape, even_shape, parse_shape

Recompute = Annotated[str, AfterValidator(lambda name: ActivationCheckpointConfig.from_name(name).name)]
"""Name of a recompute policy, as printed by `archon plan`."""
# Fields of EngineConfig that a point or the sweep sets.
SWEEP_FIELDS = frozenset(
    {"path", "layout", "dtype", "max_tokens_per_mb", "compile", "activation_checkpoint", "timeout_s", "device"}
    | {"init_from_scratch", "is_critic", "optimizer", "stall_s"}
)


class Point(StrictModel):
    """Configuration to measure."""

    layout: str
    shape: Shape
    micro_batch: int = Field(ge=1, description="maximum tokens of a micro-batch")
    recompute: Recompute
    compile: bool
    dtype: ComputeDtype

    @property
    def loss_key(self) -> tuple[str, str]:
        """Documents and dtype; points with equal keys compute the same loss, up to rounding."""
        return str(self.shape.lengths), self.dtype

    @property
    def name(self) -> str:
        """Unique name within the sweep."""
        recompute = "" if self.recompute == "none" else f" recompute {self.recompute}"
        compiled = " compiled" if self.compile else ""
        return f"{self.layout} {self.shape.name} mb {self.micro_batch} {self.dtype}{recompute}{compiled}"


class SweepConfig(StrictModel):
    """Model and options to vary; the losses of all layouts are compared with the first layout."""

    model: Annotated[str, EXPANDED] = Field(description="Hugging Face checkpoint folder, or a config.json")
    layouts: list[str] = Field(["d1"], min_length=1, description="parallel layouts")
    tokens: int = Field(8192, ge=2, description="tokens of a step over all ranks, in documents of --seq tokens")
    seq: list[int] = Field(default_factory=list, description="tokens of each document, one shape each")
    lengths: list[str] = Field(
        default_factory=list, description="ragged shapes: lengths (`700,90,13`), or uniform:LONGEST, lognormal:LONGEST"
    )
    micro_batch: list[int] = Field([16384], min_length=1, description="maximum tokens of a micro-batch")
    recompute: list[Recompute] = Field(["none"], min_length=1, description="recompute policies")
    compile: list[bool] = Field([False], min_length=1, description="torch.compile each block")
    dtype: list[ComputeDtype] = Field(["float32"], min_length=1, description="compute dtype")
    steps: int = Field(5, ge=1, description="timed steps")
    warmup: int = Field(2, ge=2, description="steps before the timed steps; the losses of the first two are checked")
    device: str = Field("auto", description="auto | cpu | cuda")
    threads: int | None = Field(None, ge=1, description="threads of a process; null divides the cores evenly")
    peak_tflops: float | None = Field(None, gt=0, description="peak TFLOP/s of a device, for MFU")
    time_limit_s: float = Field(600.0, gt=0, le=MAX_SECONDS, description="maximum seconds of a point")
    fresh: bool = Field(False, description="use random weights even if the checkpoint has weights")
    engine: dict[str, Any] = Field(default_factory=dict, description="additional fields of EngineConfig")

    @model_validator(mode="after")
    def _check_engine(self) -> SweepConfig:
        for name in self.engine:
            if name in SWEEP_FIELDS:
                raise ValueError(f"engine.{name} is set by the sweep; leave it out")
        lora = self.engine.get("lora")
        if isinstance(lora, dict) and lora.get("loras") is not None:
            raise ValueError(
                "engine.lora.loras has several LoRAs, but a sweep's documents select none; use a single LoRA"
            )
        return self

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        path = model_folder(self.model)
        return path.parent if path.name == "config.json" else path

    @property
    def random_weights(self) -> bool:
        """Whether weights are initialized randomly instead of loaded."""
        return self.fresh or not any(self.folder.glob("*.safetensors"))

    def shapes(self) -> list[Shape]:
        """Return a shape for each document length and each entry of `lengths`."""
        if not self.seq and not self.lengths:
            raise ConfigError("no document lengths; set --seq 1024, or --lengths 700,90,13 or lognormal:1024")
        even = [even_shape(length, self.tokens) for length in self.seq]
        return even + [parse_shape(text, self.tokens) for text in self.lengths]

    def points(self) -> list[Point]:
        """Return all points; points with equal losses are consecutive.

        Raises:
            LayoutError: a layout is malformed.
            ConfigError: no point can be measured.
        """
        from archon.parallel.layout import parse_layout

        options: dict[str, list[Any]] = {
            "shape": self.shapes(),
            "dtype": self.dtype,
            "micro_batch": self.micro_batch,
            "recompute": self.recompute,
            "compile": self.compile,
            "layout": [str(parse_layout(layout)) for layout in self.layouts],
        }
        points = [Point(**dict(zip(options, values, strict=True))) for values in product(*options.values())]
        errors = [self.error(point) for point in points]
        if all(errors):
            raise ConfigError(errors[0])
        return points

    def error(self, point: Point) -> str:
        """Return the reason that a point cannot be measured, or an empty string if none is known in advance."""
        import torch

        from archon.engine.build import resolve_device
        from archon.parallel.layout import parse_layout

        ranks = parse_layout(point.layout).world_size
        if reason := rank_limit_error(ranks):
            return f"layout {point.layout}: {reason}"
        try:
            device = resolve_device(self.engine_config(point).device)
        except UserError as error:
            return str(error)
        if device.type == "cuda" and ranks > (gpus := torch.cuda.device_count()):
            return f"layout {point.layout} needs {ranks} GPUs, one a rank, and this machine has {gpus}"
        longest = max(point.shape.lengths)
        if longest <= point.micro_batch:
            return ""
        return (
            f"documents of {longest} tokens ({point.shape.name}) do not fit micro-batches of {point.micro_batch}; "
            "raise --micro-batch"
        )

    def engine_config(self, point: Point) -> EngineConfig:
        """Return the engine config of a point, without shared prefixes so that all layouts do equal work."""
        fields = {
            "path": str(self.folder),
            "layout": point.layout,
            "device": self.device,
            "dtype": point.dtype,
            "max_tokens_per_mb": point.micro_batch,
            "compile": point.compile,
            "activation_checkpoint": ActivationCheckpointConfig.from_name(point.recompute).model_dump(),
            "timeout_s": self.time_limit_s,
            "init_from_scratch": self.random_weights,
            "share_prefixes": False,
        }
        return EngineConfig.parse(fields | self.engine, source="bench")
