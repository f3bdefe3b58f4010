"""A checkpoint whose tensors hold several parameters, interleaved and transposed, through layouts of real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from archon.models import get_model_spec
from archon.tools.check.rank_pool import Pool
from tests.checkpoint.killing import digest
from tests.checkpoint.quantizing import BLOCK, quantize
from tests.checkpoint.tiny_checkpoints import write_checkpoint
from tests.distributed import checkpoints
from tests.distributed.cases import MODELS, Case
from tests.models import fused_family

pytestmark = pytest.mark.xdist_group("ranks")

QUICK = ("t2", "d2", "d2e2", "p2")
FURTHER = ("(attn:d2t2|ffn:d1t2e2)", "c2", "d2t2e4", "d2p2")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint in three shards, its tensors, and the parameters in it."""
    fused_family.register()
    config = MODELS["fused"]
    adapter = get_model_spec(config["model_type"]).state_dict_adapter_class(config)
    native = fused_family.random_native(adapter)
    state = adapter.to_hf(native) | fused_family.passthrough_tensors(config["num_hidden_layers"])
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    folder = tmp_path_factory.mktemp("fused") / "model"
    return write_checkpoint(folder, config, state, shards=3), state, native


def check(layout: str, stored: tuple[Path, dict[str, Tensor], dict[str, Tensor]], out: Path, pools: object) -> None:
    folder, state, native = stored
    case = Case(layout, "fused", dtype="float32")
    size = 4 if layout in FURTHER and layout != "c2" else 2
    expected = {name: digest(tensor) for name, tensor in native.items()}
    for loaded in pools(size).run(checkpoints.reexport, case, str(folder), str(out)):  # type: ignore[operator]
        assert loaded == expected
    exported = {key: tensor for file in out.glob("*.safetensors") for key, tensor in load_file(file).items()}
    assert exported.keys() == state.keys()
    for key, tensor in state.items():
        assert exported[key].dtype == tensor.dtype and digest(exported[key]) == digest(tensor), key


@pytest.mark.parametrize("layout", QUICK)
def test_a_fused_checkpoint_is_loaded_and_exported_bitwise(
    layout: str, stored: tuple[Path, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    check(layout, stored, tmp_path / "out", ranks)


@pytest.mark.parametrize("layout", ["t2", "d2e2"])
def test_a_quantized_fused_checkpoint_is_dequantized_on_the_ranks(
    layout: str, stored: tuple[Path, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    """Block of 5 rows and 7 columns, which no shard starts with."""
    _, state, _ = stored
    adapter = get_model_spec(MODELS["fused"]["model_type"]).state_dict_adapter_class(MODELS["fused"])
    quantized, expected = quantize({key: state[key] for key in adapter.hf_shapes()})
    options = {"quant_method": "fp8", "weight_block_size": [*BLOCK]}
    folder = write_checkpoint(tmp_path / "in", MODELS["fused"] | {"quantization_config": options}, quantized, shards=2)
    native = {name: digest(tensor) for name, tensor in adapter.from_hf(expected).items()}
    case = Case(layout, "fused", dtype="float32")
    for loaded in ranks(2).run(checkpoints.reexport, case, str(folder), str(tmp_path / "out")):
        assert loaded == native
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in expected.items())


def test_a_pipeline_in_bfloat16_exports_the_routers_bias_in_float32(
    stored: tuple[Path, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    folder, state, _ = stored
    case = Case("p2", "fused", dtype="bfloat16", config={"optimizer": None, "export_dtype": "bfloat16"})
    ranks(2).run(checkpoints.reexport, case, str(folder), str(tmp_path / "out"))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    carried = fused_family.passthrough_tensors(MODELS["fused"]["num_hidden_layers"]).keys()
    for key in state.keys() - carried:
        expected = state[key] if key.endswith("correction_bias") else state[key].bfloat16()
        assert exported[key].dtype == expected.dtype and torch.equal(exported[key], expected), key


@pytest.mark.slow
@pytest.mark.parametrize("layout", FURTHER)
def test_further_layouts_do_so_too(
    layout: str, stored: tuple[Path, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    check(layout, stored, tmp_path / "out", ranks)
