"""The unit tests of AReaL's guide to adding a model, in its patterns, on a family of archon's."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from archon.rl.compat.areal import (
    ArchonParallelDims,
    ModelSpec,
    Qwen2Model,
    Qwen2ModelArgs,
    Qwen2StateDictAdapter,
    Qwen3Model,
    Qwen3ModelArgs,
    Qwen3StateDictAdapter,
    parallelize_qwen3,
    pipeline_llm,
)
from archon.schema.errors import CheckpointError, ConfigError
from tests.warm import run_code

ROOT = Path(__file__).resolve().parents[4]
SIZES = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(params=["spec", "plain"])
def hf_config(request: pytest.FixtureRequest) -> MagicMock:
    mock = MagicMock(spec=PretrainedConfig) if request.param == "spec" else MagicMock()
    for name, value in SIZES.items():
        setattr(mock, name, value)
    return mock


def test_args_are_read_from_a_mock(hf_config: MagicMock) -> None:
    args = Qwen2ModelArgs.from_hf_config(hf_config)
    assert (args.dim, args.n_layers, args.n_heads, args.n_kv_heads) == (32, 2, 4, 2)
    assert (args.hidden_dim, args.vocab_size, args.norm_eps) == (48, 40, 1e-5)
    assert args == Qwen2ModelArgs.from_hf_config(SIZES)
    critic = Qwen2ModelArgs.from_hf_config(hf_config, is_critic=True)
    assert critic.is_critic


def test_what_a_mock_does_not_set_is_said(hf_config: MagicMock) -> None:
    del hf_config.model_type
    with pytest.raises(ConfigError, match=r"model_type.*expected qwen2 in this family"):
        Qwen2ModelArgs.from_hf_config(hf_config)
    hf_config.model_type, hf_config.rope_scaling = "qwen2", {"rope_type": "nonsense"}
    with pytest.raises(ConfigError, match="nonsense"):
        Qwen2ModelArgs.from_hf_config(hf_config)


def test_every_parameter_has_a_name_in_hugging_face(hf_config: MagicMock) -> None:
    with torch.device("meta"):
        model = Qwen2Model(Qwen2ModelArgs.from_hf_config(hf_config))
    adapter = Qwen2StateDictAdapter(hf_config)
    names = []
    for name, _ in model.named_parameters():
        pairs = adapter.convert_single_to_hf(name, torch.empty(0))
        assert len(pairs) > 0, f"No HF mapping for {name}"
        assert all(tensor.shape == (0,) for _, tensor in pairs)
        names += [hf for hf, _ in pairs]
    assert sorted(names) == sorted(adapter.hf_shapes())


def test_an_empty_tensor_names_every_expert_and_only_it_may_have_another_shape() -> None:
    from archon.models.qwen3_moe import SPEC
    from tests.distributed.cases import MODELS

    config = next(model for model in MODELS.values() if model.get("model_type") == "qwen3_moe")
    adapter = SPEC.state_dict_adapter_class(config)
    (name,) = [name for name in adapter.native_shapes if name.endswith("experts.w1")][:1]
    pairs = adapter.convert_single_to_hf(name, torch.empty(0))
    assert len(pairs) == adapter.native_shapes[name][0]
    with pytest.raises(CheckpointError, match=r"has shape \(0, 1\)"):
        adapter.convert_single_to_hf(name, torch.empty(0, 1))
    with pytest.raises(CheckpointError, match="not part of this model"):
        adapter.convert_single_to_hf("nothing", torch.empty(0))


def test_a_state_makes_the_round_trip(hf_config: MagicMock) -> None:
    adapter = Qwen2StateDictAdapter(hf_config)
    archon_sd = {name: torch.randn(shape) for name, shape in adapter.native_shapes.items()}
    roundtrip = adapter.from_hf(adapter.to_hf(archon_sd))
    assert set(roundtrip) == set(archon_sd)
    for name, tensor in archon_sd.items():
        torch.testing.assert_close(roundtrip[name], tensor, rtol=0, atol=0)
    tied = Qwen2StateDictAdapter(SIZES | {"tie_word_embeddings": True})
    assert tied.convert_single_to_hf("output.weight", torch.empty(0)) == []


def test_a_forward_has_the_guides_arguments_and_result() -> None:
    model = Qwen2Model(Qwen2ModelArgs.from_hf_config(SIZES))
    tokens, positions = torch.arange(8), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    logits = model(tokens, positions, torch.tensor([0, 5, 8], dtype=torch.int32), 5, tree_attn_meta=None)
    assert logits.shape == (8, 40)


def test_a_spec_has_the_guides_fields() -> None:
    spec = ModelSpec(
        name="Mine",
        model_class=Qwen3Model,
        model_args_class=Qwen3ModelArgs,
        state_dict_adapter_class=Qwen3StateDictAdapter,
        parallelize_fn=parallelize_qwen3,
        supported_model_types=frozenset({"mine"}),
        pipelining_fn=pipeline_llm,
    )
    assert spec.pipelining_fn is pipeline_llm


def test_ranks_that_do_not_exist_may_be_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    dims = ArchonParallelDims(dp_shard=-1, tp=2, world_size=dist.get_world_size())
    assert (dims.dp_shard, dims.tp, dims.fsdp_enabled) == (1, 2, False)


FAKE = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from archon.rl.compat.areal import ArchonParallelDims
from tests.warm import run_code

dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
parallel_dims = ArchonParallelDims(dp_shard=2, cp=2, tp=2, world_size=8)
mesh = parallel_dims.world_mesh
for dim_name in mesh.mesh_dim_names:
    submesh = parallel_dims.get_mesh(dim_name)
    print(dim_name, submesh.size(), submesh.get_group().size(), submesh.get_local_rank())
print(parallel_dims.get_mesh("dp_shard_cp").get_group().size(), mesh.size())
"""


def test_a_fake_process_group_has_all_meshes() -> None:
    done = run_code(FAKE)
    assert done.stdout.splitlines() == [
        *("pp 1 1 0", "dp_replicate 1 1 0", "dp_shard 2 2 1", "cp 2 2 0", "tp 2 2 1"),
        "4 8",
    ]


MARKED = """
import pytest
@pytest.mark.slow
@pytest.mark.ci
def test_slow_but_in_ci(): pass
@pytest.mark.slow
def test_slow(): assert False
@pytest.mark.gpu
def test_gpu(): assert False
@pytest.mark.multi_gpu
def test_two_gpus(): assert False
def test_fast(): pass
"""


def test_the_guides_markers_are_known(tmp_path: Path) -> None:
    """`-m "not slow or ci"` runs what AReaL's CI does; tests of GPUs are skipped where there are none."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_marked.py").write_text(MARKED)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = run_code(
        "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not slow or ci']))",
        environment=os.environ | {"CUDA_VISIBLE_DEVICES": "", "CI": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "2 passed, 2 skipped, 1 deselected" in done.stdout, done.stdout + done.stderr
