"""What kernels of CUDA ask of their operands, from their own checks; the fake ones give a result for any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def check_operands(func: Any, args: Any, kwargs: Any) -> None:
    """Raise AssertionError where a kernel would refuse its operands."""
    name = func.name()
    if name == "torch_attn::_varlen_attn":
        q, k, v, cu_q, cu_k, max_q, max_k = args[:7]
        flash_operands(q, k, v, cu_q, cu_k, max_q, max_k)
        # torch 2.11 has no such argument, and takes fewer heads of keys without.
        asks = any(argument.name == "enable_gqa" for argument in func._schema.arguments)
        assert q.shape[1] == k.shape[1] or not asks or args[10:11] == (True,) or kwargs.get("enable_gqa")
    elif name == "flash_attn::_flash_attn_varlen_forward":
        flash_operands(*args[:7])
    elif name == "archon::flash_attention":
        q, k, v, sinks, cu_q, cu_k, longest = args[:7]
        flash_operands(q, k, v, cu_q, cu_k, *longest)
        assert sinks is None or sinks.shape == q.shape[1:2]
    elif name == "aten::_grouped_mm":
        _grouped(*args[:2], kwargs["offs"] if "offs" in kwargs else args[2])
    elif name in ("aten::_scaled_mm", "aten::_scaled_grouped_mm"):
        _scaled(*args[:2])


def flash_operands(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
    """`mha_varlen_fwd` of FlashAttention 2."""
    for x in (q, k, v):
        assert x.dtype in HALF and x.dtype == q.dtype, f"FlashAttention in {x.dtype}"
        assert x.dim() == 3 and x.stride(-1) == 1, f"FlashAttention of strides {x.stride()}"
        assert x.shape[-1] == q.shape[-1] and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256, f"heads of {x.shape[-1]}"
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    for bounds, longest, x in ((cu_q, max_q, q), (cu_k, max_k, k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.dim() == 1
        assert type(longest) is int and 0 < longest <= x.shape[0]
    assert cu_q.shape == cu_k.shape


def _grouped(left: Tensor, right: Tensor, offs: Tensor) -> None:
    """`grouped_mm`'s `check_valid_strides_and_return_transposed`, and its offsets."""
    assert offs.dtype == torch.int32 and offs.dim() == 1
    assert left.shape[0] > 0, "a grouped product of no rows"
    for x in (left, right):
        strides = x.stride()[-2:]
        assert 1 in strides, f"a grouped product of strides {x.stride()}"
        assert max(strides) * x.element_size() % 16 == 0, f"a grouped product of rows of {max(strides)} {x.dtype}"


def _scaled(left: Tensor, right: Tensor) -> None:
    """`_scaled_mm` and `_scaled_grouped_mm`: rows times columns of 8 bits, in 16 bytes each."""
    assert torch.float8_e4m3fn in (left.dtype, right.dtype), "a scaled product of e5m2 twice"
    assert left.shape[-2] > 0, "a scaled product of no rows"
    assert left.stride(-1) == 1 and right.stride(-2) == 1, f"strides {left.stride()} times {right.stride()}"
    assert left.shape[-1] % 16 == 0 and right.shape[-1] % 16 == 0, f"{tuple(left.shape)} times {tuple(right.shape)}"
