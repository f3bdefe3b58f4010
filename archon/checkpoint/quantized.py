"""Quantized tensors of a checkpoint, dequantized row by row while they are read."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from archon.checkpoint.safetensors_file import LazyTensor, Region, SafetensorsFile, TensorEntry, fail, tensor_bytes
from archon.checkpoint.tensor_reader import RowDecoder, lazy_tensor, read_region
from archon.models.hf.quantization import WHOLE, Quantization

SCALE_SUFFIX = "_scale_inv"
ACTIVATION_SUFFIX = ".activation_scale"
"""Keys of static scales of a quantized weight's inputs, next to it; archon computes with the weights alone."""
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
PACKED_SUFFIX, PACKED_SCALE_SUFFIX, PACKED_SHAPE_SUFFIX = "_packed", "_scale", "_shape"
_SUFFIXES = {
    "fp8": (SCALE_SUFFIX,),
    "mxfp4": (BLOCKS_SUFFIX, SCALES_SUFFIX),
    "compressed-tensors": (PACKED_SUFFIX, PACKED_SCALE_SUFFIX, PACKED_SHAPE_SUFFIX),
}
PACK_FACTOR = 8
"""Number of 4-bit integers in an int32."""
_FP8_SCALE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8})
MX_BLOCK = 32
"""Number of MXFP4 weights per scale."""
ReadScales = Callable[[int, int], Tensor]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class StoredTensor:
    """Stored form of a checkpoint tensor.

    Attributes:
        file: the file that holds the data.
        entry: header entry of the data; name, dtype and shape may differ from the dequantized tensor.
        shape: shape in elements, in storage order.
        decoder: dequantizes rows; None for a tensor that is not quantized.
        is_native: the data has the parameters' orientation, [..., out, in], whatever the family's map declares.
    """

    file: SafetensorsFile
    entry: TensorEntry
    shape: tuple[int, ...]
    decoder: RowDecoder | None = None
    is_native: bool = False

    def lazy(self, dtype: torch.dtype, *, transposed: bool) -> LazyTensor:
        """Return the tensor in its map's orientation; quantized data in `dtype`, other data unchanged.

        Args:
            dtype: dtype of dequantized data.
            transposed: whether the map declares the last two dimensions in reverse.
        """
        if self.decoder is None:
            return lazy_tensor(self.file, self.entry)
        swap = transposed and self.is_native
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if swap else self.shape

        def load(region: Region) -> Tensor:
            out = torch.empty([part.stop - part.start for part in region], dtype=dtype)
            if swap:
                region = (*region[:-2], region[-1], region[-2])
            read_region(self.file, self.entry, region, out.mT if swap else out, self.shape, self.decoder)
            return out

        # Rows of a swapped matrix are stored columns: reading one reads all of them.
        return LazyTensor(dtype, shape, load, by_rows=not swap or len(shape) > 2)


def weight_key(key: str, quantization: Quantization | None) -> str:
    """Return the key of the weight for the key of its scales or its quantized data."""
    suffixes = () if quantization is None else _SUFFIXES[quantization.method]
    return next((key.removesuffix(suffix) for suffix in suffixes if key.endswith(suffix)), key)


def stored_tensors(
    entries: Mapping[str, TensorEntry],
    files: Mapping[str, SafetensorsFile],
    quantization: Quantization | None,
    expected: Container[str],
) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by key; quantized ones by the key of their weight in `expected`.

    Raises:
        CheckpointError: a quantized tensor has no scale, a scale has no tensor, or a dtype or shape contradicts the
            config.
    """
    stored: dict[str, StoredTensor] = {}
    quantized: dict[str, None] = {}
    for key, entry in entries.items():
        base = weight_key(key, quantization)
        if key.endswith(ACTIVATION_SUFFIX) and key.replace(ACTIVATION_SUFFIX, f".weight{SCALE_SUFFIX}") in entries:
            continue
        if base in expected and (base != key or (quantization is not None and entry.dtype == torch.float8_e4m3fn)):
            quantized[base] = None
        else:
            stored[key] = StoredTensor(files[key], entry, entry.shape)
    for key in quantized:
        assert quantization is not None
        if quantization.method == "fp8":
            stored[key] = _fp8(key, entries, files, quantization.block)
        elif quantization.method == "mxfp4":
            stored[key] = _mxfp4(key, entries, files)
        else:
            stored[key] = _int4(key, entries, files, quantization.block[1])
        if quantization.is_unquantized(key):
            fail(stored[key].file.path, f"key {key!r} is quantized, but quantization_config says that it is not")
    return stored


def _fp8(
    key: str, entries: Mapping[str, TensorEntry], files: Mapping[str, SafetensorsFile], block: tuple[int, int]
) -> StoredTensor:
    data, scale = _parts(key, key, key + SCALE_SUFFIX, entries, files)
    if data.dtype != torch.float8_e4m3fn:
        fail(files[key].path, f"key {key!r} is {data.dtype} and has the scale {scale.name!r}; expected float8_e4m3fn")
    if len(data.shape) < 2:
        fail(files[key].path, f"key {key!r} is quantized and of shape {list(data.shape)}; expected a matrix or a stack")
    expected = (*data.shape[:-2], *(-(-size // step) for size, step in zip(data.shape[-2:], block, strict=True)))
    if block == WHOLE and len(data.shape) == 2 and scale.shape in ((), (1,)):
        expected = scale.shape
    _check_scale(files[scale.name], scale, expected, _FP8_SCALE_DTYPES)
    read_scales = partial(_read_scales, files[scale.name], scale)
    decoder = _fp8_decoder(read_scales, data.shape[-2], data.shape[-1], block)
    return StoredTensor(files[key], data, data.shape, decoder)


def _mxfp4(key: str, entries: Mapping[str, TensorEntry], files: Mapping[str, SafetensorsFile]) -> StoredTensor:
    data, scale = _parts(key, key + BLOCKS_SUFFIX, key + SCALES_SUFFIX, entries, files)
    file = files[data.name]
    if key in entries:
        fail(file.path, f"it holds {data.name!r}, and {key!r} is in {files[key].path.name}; expected one of them")
    if data.dtype != torch.uint8 or len(data.shape) < 3 or data.shape[-1] != MX_BLOCK // 2:
        actual = f"{data.dtype} of shape {list(data.shape)}"
        fail(file.path, f"key {data.name!r} is {actual}; expected uint8 [..., out, in / {MX_BLOCK}, {MX_BLOCK // 2}]")
    _check_scale(files[scale.name], scale, data.shape[:-1], frozenset({torch.uint8, torch.float8_e8m0fnu}))
    shape = (*data.shape[:-2], data.shape[-2] * MX_BLOCK)
    decoder = _mxfp4_decoder(partial(_read_scales, files[scale.name], scale), shape[-1])
    return StoredTensor(file, data, shape, decoder, is_native=True)


def _int4(
    key: str, entries: Mapping[str, TensorEntry], files: Mapping[str, SafetensorsFile], group: int
) -> StoredTensor:
    data, scale = _parts(key, key + PACKED_SUFFIX, key + PACKED_SCALE_SUFFIX, entries, files)
    _, size = _parts(key, key + PACKED_SUFFIX, key + PACKED_SHAPE_SUFFIX, entries, files)
    file = files[data.name]
    if key in entries:
        fail(file.path, f"it holds {data.name!r}, and {key!r} is in {files[key].path.name}; expected one of them")
    if data.dtype != torch.int32 or len(data.shape) != 2:
        actual = f"{data.dtype} of shape {list(data.shape)}"
        fail(file.path, f"key {data.name!r} is {actual}; expected int32 [out, in / {PACK_FACTOR}]")
    shape = (data.shape[0], data.shape[1] * PACK_FACTOR)
    if size.dtype not in (torch.int32, torch.int64) or size.shape != (2,):
        fail(file.path, f"key {size.name!r} is {size.dtype} of shape {list(size.shape)}; expected two integers")
    sizes = torch.empty(2, dtype=size.dtype)
    files[size.name].read_into(tensor_bytes(sizes), size.start, f"key {size.name!r}")
    if tuple(sizes.tolist()) != shape or shape[1] % group:
        expected = f"expected {list(shape)}, the shape of {data.name!r}, with rows of whole groups of {group}"
        fail(file.path, f"key {size.name!r} holds {sizes.tolist()}; {expected}")
    _check_scale(
        files[scale.name],
        scale,
        (shape[0], shape[1] // group),
        frozenset({torch.float32, torch.bfloat16, torch.float16}),
    )
    read_scales = partial(_read_scales, files[scale.name], scale)
    return StoredTensor(file, data, shape, _int4_decoder(read_scales, shape[1], group))


def _parts(
    key: str, data: str, scale: str, entries: Mapping[str, TensorEntry], files: Mapping[str, SafetensorsFile]
) -> tuple[TensorEntry, TensorEntry]:
    for name, other in ((data, scale), (scale, data)):
        if name not in entries:
            fail(files[other].path, f"it holds {other!r}, but {name!r}, the other half of {key!r}, is missing")
    return entries[data], entries[scale]


def _check_scale(
    file: SafetensorsFile, scale: TensorEntry, expected: tuple[int, ...], dtypes: frozenset[torch.dtype]
) -> None:
    if scale.shape != expected:
        fail(file.path, f"key {scale.name!r} has shape {list(scale.shape)}, expected {list(expected)}: one per block")
    if scale.dtype not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        fail(file.path, f"key {scale.name!r} is {scale.dtype}; expected scales of {names}")


def _read_scales(file: SafetensorsFile, entry: TensorEntry, first: int, stop: int) -> Tensor:
    """Read rows [first, stop) of scales as float32 [stop - first, columns]; uint8 e means 2^(e - 127).

    Raises:
        CheckpointError: a scale is negative or not finite.
    """
    columns = entry.shape[-1] if entry.shape else 1  # a scalar is the scale of a whole matrix
    data = torch.empty(stop - first, columns, dtype=entry.dtype)
    offset = entry.start + first * columns * entry.dtype.itemsize
    file.read_into(tensor_bytes(data), offset, f"key {entry.name!r}")
    if data.dtype == torch.uint8:
        data = data.view(torch.float8_e8m0fnu)
    scales = data.to(torch.float32)
    if not bool(scales.isfinite().all()):
        fail(file.path, f"key {entry.name!r} holds scales that are NaN or infinite; the file is damaged")
    if bool((scales < 0).any()):
        fail(file.path, f"key {entry.name!r} holds negative scales, which would change signs; the file is damaged")
    return scales


def _fp8_decoder(read_scales: ReadScales, n_rows: int, row: int, block: tuple[int, int]) -> RowDecoder:
    """Return a decoder of FP8 matrices [n_rows, row] with one scale per block; the last block may be smaller."""
    height, width = block

    def decode(data: Tensor, first: int) -> Tensor:
        rows = torch.arange(first, first + data.shape[0])
        blocks = rows // n_rows * -(-n_rows // height) + rows % n_rows // height
        scales = read_scales(int(blocks[0]), int(blocks[-1]) + 1).index_select(0, blocks - blocks[0])
        values = data.view(torch.float8_e4m3fn).to(torch.float32)
        # The last block can be wider than the matrix.
        return values.mul_(scales.repeat_interleave(min(width, row), dim=1)[:, :row])

    return RowDecoder(row, row, decode)


def _mxfp4_decoder(read_scales: ReadScales, row: int) -> RowDecoder:
    """Return a decoder of 4-bit floats, low half of a byte first, with one scale per `MX_BLOCK`."""

    def decode(data: Tensor, first: int) -> Tensor:
        values = _fp4_byte_values()[data.to(torch.int32)].view(data.shape[0], -1, MX_BLOCK)
        scales = read_scales(first, first + data.shape[0])
        return (values * scales.unsqueeze(-1)).view(data.shape[0], row)

    return RowDecoder(row, row // 2, decode)


def _int4_decoder(read_scales: ReadScales, row: int, group: int) -> RowDecoder:
    """Return a decoder of 4-bit integers plus 8, low half of a byte first, with one scale per `group` of a row."""

    def decode(data: Tensor, first: int) -> Tensor:
        values = torch.stack((data & 15, data >> 4), dim=-1).to(torch.float32).sub_(8).view(data.shape[0], -1, group)
        scales = read_scales(first, first + data.shape[0])
        return (values * scales.unsqueeze(-1)).view(data.shape[0], row)

    return RowDecoder(row, row // 2, decode)


@cache
def _fp4_byte_values() -> Tensor:
    """Return the two decoded numbers of each byte, float32 [256, 2]."""
    return torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)])
