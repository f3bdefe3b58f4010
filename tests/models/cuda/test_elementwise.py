"""The fused elementwise kernels against the plain layers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from archon.models.cpu.fused import plain_clamped_swiglu, plain_rms_norm, plain_rotate, plain_swiglu
from archon.models.cuda.elementwise import norm_and_rotate, swiglu

# Sums in another order in float32; one rounding in the other dtypes.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("offset", "rounds_once"), [(0.0, False), (1.0, False), (0.0, True)])
@pytest.mark.parametrize(("rotated", "interleaved"), [(0, False), (12, False), (24, False), (12, True), (24, True)])
def test_norm_and_rotation(
    device: torch.device, dtype: torch.dtype, offset: float, rounds_once: bool, rotated: int, interleaved: bool
) -> None:
    """The heads are a view of a wider product, as of joint projections."""
    x = torch.randn(3, 7, 24).to(device, dtype)[:, 1:6]
    weight, angles = torch.randn(24).to(device, dtype), torch.randn(3, 1, rotated // 2).to(device)
    for angle_dtype in {dtype, torch.float32}:
        cos, sin = (angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)) if rotated else (None, None)
        out = norm_and_rotate(x, weight, cos, sin, 1e-5, offset, rounds_once, interleaved)
        expected = plain_rms_norm(x.double(), weight.double(), 1e-5, offset, rounds_once)
        if cos is not None and sin is not None:
            expected = plain_rotate(expected, cos.double(), sin.double(), interleaved)
        assert out.dtype == dtype and out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rotation_without_a_norm(device: torch.device) -> None:
    x, angles = torch.randn(5, 3, 16).to(device, torch.bfloat16), torch.randn(5, 1, 4).to(device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    out = norm_and_rotate(x, None, cos, sin, 0.0, 0.0, False, False)
    expected = plain_rotate(x.double(), cos.double(), sin.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[torch.bfloat16])
    assert torch.equal(out[..., 8:], x[..., 8:])


def test_a_wide_norm_of_rows(device: torch.device) -> None:
    x, weight = torch.randn(4, 1, 3000).to(device), torch.randn(3000).to(device)
    out = norm_and_rotate(x, weight, None, None, 1e-6, 0.0, False, False)
    expected = plain_rms_norm(x.double(), weight.double(), 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[torch.float32] * 4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [(), (1.702, 2.0)], ids=["plain", "clamped"])
def test_swiglu(device: torch.device, dtype: torch.dtype, options: tuple[float, ...]) -> None:
    plain = partial(plain_clamped_swiglu, alpha=options[0], limit=options[1]) if options else plain_swiglu
    joint = torch.randn(4, 2 * 37).to(device, dtype) * 3
    wide = joint.double().requires_grad_()
    joint.requires_grad_()
    out, expected = swiglu(*joint.split(37, dim=-1), *options), plain(*wide.split(37, dim=-1))
    # The clamped one rounds six times.
    tolerance = TOLERANCE[dtype] * (1 + len(options))
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for grad in (torch.randn(4, 37).to(device, dtype), torch.randn(4, 1).to(device, dtype).expand(4, 37)):
        joint.grad = wide.grad = None
        out.backward(grad, retain_graph=True)
        expected.backward(grad.double(), retain_graph=True)
        assert joint.grad is not None and wide.grad is not None
        # The gradient of gate rounds grad * up first.
        torch.testing.assert_close(joint.grad.double(), wide.grad, rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
