"""A config may claim blocks far wider than its matrices; reading takes no more memory for it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from archon.checkpoint.quantized import stored_tensors
from archon.checkpoint.safetensors_file import SafetensorsFile
from archon.models.hf.quantization import Quantization


def test_blocks_wider_than_the_matrix(tmp_path: Path) -> None:
    rows, columns = 16384, 64
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(rows, 1, generator=generator)
    save_file({"w": weights, "w_scale_inv": scales}, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        files = dict.fromkeys(file.entries, file)
        # As wide as the claim, the scales of these rows would take 64 GiB.
        found = stored_tensors(file.entries, files, Quantization("fp8", (1, 2**20)), {"w": (rows, columns)})
        read = found["w"].lazy(torch.float32, transposed=False).read()
    assert torch.equal(read, weights.float() * scales)
