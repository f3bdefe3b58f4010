"""Loading takes the memory of the model and at most that of its largest tensor besides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.tiny_checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# Two tensors of 28 MB in bfloat16, so that a loader that holds a whole shard, or two tensors, is caught.
SHAPE: dict[str, Any] = {"vocab_size": 218_750, "hidden_size": 64, "num_hidden_layers": 1}
LARGEST = 218_750 * 64 * 2

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from archon.checkpoint.hf_io import load_model
from archon.checkpoint.hf_reader import load_hf_weights, read_hf_config
from archon.models import get_model_spec

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

alive = []

def measure(folder, dtype, transposed):
    config = read_hf_config(folder)
    spec = get_model_spec(config["model_type"])
    with torch.device("meta"):
        model = spec.model_class(spec.model_args_class.from_hf_config(config)).to(dtype)
    model.to_empty(device="cpu")
    alive.append(model)  # or the next one would find its memory, already resident
    if transposed:
        for weight in (model.tok_embeddings.weight, model.output.weight):
            weight.data = torch.empty(weight.shape[::-1], dtype=dtype).t()
    adapter = spec.state_dict_adapter_class(config)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    before = resident("RssAnon"), resident("VmHWM")
    load_hf_weights(model, adapter, folder)
    return {
        "model": sum(p.nbytes for p in model.parameters()),
        "anonymous": resident("RssAnon") - before[0],
        "peak": resident("VmHWM") - before[1],
    }

large, small = sys.argv[1:]
load_model(small, dtype=torch.float32)
cases = {}
for dtype in ("bfloat16", "float32"):
    for layout in ("as stored", "transposed"):
        cases[dtype + ", " + layout] = measure(large, getattr(torch, dtype), layout == "transposed")
print(json.dumps(cases))
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Bytes by case, measured in a process of its own."""
    root = tmp_path_factory.mktemp("memory")
    large, _ = make_checkpoint(root / "large", 2, torch.bfloat16, **SHAPE)
    small, _ = make_checkpoint(root / "small", 2, torch.bfloat16)
    command = [sys.executable, "-c", PROGRAM, str(large), str(small)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("layout", ["as stored", "transposed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_takes_at_most_the_largest_tensor_beyond_the_model(
    cases: dict[str, dict[str, int]], dtype: str, layout: str
) -> None:
    memory = cases[f"{dtype}, {layout}"]
    # The model's own pages are not touched before loading, so they are part of the growth.
    assert memory["model"] >= 2 * LARGEST
    assert memory["peak"] >= 0.99 * memory["model"]
    assert memory["anonymous"] - memory["model"] <= LARGEST
    assert memory["peak"] - memory["model"] <= LARGEST
