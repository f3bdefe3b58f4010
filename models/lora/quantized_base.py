"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): a frozen base whose linear layers are stored in 4 or 8 bits.

`nf4` is the algorithm of the paper and of bitsandbytes with double quantization. A block of 64 weights has one scale,
the largest magnitude in it, and each weight is one of 16 values. The scales, less their mean, are 8-bit themselves:
256 of them have one float32 scale, and each is one of the 256 values of the dynamic map (Dettmers 2016,
arXiv:1511.04561). That is 4.127 bits per weight.

`fp8` stores float8_e4m3fn and one float32 scale per 128 x 128 block, as the checkpoints of DeepSeek-V3 do.

Matmuls run in the compute dtype. A layer dequantizes its matrix before the forward matmul and again before the
backward one; only the stored form stays in memory. Shards hold whole rows, or whole blocks of columns, and the small
float32 scales are whole on every rank. Every layout therefore dequantizes to the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from archon.models.layers.matmul import matmul_nt, mm
from archon.parallel.comm import local
from archon.parallel.fsdp import local_region, local_tensor
from archon.parallel.tensor import shard_parameter
from archon.schema.errors import ConfigError, LayoutError

BaseFormat = Literal["nf4", "fp8"]
QUANTIZED_ROLES = ("column", "row", "latent")
"""Roles of the linear layers that are stored quantized: not embedding, heads, routers, experts or vision encoders."""

# The quantiles of a normal distribution, from bitsandbytes (appendix E of the paper).
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
NF4_BLOCK = 64
"""Consecutive weights of a row with one scale."""
SCALE_BLOCK = 256
"""Consecutive NF4 scales with one float32 scale."""
FP8_BLOCK = 128
"""Rows and columns of weights with one FP8 scale."""
CHUNK = 1 << 22
"""Weights that are quantized or dequantized at a time, which bounds float32 and index temporaries."""
_SMALLEST = torch.finfo(torch.float32).tiny
"""Divisor of blocks that are all zero."""


def dynamic_map() -> Tensor:
    """Return the 256 values, float32 and ascending, of bitsandbytes' signed 8-bit dynamic map.

    7 powers of ten, 1e-6 to 1, have 2**i values of either sign, in the middle of equal intervals from 0.1 to 1; 0 and 1
    are added.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values))


@dataclass(frozen=True)
class StoredMatrix:
    """Format of a stored matrix, and the place of this rank's rows and columns in it."""

    format: BaseFormat
    columns: int
    first_row: int = 0
    first_column: int = 0

    def dequantize(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the rows [n, columns] of `QuantizedWeight.parts` in `dtype`, rounded once from float32."""
        codes, scales, *tables = parts
        columns = codes.shape[1] * (2 if self.format == "nf4" else 1)
        # Compiled code fuses the operations, so it needs no chunks.
        step = max(1, codes.shape[0] if torch.compiler.is_compiling() else CHUNK // max(1, columns))
        decode = self._nf4_rows if self.format == "nf4" else self._fp8_rows
        if codes.shape[0] <= step:
            return decode(codes, scales, tables, self.first_row).to(dtype)
        out = codes.new_empty((codes.shape[0], columns), dtype=dtype)
        for start in range(0, codes.shape[0], step):
            rows = slice(start, start + step)
            row_scales = scales[rows] if self.format == "nf4" else scales
            out[rows] = decode(codes[rows], row_scales, tables, self.first_row + start)
        return out

    def _nf4_rows(self, codes: Tensor, scales: Tensor, tables: list[Tensor], first_row: int) -> Tensor:
        byte_values, scale_values, outer_scales, offset = tables
        rows = torch.arange(first_row, first_row + codes.shape[0], device=codes.device)
        blocks = torch.arange(scales.shape[1], device=codes.device) + self.first_column // NF4_BLOCK
        outer = (rows.unsqueeze(1) * (self.columns // NF4_BLOCK) + blocks) // SCALE_BLOCK
        absmax = F.embedding(scales.int(), scale_values).squeeze(-1) * outer_scales[outer] + offset
        values = F.embedding(codes.int(), byte_values).view(*scales.shape, NF4_BLOCK)
        return (values * absmax.unsqueeze(-1)).flatten(1)

    def _fp8_rows(self, codes: Tensor, scales: Tensor, tables: list[Tensor], first_row: int) -> Tensor:
        rows = torch.arange(first_row, first_row + codes.shape[0], device=codes.device) // FP8_BLOCK
        columns = torch.arange(self.first_column, self.first_column + codes.shape[1], device=codes.device) // FP8_BLOCK
        return codes.view(torch.float8_e4m3fn).float() * scales.index_select(0, rows).index_select(1, columns)


class _FrozenLinear(torch.autograd.Function):
    """A linear layer that saves the stored form of its weight for the backward pass, and dequantizes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, stored: StoredMatrix, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.stored = stored
        return matmul_nt(x, stored.dequantize(parts, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_bias, *frozen = ctx.needs_input_grad
        x_grad = mm(grad, ctx.stored.dequantize(ctx.saved_tensors, grad.dtype)) if needs_x else None
        return (x_grad, grad.sum(0) if needs_bias else None, *(None for _ in frozen))


class QuantizedWeight(nn.Module):
    """Frozen matrix [out, in], stored quantized.

    Attributes:
        shape: shape of the whole matrix.
        codes: uint8 [out, in / 2] with two NF4 values per byte, the first in the high half; FP8: uint8 [out, in].
        scales: NF4: uint8 [out, in / 64], the scale of each block; FP8: None.
        outer_scales: NF4: float32, one for `SCALE_BLOCK` scales; FP8: float32, one per block.
        offset: NF4: float32 [], the mean of the scales.
    """

    casts_parameters: ClassVar[bool] = True
    byte_values: Tensor
    scale_values: Tensor
    outer_scales: Tensor
    offset: Tensor

    def __init__(self, rows: int, columns: int, format: BaseFormat) -> None:
        super().__init__()
        self.shape = (rows, columns)
        self.stored = StoredMatrix(format, columns)
        self.scales: nn.Parameter | None = None
        if format == "nf4":
            self.codes = _bytes_parameter(rows, columns // 2)
            self.scales = _bytes_parameter(rows, columns // NF4_BLOCK)
            # Persistent, and filled by `quantize_`, like the other buffers.
            self.register_buffer("byte_values", torch.empty(256, 2))
            self.register_buffer("scale_values", torch.empty(256, 1))
            self.register_buffer("outer_scales", torch.empty(-(-rows * (columns // NF4_BLOCK) // SCALE_BLOCK)))
            self.register_buffer("offset", torch.empty(()))
        else:
            self.codes = _bytes_parameter(rows, columns)
            self.register_buffer("outer_scales", torch.empty(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))

    def shard(self, mesh: DeviceMesh, placement: Placement, name: str) -> None:
        """Shard rows or columns over the tensor-parallel `mesh`.

        Raises:
            LayoutError: a rank's columns end inside a block of NF4.
        """
        columns = self.shape[1]
        if self.stored.format == "nf4" and placement.is_shard(1) and columns % (mesh.size() * NF4_BLOCK):
            raise LayoutError(
                f"tp = {mesh.size()} splits the {columns} input features of {name} inside a block of {NF4_BLOCK}, "
                "which lora.quantize_base = nf4 stores with one scale; use a smaller t, or quantize_base = fp8"
            )
        shard_parameter(self, "codes", mesh, (placement,))
        if self.scales is not None:
            shard_parameter(self, "scales", mesh, (placement,))
        first_row, first_column = (
            size // mesh.size() * mesh.get_local_rank() if placement.is_shard(dim) else 0
            for dim, size in enumerate(self.shape)
        )
        self.stored = replace(self.stored, first_row=first_row, first_column=first_column)

    def linear(self, x: Tensor, bias: Tensor | None, rows: slice | None = None) -> Tensor:
        """Return x [T, in] W^T + bias: [T, out], with this rank's part of W; `rows` selects rows of it."""
        codes, scales = local(self.codes), local(self.scales)
        stored = self.stored
        if rows is not None:
            codes, scales = codes[rows], None if scales is None else scales[rows]
            stored = replace(stored, first_row=stored.first_row + rows.start)
        return _FrozenLinear.apply(x, bias, stored, *self._parts(codes, scales))

    def _parts(self, codes: Tensor, scales: Tensor | None) -> tuple[Tensor, ...]:
        if scales is None:
            return codes, self.outer_scales
        return codes, scales, self.byte_values, self.scale_values, self.outer_scales, self.offset

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's shard of the matrix in `dtype`, a DTensor if the matrix is sharded."""
        codes, scales = self.codes.detach(), None if self.scales is None else local_tensor(self.scales.detach())
        rows, stored_columns = local_region(codes)
        first_column = stored_columns.start * (2 if self.stored.format == "nf4" else 1)
        stored = replace(self.stored, first_row=rows.start, first_column=first_column)
        parts = self._parts(local_tensor(codes), scales)
        weight = stored.dequantize(tuple(part.to(codes.device) for part in parts), dtype)
        if not isinstance(codes, DTensor):
            return weight
        columns = self.shape[1]
        return DTensor.from_local(
            weight,
            codes.device_mesh,
            codes.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=(columns, 1),
        )

    @torch.no_grad()
    def quantize_(self, weight: Tensor, name: str) -> None:
        """Store this rank's shard of the whole matrix `weight` [out, in].

        Raises:
            ConfigError: the matrix is not finite.
        """
        codes = self.codes.detach()
        weight = weight.to(local_tensor(codes).device)
        if self.stored.format == "nf4":
            assert self.scales is not None
            packed, scales, outer_scales, offset = quantize_nf4(weight)
            local_tensor(self.scales.detach()).copy_(scales[local_region(self.scales)])
            values = torch.tensor(NF4_VALUES)
            self.byte_values.copy_(torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=1))
            self.scale_values.copy_(dynamic_map().unsqueeze(1))
            self.offset.copy_(offset)
        else:
            packed, outer_scales = quantize_fp8(weight)
        if not bool(outer_scales.isfinite().all()):
            raise ConfigError(f"{name} has values that are not finite, and cannot be quantized; check the checkpoint")
        local_tensor(codes).copy_(packed[local_region(codes)])
        self.outer_scales.copy_(outer_scales)

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return f"{self.shape}, {self.stored.format}"


def _bytes_parameter(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns, dtype=torch.uint8), requires_grad=False)


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales, outer scales and offset of a matrix [out, in], see `QuantizedWeight`."""
    rows, columns = weight.shape
    values = torch.tensor(NF4_VALUES, device=weight.device)
    bounds = (values[1:] + values[:-1]) / 2
    packed = weight.new_empty((rows, columns // 2), dtype=torch.uint8)
    absmax = weight.new_empty((rows, columns // NF4_BLOCK), dtype=torch.float32)
    # 1. Weights: the nearest of the 16 values times the largest magnitude of the block.
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        blocks = weight[part].float().unflatten(1, (-1, NF4_BLOCK))
        absmax[part] = blocks.abs().amax(-1)
        codes = torch.bucketize(blocks / absmax[part].clamp(min=_SMALLEST).unsqueeze(-1), bounds, out_int32=True)
        codes = codes.to(torch.uint8).flatten(1)
        packed[part] = codes[:, ::2] << 4 | codes[:, 1::2]
    # 2. Scales: the nearest of the 256 values times the largest magnitude of 256 scales, less the mean of all.
    offset = absmax.mean(dtype=torch.float64).float()
    centered = (absmax - offset).flatten()
    centered = F.pad(centered, (0, -centered.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    outer_scales = centered.abs().amax(1)
    table = dynamic_map().to(weight.device)
    scaled = centered / outer_scales.clamp(min=_SMALLEST).unsqueeze(1)
    scales = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)
    return packed, scales.flatten()[: absmax.numel()].view_as(absmax).to(torch.uint8), outer_scales, offset


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix [out, in], see `QuantizedWeight`."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    values = (blocks / scales.clamp(min=_SMALLEST)[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(torch.uint8).reshape_as(padded)[:rows, :columns], scales


def stored_bytes(elements: int, format: BaseFormat) -> int:
    """Return the bytes of the sharded part of `elements` weights: codes, and scales of NF4."""
    return elements // 2 + elements // NF4_BLOCK if format == "nf4" else elements


def table_bytes(shape: tuple[int, ...], format: BaseFormat) -> int:
    """Return the bytes of the buffers of a matrix, which every rank has whole."""
    with torch.device("meta"):
        return sum(buffer.nbytes for buffer in QuantizedWeight(shape[0], shape[1], format).buffers())


def is_quantizable(module: nn.Module, format: BaseFormat) -> bool:
    """Return whether a module of a LoRA model is a frozen linear layer that `quantize_base` replaces."""
    if getattr(module, "role", None) not in QUANTIZED_ROLES or not hasattr(module, "quantized"):
        return False
    weight: Tensor | None = module.weight  # type: ignore[assignment]
    if weight is None or weight.requires_grad or not module.quantizable:
        return False
    return format == "fp8" or weight.shape[1] % NF4_BLOCK == 0


def quantize_base(layers: nn.Module, format: BaseFormat) -> None:
    """Replace the weights of the frozen linear layers of blocks on the meta device by `QuantizedWeight`."""
    for module in layers.modules():
        if is_quantizable(module, format):
            rows, columns = module.weight.shape  # type: ignore[misc]
            module.register_parameter("weight", None)
            with torch.device("meta"):
                module.quantized = QuantizedWeight(rows, columns, format)


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the quantized matrices of a model or of pipeline stages, by the native name of the matrix."""
    stages: Collection[nn.Module] = getattr(model, "stages", (model,))
    return {
        f"{name.removesuffix('.quantized')}.weight": module
        for stage in stages
        for name, module in stage.named_modules()
        if isinstance(module, QuantizedWeight)
    }


def is_quantized(name: str) -> bool:
    """Return whether a parameter of this name is a part of a quantized matrix."""
    return ".quantized." in name


class BaseWeights(Mapping[str, Tensor]):
    """This rank's shards of a model's weights without LoRAs, by native name.

    Quantized ones are dequantized on access.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._quantized, self._dtype = quantized_weights(model), dtype
        self._parameters = dict[str, Tensor | None]()
        for name, parameter in model.named_parameters():
            if is_quantized(name):
                self._parameters[f"{name.rpartition('.quantized.')[0]}.weight"] = None
            elif ".lora." not in name:
                self._parameters[name] = parameter

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        return self._quantized[name].dequantized(self._dtype) if parameter is None else parameter

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
