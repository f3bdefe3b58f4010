"""Quantized tensors made of random bits, and what they stand for by plain loops."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BLOCK = (5, 7)


def random_fp8(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any finite float8_e4m3fn values."""
    data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    data[(data & 127) == 127] = 3  # the two NaN
    return data.view(torch.float8_e4m3fn)


def random_scales(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Positive scales; powers of two as float8_e8m0fnu or as its bytes."""
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.randint(110, 135, shape, generator=generator, dtype=torch.uint8).view(dtype)
    return (torch.rand(shape, generator=generator) + 0.01).to(dtype)


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def dequantized(data: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each element times the scale of its block, float32."""
    out = data.to(torch.float32)
    factors = scales.float() if scales.dtype != torch.uint8 else 2.0 ** (scales.float() - 127)
    for row in range(data.shape[-2]):
        for column in range(data.shape[-1]):
            out[..., row, column] *= factors[..., row // block[0], column // block[1]]
    return out


def quantize(
    state: dict[str, Tensor], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint with random fp8 in place of every matrix of a layer, and the one it stands for."""
    generator = torch.Generator().manual_seed(seed)
    quantized, expected = dict(state), dict(state)
    for key, tensor in state.items():
        if ".layers." in key and tensor.dim() > 1:
            data = random_fp8(tuple(tensor.shape), generator)
            scales = random_scales(blocks_of(tuple(tensor.shape), BLOCK), dtype, generator)
            quantized |= {key: data, f"{key}_scale_inv": scales}
            expected[key] = dequantized(data, scales, BLOCK)
    return quantized, expected


def packed(
    state: dict[str, Tensor], exponents: tuple[int, int] = (100, 140)
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint with random 4-bit floats in place of the experts, and what transformers makes of it.

    `exponents`: of the blocks, the first and the one after the last; 127 stands for a factor of 1.
    """
    generator = torch.Generator().manual_seed(2)
    quantized, expected = dict(state), dict(state)
    for key, tensor in state.items():
        if ".experts." in key and not key.endswith("_bias"):
            experts, width, rows = tensor.shape
            shape = (experts, rows, width // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(*exponents, shape, generator=generator, dtype=torch.uint8)
            del quantized[key]
            quantized |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            expected[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return quantized, expected


def rounded_to_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in float8_e4m3fn, and the scale of each block, whose largest value becomes 448."""
    rows, columns = blocks_of(tuple(weight.shape), block)
    data, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])
            scales[row, column] = weight[part].abs().max() / 448
            data[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
    return data, scales
