"""A family written by AReaL's guide, in a package outside archon: it loads, trains in layouts, saves and is checked."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from archon.checkpoint.hf_io import load_model, load_spec, save_model
from archon.engine.build import require_exportable
from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.models import BaseModelArgs, ModelSpec
from archon.models import spec as model_spec
from archon.models.args.moe import MoEModelArgs
from archon.models.hf.config_object import HFConfig
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, ConfigError, FamilyError
from archon.tools.check.layouts import LENGTHS, VOCAB, SequenceLoss, padded_batch, rank_rows
from archon.tools.check.rank_pool import Pool, RankError
from archon.tools.check.round_trip import folder_tensors, fresh_checkpoint
from tests.rl.compat.areal.guide_family import write_package
from tests.warm import run_code

SCALE = "def {}(self, name, value):\n        return {} if name == 'norm.weight' else value"
CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 500_000.0,
}
ADAPTER, PARALLELIZE = "model/state_dict_adapter.py", "infra/parallelize.py"
# Files hold half of the final norm's weights.
READ = (ADAPTER, "def read(self, name, value):\n        return value", SCALE.format("read", "value * 2"))
WRITE = (ADAPTER, "def write(self, name, value):\n        return value", SCALE.format("write", "value / 2"))
READ_IN_PLACE = (ADAPTER, READ[1], SCALE.format("read", "value.mul_(2)"))
WRITE_WRONG = (ADAPTER, WRITE[1], SCALE.format("write", "value / 4"))
SHARD_MESH = (PARALLELIZE, 'get_mesh("dp_shard_cp")', 'get_mesh("dp_shard")')
NO_TENSOR_PARALLELISM = (PARALLELIZE, "if parallel_dims.tp_enabled:", "if False:")
LAYER_SCALE = (READ[0], READ[1], READ[2].replace("norm.weight", "layers.0.ffn_norm.weight", 1))
ONE_DIGIT = (ADAPTER, r're.search(r"layers\.(\d+)\.", key)', r're.search(r"layers\.(\d)\.", key)')
BUILT = "self.model_args = model_args"
LOGITS = "return super().forward(tokens, positions, cu_seqlens, max_seqlen, tree_attn_meta)"
SOFT_CAP = ("model/model.py", LOGITS, f"h = {LOGITS.removeprefix('return ')}\n        return 2 * torch.tanh(h / 2)")

Change = tuple[str, str, str]
names = (f"guided{number}" for number in count())


class Package:
    """The package under a fresh name, written with changes and imported.

    Attributes:
        name: its name and model type.
    """

    def __init__(self, folder: Path, *changes: Change) -> None:
        self.folder, self.name = folder, next(names)
        write_package(folder, self.name, *changes)
        self.spec = load(self.name, str(folder))

    def checkpoint(self, **fields: Any) -> Path:
        """Write float64 weights of `CONFIG` with changed fields; return their folder."""
        folder = self.folder / f"{self.name}-checkpoint"
        fresh_checkpoint(folder, CONFIG | {"model_type": self.name} | fields, dtype=torch.float64)
        return folder / "weights"

    def check(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run `archon check-model` in a process that finds the package."""
        arguments = ["check-model", self.name, *options]
        return run_code(f"from archon.cli import main; main({arguments!r})", path=[self.folder])


def load(name: str, folder: str) -> ModelSpec:
    """Import the package, which registers its family."""
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    spec: ModelSpec = importlib.import_module(name).SPEC
    return spec


@pytest.fixture(scope="module", autouse=True)
def _families() -> Iterator[None]:
    """Unregister the families: some are wrong on purpose, and other tests visit all registered families."""
    with mock.patch.dict(model_spec._REGISTRY.specs()):
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as ranks:
        yield ranks


def engine_of(folder: str | Path, layout: str, **options: Any) -> ArchonEngine:
    fixed = {"device": "cpu", "dtype": "float64", "max_tokens_per_mb": 40, "optimizer": {"lr": 0.01}}
    engine = ArchonEngine(EngineConfig.model_validate({"path": str(folder), "layout": layout} | fixed | options))
    engine.initialize(total_steps=3)
    return engine


def train(name: str, package: str, folder: str, layout: str, out: str, dtype: str = "float64") -> list[float]:
    """Train three steps and save; return loss and gradient norm of each. A collective."""
    if package:
        load(name, package)
    engine = engine_of(folder, layout, dtype=dtype)
    numbers: list[float] = []
    for seed in range(3):
        data = rank_rows(padded_batch(LENGTHS, VOCAB, seed), engine.ranks.dp.rank, engine.ranks.dp.size)
        # 0.7 and 1.3 are no bfloat16 numbers.
        data["temperatures"] = torch.where(data["loss_mask"].bool(), 0.7 + 0.6 * (data["input_ids"] % 2), 0.0)
        metrics = engine.train_batch(data, SequenceLoss(), loss_token_count)
        numbers += [metrics["loss"], metrics["grad_norm"]]
    engine.save(out, format="hf")
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), (READ, WRITE)], ids=["renamed", "scaled"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_family_of_the_guide_trains_in_every_layout_as_on_one_process(
    pool: Pool, tmp_path: Path, changes: tuple[Change, ...], tied: bool
) -> None:
    package = Package(tmp_path, *changes)
    source = str(package.checkpoint(tie_word_embeddings=tied))
    expected = train(package.name, str(tmp_path), source, "d1", str(tmp_path / "d1"))
    saved = folder_tensors(tmp_path / "d1")
    assert ("lm_head.weight" in saved) != tied
    for layout in ("d2", "t2", "c2", "p2"):
        for actual in pool.run(train, package.name, str(tmp_path), source, layout, str(tmp_path / layout)):
            assert actual == pytest.approx(expected, rel=1e-10), layout
        tensors = folder_tensors(tmp_path / layout)
        assert tensors.keys() == saved.keys()
        for name, tensor in saved.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-9, atol=1e-11)


def as_llama(folder: Path) -> Path:
    """Copy a checkpoint of the family under the type that it computes as; return the folder."""
    copy = shutil.copytree(folder, folder.parent / "llama")
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    return copy


@pytest.mark.parametrize("layout", ["d2", "t2"])
@pytest.mark.slow
def test_mixed_precision_rounds_as_archons_own_parallelize_function(pool: Pool, tmp_path: Path, layout: str) -> None:
    """FSDP's default casts temperatures and loss weights to the compute dtype; the engine keeps them wide."""
    package = Package(tmp_path)
    folder, out = package.checkpoint(), str(tmp_path / "out")
    expected = pool.run(train, "llama", "", str(as_llama(folder)), layout, out + "-llama", "bfloat16")
    assert pool.run(train, package.name, str(tmp_path), str(folder), layout, out, "bfloat16") == expected


def logits(model: torch.nn.Module) -> Tensor:
    return model(torch.arange(9), torch.arange(9), torch.tensor([0, 9], dtype=torch.int32), 9)


def test_a_conversion_in_place_is_no_renaming(tmp_path: Path) -> None:
    package = Package(tmp_path, READ_IN_PLACE)
    overrides = {"from_hf", "to_hf", "convert_single_to_hf"}
    assert load_spec(package_config(package, tmp_path)).adapter.overrides == overrides
    assert load_spec(package_config(Package(tmp_path), tmp_path)).adapter.overrides == set()


def test_files_go_through_the_conversions_that_a_family_overrides(tmp_path: Path) -> None:
    plain, scaled = Package(tmp_path), Package(tmp_path, READ, WRITE)
    source = plain.checkpoint()
    tensors = folder_tensors(source)
    shutil.copytree(source, tmp_path / "scaled")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "scaled" / "config.json").write_text(json.dumps(config | {"model_type": scaled.name}))
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] / 2}, tmp_path / "scaled/model.safetensors")
    model = load_model(tmp_path / "scaled")
    assert torch.equal(logits(model), logits(load_model(source)))
    save_model(model, tmp_path / "saved", like=tmp_path / "scaled")
    saved = folder_tensors(tmp_path / "saved")
    assert all(torch.equal(saved[name], tensor) for name, tensor in folder_tensors(tmp_path / "scaled").items())
    with pytest.raises(CheckpointError, match="overrides convert_single_to_hf, from_hf, to_hf"):
        require_exportable(EngineConfig.model_validate({"path": str(tmp_path / "scaled"), "lora": {}}), "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {**x, "model.layers.0.extra.weight": torch.ones(1)}, "unknown key 'model.layers.0.extra.weight'"),
        (lambda x: {k: v for k, v in x.items() if k != "model.norm.weight"}, "'norm.weight' is missing"),
        (lambda x: {**x, "model.norm.weight": torch.ones(3)}, r"'norm.weight' is \(3,\); expected \(32,\)"),
        (lambda x: {**x, "model.layers.x.self_attn.q_proj.weight": torch.ones(1)}, "unknown key 'model.layers.x"),
    ],
)
def test_an_overridden_from_hf_uses_each_key_and_fills_each_parameter(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    folder = Package(tmp_path, READ, WRITE).checkpoint()
    save_file(change(folder_tensors(folder)), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def embedding_scale(name: str, package: str, folder: str, layout: str) -> float:
    """Return the standard deviation of fresh embeddings. A collective."""
    load(name, package)
    weights = dict(engine_of(folder, layout, init_from_scratch=True).hf_weights())
    return float(weights["model.embed_tokens.weight"].std())


@pytest.mark.slow
def test_fresh_weights_come_from_an_overridden_init_weights(pool: Pool, tmp_path: Path) -> None:
    package = Package(tmp_path)
    arguments = (package.name, str(tmp_path), str(package.checkpoint()))
    scale = embedding_scale(*arguments, "d1")
    assert scale == pytest.approx(0.5, rel=0.05)  # a sample's deviation; initializer_range would give 0.02
    for layout in ("d2", "t2", "p2"):
        assert pool.run(embedding_scale, *arguments, layout) == [scale, scale]
    forgetful = Package(tmp_path, ("model/model.py", "nn.init.ones_(self.norm.weight)", "pass"))
    with pytest.raises(FamilyError, match=r"Model\.init_weights leaves norm\.weight uninitialized"):
        engine_of(package_config(forgetful, tmp_path), "d1", init_from_scratch=True)


def package_config(package: Package, folder: Path) -> Path:
    """Write `CONFIG` for a package; return the folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": package.name}))
    return folder


def test_the_four_test_stages_of_the_guide_run_as_written(tmp_path: Path) -> None:
    package = Package(tmp_path)
    spec = package.spec
    hf_config = MagicMock()
    for name, value in CONFIG.items():
        setattr(hf_config, name, value)
    # Stage 1: arguments
    args = spec.model_args_class.from_hf_config(hf_config)
    assert (args.dim, args.n_layers, args.tie_word_embeddings) == (32, 2, False)
    assert (spec.model_args_class().dim, BaseModelArgs().dim) == (64, 896)  # the smallest variants
    # Stage 2: round trip of a state dict
    with torch.device("meta"):
        model = spec.model_class(args)
    adapter = spec.state_dict_adapter_class(hf_config)
    archon_sd = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    roundtrip = adapter.from_hf(adapter.to_hf(archon_sd))
    assert set(roundtrip.keys()) == set(archon_sd.keys())
    # Stage 3: completeness
    for name, _ in model.named_parameters():
        assert len(adapter.convert_single_to_hf(name, torch.empty(0))) > 0, f"No HF mapping for {name}"
    # Stage 4: forward, compared with transformers
    reference = LlamaForCausalLM(LlamaConfig(**CONFIG | {"initializer_range": 0.2}))
    model = spec.model_class(args)
    model.load_state_dict(adapter.from_hf(reference.state_dict()))
    torch.testing.assert_close(logits(model), reference(torch.arange(9)[None]).logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500_000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "hidden_act": "gelu"},
    ],
)
def test_a_hand_written_reader_sees_fields_as_attributes_and_loses_none(tmp_path: Path, fields: dict[str, Any]) -> None:
    package = Package(tmp_path)
    config = {name: value for name, value in CONFIG.items() if name != "rope_theta"} | {"model_type": package.name}
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    args = load_spec(tmp_path).adapter.args
    assert args.rope_theta == 500_000.0
    assert args.rope_scaling.kind == fields.get("rope_scaling", {}).get("rope_type", "default")
    assert args.hidden_act == fields.get("hidden_act", "silu")
    mock = MagicMock()
    for name, value in (config | fields).items():
        setattr(mock, name, value)
    assert package.spec.model_args_class.from_hf_config(mock) == args


def test_a_misread_rope_base_is_read_from_the_config(tmp_path: Path) -> None:
    package = Package(tmp_path, ("model/args.py", '"rope_theta", 10000.0', '"rope_base", 10000.0'))
    assert package.spec.model_args_class.from_hf_config(CONFIG).rope_theta == 500_000.0


def test_the_number_of_experts_has_each_of_its_names() -> None:
    assert HFConfig({"num_local_experts": 4}).num_experts == 4
    assert HFConfig({"num_experts": 4, "num_local_experts": 5}).num_local_experts == 5


def test_a_family_with_experts_reads_the_fields_that_transformers_writes() -> None:
    @dataclass
    class Args(MoEModelArgs):
        @classmethod
        def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Args:
            sizes = {"n_layers": hf_config.num_hidden_layers, "head_dim": hf_config.head_dim, "moe_hidden_dim": 8}
            return cls(n_experts=hf_config.num_experts, n_experts_per_token=2, **sizes)

    experts = {"num_experts": 4, "num_local_experts": 4, "router_aux_loss_coef": 0.001}
    assert Args.from_hf_config(CONFIG | experts).n_experts == 4
    with pytest.raises(ConfigError, match="'num_local_experts' is 5"):
        Args.from_hf_config(CONFIG | experts | {"num_local_experts": 5})


def test_gradients_are_reduced_in_float32(pool: Pool, tmp_path: Path) -> None:
    package = Package(tmp_path, (PARALLELIZE, "(param_dtype=param_dtype, reduce_dtype=reduce_dtype)", "(param_dtype)"))
    arguments = (package.name, str(tmp_path), str(package.checkpoint()), "d2", str(tmp_path / "out"))
    with pytest.raises(RankError, match=r"reduces the gradients of .* in torch.bfloat16; pass reduce_dtype"):
        pool.run(train, *arguments, "bfloat16")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('self.register_buffer("scale", torch.ones(()), persistent=False)', "init_buffers leaves scale uninitialized"),
        ('self.layers["0"].drop = nn.Dropout(0.1)', r"dropout 0.1 in layers.0.drop; remove it"),
    ],
    ids=["buffer", "dropout"],
)
def test_a_built_model_has_no_undefined_buffer_and_no_dropout(tmp_path: Path, line: str, message: str) -> None:
    package = Package(tmp_path, ("model/model.py", BUILT, f"{BUILT}\n        {line}"))
    with pytest.raises(FamilyError, match=message):
        engine_of(package_config(package, tmp_path), "d1", init_from_scratch=True)
    source = Package(tmp_path).checkpoint()
    (source / "config.json").write_text(json.dumps(CONFIG | {"model_type": package.name}))
    with pytest.raises(FamilyError, match=message):
        load_model(source)


@pytest.mark.parametrize(
    ("logits", "contract", "message"),
    [
        (LOGITS.replace("cu_seqlens", "cu_seqlens[:]"), "generation", "forward fails without cu_seqlens"),
        (f"return torch.dropout({LOGITS.removeprefix('return ')}, 0.5, True)", "isolation", "remove dropout"),
    ],
    ids=["no boundaries", "functional dropout"],
)
def test_check_model_says_what_a_forward_by_hand_gets_wrong(
    tmp_path: Path, logits: str, contract: str, message: str
) -> None:
    done = Package(tmp_path, ("model/model.py", LOGITS, logits)).check("--only", contract)
    assert message in done.stderr and "Traceback" not in done.stderr, done.stdout + done.stderr


def test_check_model_names_the_layer_that_differs_from_transformers(tmp_path: Path) -> None:
    done = Package(tmp_path, LAYER_SCALE).check("--reference", "llama", "--only", "parity")
    assert "the first difference is in layer 0" in done.stderr, done.stdout + done.stderr


def test_a_field_that_no_one_reads_is_an_error(tmp_path: Path) -> None:
    read = Package(tmp_path).spec.model_args_class.from_hf_config
    for fields in ({"sliding_window": 4}, {"attention_bias": True}, {"router_scale": 2.0}):
        with pytest.raises(ConfigError, match=f"'{next(iter(fields))}' is .*from_hf_config does not read it"):
            read(CONFIG | fields)
    read(CONFIG | {"sliding_window": 4, "use_sliding_window": False, "attention_bias": False})
    with pytest.raises(ConfigError, match="'hidden_size' is missing"):
        read({"model_type": "guided"})


@pytest.mark.parametrize(
    ("change", "layout", "message"),
    [
        (SHARD_MESH, "c2", "reduces the gradient of .* over 1 of 2 ranks"),
        (NO_TENSOR_PARALLELISM, "t2", "applies no tensor parallelism"),
    ],
)
def test_a_layout_that_a_parallelize_function_forgets_is_an_error(
    pool: Pool, tmp_path: Path, change: Change, layout: str, message: str
) -> None:
    package = Package(tmp_path, change)
    with pytest.raises(RankError, match=message):
        pool.run(train, package.name, str(tmp_path), str(package.checkpoint()), layout, str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("model/model.py", "super().__init__(model_args)", "super().__init__()"), r"super\(\).__init__\(model_args\)"),
        ((ADAPTER, "super().__init__(model_config, hf_assets_path)", "pass"), r"super\(\).__init__\(hf_config, path\)"),
        (("model/args.py", "return cls(", "return dict("), "from_hf_config returned .*; expected a GuidedModelArgs"),
        ((PARALLELIZE, "    return model\n", "    return None\n"), "returned NoneType; return the model"),
        (
            ("spec.py", "model_class=GuidedModel", "model_class=GuidedModelArgs"),
            "expected a subclass of BaseArchonModel",
        ),
    ],
    ids=["model", "adapter", "arguments", "parallelize", "spec"],
)
def test_base_classes_say_what_is_missing(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        engine_of(package_config(Package(tmp_path, change), tmp_path), "d1", init_from_scratch=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options", "passed"),
    [((), ("--reference", "llama", "--full"), 7), ((READ, WRITE), (), 5)],
    ids=["renamed", "scaled"],
)
def test_check_model_passes_a_family_of_the_guide(
    tmp_path: Path, changes: tuple[Change, ...], options: tuple[str, ...], passed: int
) -> None:
    done = Package(tmp_path, *changes).check(*options)
    assert done.returncode == 0 and done.stdout.count("✓") == passed, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("changes", "contract"),
    [
        ([READ], "round trip"),
        ([READ, WRITE_WRONG], "round trip"),
        ([ONE_DIGIT], "round trip"),
        ([SOFT_CAP], "two ranks"),
        pytest.param([SHARD_MESH], "two ranks", marks=pytest.mark.slow),
    ],
    ids=["read only", "wrong inverse", "one digit", "changed logits", "wrong mesh"],
)
def test_check_model_fails_a_family_that_the_engine_gets_wrong(
    tmp_path: Path, changes: list[Change], contract: str
) -> None:
    done = Package(tmp_path, *changes).check("--only", contract)
    assert done.returncode == 1 and "✗" in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
