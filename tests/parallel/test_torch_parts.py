"""Every private part of PyTorch that archon uses: there under the name archon knows, and used where it is checked."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, schedules

from archon.parallel.dims import ensure_process_group
from archon.parallel.torch_parts import has_private_api, require_private_apis
from archon.schema.errors import ConfigError

ROOT = Path(__file__).parents[2]
MODULES = (
    "archon.engine.optim",
    "archon.models.attention.packed.varlen",
    "archon.models.base",
    "archon.parallel.comm",
    "archon.parallel.compile",
    "archon.parallel.gloo",
    "archon.parallel.pipeline_schedule",
    "archon.parallel.torch_dispatch",
    "archon.parallel.torch_groups",
    "archon.parallel.activation_checkpoint",
)
PRIVATE_APIS = [(module, part) for module in MODULES for part in importlib.import_module(module).PRIVATE_APIS]
# Operators of kernels, which have a check and a fallback of their own, or a test against plain formulas.
KERNELS = {"models/layers/matmul.py", "models/attention/packed/blockwise.py", "archon/generation/replica.py"}
PRIVATE = re.compile(r"(?:\btorch|\bdist|_c10d)(?:\.\w+)*\._[a-z]\w*|from torch[\w.]*\._[\w.]+ import|_internal\b")


@pytest.mark.parametrize(("module", "part"), PRIVATE_APIS, ids=[part for _, part in PRIVATE_APIS])
def test_private_part_of_torch_exists(module: str, part: str) -> None:
    assert has_private_api(part), f"PyTorch {torch.__version__} has no {part}, which {module} uses"


def test_missing_part_is_one_line_that_names_it() -> None:
    with pytest.raises(ConfigError) as refused:
        require_private_apis("meshes", ["torch.distributed", "torch.distributed.device_mesh.DeviceMesh._no_such"])
    assert str(refused.value) == (
        f"PyTorch {torch.__version__} has no torch.distributed.device_mesh.DeviceMesh._no_such, which archon's meshes "
        "needs; archon is made for PyTorch 2.11 to 2.13: install one of these"
    )
    assert not has_private_api("torch.no_such_module.anything")
    assert not has_private_api("torch.ops.aten.no_such_operator.default")


def test_schedule_and_stage_have_the_private_fields_that_are_used() -> None:
    """What exists only once a schedule has been made: `parallel.pipeline_schedule` clears its losses."""
    ensure_process_group("cpu")
    scalar = torch.empty((), device="meta")
    stage = PipelineStage(
        torch.nn.Identity(), 0, 1, torch.device("cpu"), input_args=scalar, output_args=scalar.clone().requires_grad_()
    )
    schedule = schedules.Schedule1F1B(stage, 1, loss_fn=lambda output, target: output)
    assert schedule._internal_losses == []
    assert all(hasattr(stage, name) for name in ("has_backward", "submod", "stage_index"))


def test_private_parts_are_used_where_they_are_checked() -> None:
    checked = {f"{module.replace('.', '/')}.py" for module in MODULES} | {f"archon/{path}" for path in KERNELS}
    checked |= KERNELS | {"archon/parallel/torch_parts.py"}
    # Names in the metadata of folders that others wrote; nothing of that name is imported.
    checked |= {f"archon/checkpoint/formats/dcp/{name}.py" for name in ("metadata", "torch_file")}
    found = []
    for path in sorted((ROOT / "archon").rglob("*.py")) + [
        path for room in ("models", "parallel", "rl") for path in sorted((ROOT / room).rglob("*.py"))
    ]:
        name = str(path.relative_to(ROOT))
        if name in checked or f"archon/{name}" in checked:
            continue
        code = (line.partition("#")[0] for line in path.read_text().splitlines())
        found += [f"{name}: {line.strip()}" for line in code if PRIVATE.search(line) and "pydantic" not in line]
    assert found == []
