"""Every family on a GPU: the loss and every gradient of packed documents against float64 on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from archon.models.spec import FAMILIES
from archon.tools.check.oracle import relative_error
from tests.cuda_traced.models import family_config
from tests.gpu.models import CPU, GPU, LENGTHS, Pack, build, distance
from tests.tolerances import GPU_FP32, TIMES_BF16

pytestmark = pytest.mark.gpu

BACKENDS = ["varlen", *(["flash"] if importlib.util.find_spec("flash_attn") else [])]
DELTA_NETS = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32(family: str) -> None:
    config, pack = family_config(family), Pack()
    wanted = pack.gradients(build(config, "sdpa", CPU, torch.float64), "sdpa")
    found = pack.gradients(build(config, "sdpa", GPU, torch.float32), "sdpa")
    assert found.keys() == wanted.keys()
    beyond = {name: relative_error(found[name], wanted[name]) for name in wanted}
    assert {name: far for name, far in beyond.items() if not far <= GPU_FP32} == {}


def check_bfloat16(config: dict[str, Any], backend: str) -> None:
    """bfloat16 rounds on every device; a wrong sum or a missing part is farther away than that."""
    pack, exact = Pack(LENGTHS), build(config, "sdpa", CPU, torch.float64)
    experts = pack.experts(exact)  # so that rounding chooses no others
    wanted = pack.gradients(exact, "sdpa", experts)
    rounding = distance(pack.gradients(build(config, "sdpa", CPU, torch.bfloat16), "sdpa", experts), wanted)
    found = pack.gradients(build(config, backend, GPU, torch.bfloat16), backend, experts)
    assert distance(found, wanted) <= TIMES_BF16 * rounding
    assert abs(found["loss"] / wanted["loss"] - 1) <= TIMES_BF16 * rounding


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str, backend: str) -> None:
    check_bfloat16(family_config(family), backend)


if importlib.util.find_spec("fla"):

    @pytest.mark.parametrize("family", DELTA_NETS)
    def test_delta_nets_with_fla(family: str) -> None:
        check_bfloat16(family_config(family), "fla")
