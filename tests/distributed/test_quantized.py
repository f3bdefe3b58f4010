"""A quantized checkpoint goes through the whole engine: inspected, loaded on ranks, trained, exported, reloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

import archon
from archon.cli import main
from archon.models import get_model_spec
from archon.parallel.layout import parse_layout
from archon.schema.errors import CheckpointError
from archon.tools.check.oracle import hf_classes, pack, reference_logits, relative_error
from archon.tools.check.parity import FP32_TOLERANCE
from archon.tools.check.rank_pool import Pool
from tests.checkpoint.killing import digest
from tests.distributed.cases import Case
from tests.distributed.quantized import fp8_checkpoint, mxfp4_checkpoint, train_and_export
from tests.tolerances import REORDER_FP32

pytestmark = pytest.mark.xdist_group("ranks")

MADE = {"deepseek_v3": fp8_checkpoint, "gpt_oss": mxfp4_checkpoint}
LAYOUTS = ("d1", "d2", "t2", "d2e2")
Checkpoint = tuple[str, Path, dict[str, Tensor]]


@pytest.fixture(scope="module", params=MADE)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Family, folder, and the weights that it stands for."""
    return request.param, *MADE[request.param](tmp_path_factory.mktemp(request.param) / "published")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def widened(checkpoint: Checkpoint) -> dict[str, str]:
    """The digest of each parameter in float32, by native name."""
    family, folder, expected = checkpoint
    config = json.loads((folder / "config.json").read_text())
    adapter = get_model_spec(family).state_dict_adapter_class(config)
    computed = {key: tensor.float() for key, tensor in expected.items() if not adapter.is_passthrough(key)}
    return {name: digest(tensor.contiguous()) for name, tensor in adapter.from_hf(computed).items()}


def test_the_engine_loads_trains_and_exports_it_in_every_layout(
    checkpoint: Checkpoint, ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    """All loaded weights bit for bit; exports hold every tensor in bfloat16, the carried ones too, and no scales."""
    _, folder, expected = checkpoint
    plain = {key: x if key.endswith("correction_bias") else x.bfloat16() for key, x in expected.items()}
    steps: dict[str, dict[str, float]] = {}
    for layout in LAYOUTS:
        case, out = Case(layout, dtype="float32"), tmp_path / layout
        size = parse_layout(layout).world_size
        arguments = (case, str(folder), str(out))
        found = [train_and_export(*arguments)] if size == 1 else ranks(size).run(train_and_export, *arguments)
        for loaded, metrics in found:
            assert loaded == widened(checkpoint)
            steps[layout] = metrics
        exported = tensors_of(out / "loaded")
        assert exported.keys() == plain.keys()
        for key, tensor in plain.items():
            assert exported[key].dtype == tensor.dtype and torch.equal(exported[key], tensor), key
        trained = tensors_of(out / "trained")
        assert trained.keys() == plain.keys()
        moved = {key for key, tensor in plain.items() if not torch.equal(trained[key], tensor)}
        assert moved and not any(key.startswith("model.layers.2.") for key in moved)
        for name in ("loaded", "trained"):
            assert "quantization_config" not in json.loads((out / name / "config.json").read_text())
        assert {x.dtype for x in archon.load_model(out / "trained").parameters()} == {torch.bfloat16}
    for layout, metrics in steps.items():
        assert metrics == pytest.approx(steps["d1"], rel=REORDER_FP32), layout


def test_the_export_is_read_by_transformers_with_the_layer_that_predicts_a_further_token(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """transformers loads that layer for generation from the same files; raw 8-bit floats would be weights to it."""
    family, folder, expected = checkpoint
    model = archon.load_model(folder, dtype=torch.float32)
    archon.save_model(model, tmp_path, folder)
    model_class: Any = hf_classes(family)[1]
    theirs = model_class.from_pretrained(tmp_path, experts_implementation="eager", attn_implementation="eager")
    tokens, positions, cu_seqlens, longest = pack([9, 1, 5], model.args.vocab_size, 1)
    with torch.no_grad():
        ours = model(tokens, positions, cu_seqlens, longest)
        assert relative_error(ours, reference_logits(theirs, tokens, [9, 1, 5])) <= FP32_TOLERANCE
    if family != "deepseek_v3":
        return
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]  # the published model has 61 layers
    further = MtpModel.from_pretrained(theirs).state_dict()
    for name, key in (
        ("eh_proj.weight", "eh_proj.weight"),
        ("mtp_block.self_attn.kv_b_proj.weight", "self_attn.kv_b_proj.weight"),
        ("mtp_block.mlp.shared_experts.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
        ("mtp_block.mlp.experts.down_proj", "mlp.experts.{}.down_proj.weight"),
    ):
        wanted = [expected[f"model.layers.2.{key}".format(expert)].float() for expert in range(4)]
        assert torch.equal(further[f"layers.0.{name}"], torch.stack(wanted) if "{}" in key else wanted[0]), name


def test_inspect_reads_it(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    family, folder, _ = checkpoint
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(folder)])
    assert not left.value.code
    said = capsys.readouterr().out
    adapter = get_model_spec(family).state_dict_adapter_class(json.loads((folder / "config.json").read_text()))
    counted = sum(torch.Size(shape).numel() for shape in adapter.native_shapes.values())
    assert f"family       {family}" in said and f"parameters   {counted:,}" in said


def test_a_carried_tensor_without_its_scale_is_refused_before_any_training(tmp_path: Path) -> None:
    folder, _ = fp8_checkpoint(tmp_path / "published")
    key = "model.layers.2.mlp.experts.1.up_proj.weight_scale_inv"
    index = folder / "model.safetensors.index.json"
    shard = folder / json.loads(index.read_text())["weight_map"][key]
    save_file({name: x for name, x in load_file(shard).items() if name != key}, shard, {"format": "pt"})
    listed = json.loads(index.read_text())
    del listed["weight_map"][key]
    index.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=rf"'{key}', the other half of .*, is missing"):
        archon.load_model(folder)
