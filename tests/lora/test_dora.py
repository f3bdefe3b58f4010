"""DoRA: PEFT's magnitudes, gradients and files, the trainer's policy in a generator, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from archon.checkpoint.convert import convert
from archon.checkpoint.formats.megatron.sharding import MegatronLayout
from archon.checkpoint.native import find_checkpoint, open_state
from archon.checkpoint.peft.export import export_lora, read_lora_weights
from archon.checkpoint.peft.writer import require_writable
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.memory.activations import LoRAMatrix, MicroBatchShard, lora_tensors
from archon.models.layers.feed_forward import DenseLayer
from archon.models.layers.linear import Linear
from archon.models.lora.dora import row_norms
from archon.models.lora.dropout import LoRADropout, hash_text, token_keys
from archon.models.lora.layers import LoRALayer
from archon.models.lora.targets import parameter_count
from archon.parallel.layout import parse_layout
from archon.rl.servers import _pushes_lora
from archon.rl.weight_sync import build_inprocess_engine, engine_weights
from archon.schema.errors import CheckpointError, ConfigError, RolloutError
from tests.engine.tiny import make_engine
from tests.generation.models import request, trainer_logprobs
from tests.lora.oracle import TOKENS, TOLERANCE, base_of, difference, engine_of, logits_of, their_logits, theirs
from tests.lora.test_dropout import Masked
from tests.lora.tiny import MOE, rl_run

DORA: dict[str, Any] = {"rank": 4, "alpha": 6, "init": "random", "dora": True}
TARGETS = {
    "qwen2": ["q_proj", "v_proj", "o_proj", "down_proj"],  # with biases
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj"],  # fused
    "deepseek_v3": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "llama": "all-linear",
}
WIDE: dict[str, Any] = {"dtype": "float64", "optimizer": {"lr": 1e-2}}
BATCH: dict[str, Tensor] = {"input_ids": TOKENS[None], "attention_mask": torch.ones(1, len(TOKENS), dtype=torch.bool)}
BATCH["loss_mask"] = BATCH["attention_mask"].long()


def dora_base(model_type: str, folder: Path) -> Path:
    """Make a base with biases that are not zero, if it has any."""
    base_of(model_type, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.bias"):
            tensor.normal_(generator=torch.Generator().manual_seed(0))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def train(engine: Any, steps: int = 1) -> list[float]:
    return [engine.train_batch(BATCH, CrossEntropyLoss(), loss_token_count)["loss"] for _ in range(steps)]


def gradients(engine: Any) -> dict[str, Tensor]:
    return engine.gradients(BATCH, CrossEntropyLoss(), loss_token_count)[0]


def their_gradients(model: Any) -> dict[str, Tensor]:
    model(TOKENS[None], labels=TOKENS[None]).loss.backward()
    return {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare_gradients(engine: Any, expected: dict[str, Tensor]) -> None:
    """Compare every gradient, of parts of a fused matrix by their rows; matrices that share no tensor of PEFT's."""
    found, used = gradients(engine), set[str]()
    for name in engine.lora:
        owner = name.removesuffix(".weight")
        (hf,) = engine.adapter.hf_names(name)
        prefix = "base_model.model." + hf.removesuffix(".weight")
        targets = engine.adapter.hf_to_native(hf)
        (target,) = (target for target in targets if target.name == name)
        magnitude = expected[f"{prefix}.lora_magnitude_vector.weight"]
        if len(targets) == 1:
            for part in "ab":
                assert difference(found[f"{owner}.lora.{part}"], expected[f"{prefix}.lora_{part.upper()}.weight"]) <= (
                    TOLERANCE
                )
            used |= {f"{prefix}.lora_{part}.weight" for part in "AB"}
        rows = magnitude if target.placement is None else target.placement.extract(magnitude.unsqueeze(1)).squeeze(1)
        assert difference(found[f"{owner}.lora.magnitude.weight"], rows) <= TOLERANCE
        used.add(f"{prefix}.lora_magnitude_vector.weight")
    if all(len(engine.adapter.hf_to_native(engine.adapter.hf_names(name)[0])) == 1 for name in engine.lora):
        assert used == expected.keys()


@pytest.mark.parametrize("model_type", TARGETS)
def test_peft_computes_with_archons_dora_what_archon_does(model_type: str, tmp_path: Path) -> None:
    base = dora_base(model_type, tmp_path / "base")
    engine = engine_of(base, lora=DORA | {"targets": TARGETS[model_type]}, optimizer={"lr": 1e-2})
    train(engine, 3)
    engine.save(tmp_path / "lora", "peft")
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["use_dora"] is True
    ours, plain = logits_of(engine), their_logits(theirs(base))
    model = theirs(base, tmp_path / "lora")
    assert difference(their_logits(model), ours) <= TOLERANCE
    assert difference(plain, ours) > 0.05
    again = engine_of(base, lora={"path": str(tmp_path / "lora")}, optimizer={"lr": 1e-2})
    assert again.lora == engine.lora
    assert torch.equal(logits_of(again), ours)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    compare_gradients(
        again, their_gradients(peft.PeftModel.from_pretrained(whole, tmp_path / "lora", is_trainable=True))
    )
    # The merged export of the engine and of the folder.
    engine.save(tmp_path / "merged")
    convert(base, tmp_path / "converted", "hf", lora=tmp_path / "lora")
    for name in ("merged", "converted"):
        assert difference(their_logits(theirs(tmp_path / name)), ours) <= TOLERANCE
    with torch.no_grad():
        assert difference(their_logits(model.merge_and_unload()), ours) <= TOLERANCE


@pytest.mark.parametrize("model_type", TARGETS)
def test_archon_continues_from_pefts_dora(model_type: str, tmp_path: Path) -> None:
    """PEFT's folder is read and written bit for bit, and computes what PEFT does."""
    base = dora_base(model_type, tmp_path / "base")
    targets = TARGETS[model_type]
    config = peft.LoraConfig(
        r=3, lora_alpha=2, target_modules=targets, use_dora=True, init_lora_weights=False, use_rslora=True
    )
    model = peft.get_peft_model(theirs(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.linspace(0.8, 1.2, len(parameter)))
    model.save_pretrained(tmp_path / "theirs")
    engine = engine_of(base, lora={"path": str(tmp_path / "theirs")}, optimizer={"lr": 1e-2})
    assert difference(logits_of(engine), their_logits(model.eval())) <= TOLERANCE
    engine.save(tmp_path / "ours", "peft")
    ours, given = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == given.keys() and all(torch.equal(ours[key], given[key]) for key in given)
    compare_gradients(engine, their_gradients(model))


def test_gradients_are_pefts_with_the_same_dropout(tmp_path: Path) -> None:
    base = dora_base("qwen2", tmp_path / "base")
    lora = DORA | {"targets": ["q_proj", "o_proj"], "dropout": 0.3}
    engine = engine_of(base, lora=lora, optimizer={"lr": 1e-2})
    engine.save(tmp_path / "lora", "peft")
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    model = peft.PeftModel.from_pretrained(whole, tmp_path / "lora", is_trainable=True)
    keys = token_keys(TOKENS, [len(TOKENS)], hash_text("0 0"))
    for name in engine.lora:
        layer = model.get_submodule("base_model.model." + engine.adapter.hf_names(name)[0].removesuffix(".weight"))
        layer.lora_dropout["default"] = Masked(LoRADropout(0.3, hash_text(name)), keys)
    compare_gradients(engine, their_gradients(model))


def test_training_starts_at_the_base_also_in_bfloat16(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    for dtype in ("float32", "bfloat16"):
        engine = engine_of(base, lora=DORA | {"init": "zero"}, dtype=dtype, optimizer={"lr": 1e-2})
        assert torch.equal(logits_of(engine), logits_of(engine_of(base, dtype=dtype, optimizer=None)))
        magnitudes = {name: p for name, p in engine.full_model.named_parameters() if "magnitude" in name}
        assert len(magnitudes) == len(engine.lora)
        assert all(p.dtype == torch.float32 and p.requires_grad for p in magnitudes.values())
    config = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    model = peft.get_peft_model(theirs(base), config)
    engine = engine_of(base, lora=DORA | {"init": "zero"})
    for name, magnitude in engine.lora_weights():
        if "magnitude" in name:
            hf = engine.adapter.hf_names(name.replace("lora.magnitude.", ""))[0].removesuffix(".weight")
            layer = model.get_submodule(f"base_model.model.{hf}")
            assert difference(magnitude, layer.lora_magnitude_vector["default"].weight.detach()) <= TOLERANCE


def test_the_norm_is_of_the_sum_and_has_no_gradient() -> None:
    torch.manual_seed(0)
    weight, a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 9), (2, 9), (7, 2)))
    norms = row_norms(weight, a, b, 1.7)
    torch.testing.assert_close(norms, (weight + 1.7 * b @ a).norm(dim=1).detach(), rtol=1e-12, atol=0)
    assert not norms.requires_grad


def test_a_resumed_run_is_the_same_and_is_exported_from_its_checkpoint(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    options: dict[str, Any] = {"lora": DORA, "optimizer": {"lr": 1e-2}}
    engine = engine_of(base, **options)
    train(engine, 2)
    engine.save(tmp_path / "native", format="native")
    other, folder = engine_of(base, **options), find_checkpoint(tmp_path / "native")
    assert folder is not None
    with open_state(folder, other.fingerprint) as (_, state):
        other.load_state_dict(state["engine"])
    assert train(engine, 2) == train(other, 2)
    weights, resumed = dict(engine.lora_weights()), dict(other.lora_weights())
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    exported = export_lora(folder, tmp_path / "lora", base)
    shapes = engine.adapter.native_shapes
    assert exported.parameters == sum(parameter_count(shapes[name], size) for name, size in engine.lora.items())
    loaded = read_lora_weights(tmp_path / "lora", engine.adapter, base)
    assert loaded.sizes == exported.sizes == engine.lora
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in exported.tensors.items())


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_the_generator_computes_the_trainers_policy_after_every_push(model_type: str, tmp_path: Path) -> None:
    base = dora_base(model_type, tmp_path / "base")
    engine = engine_of(base, lora=DORA | {"targets": TARGETS[model_type]}, **WIDE)
    for weights in ("snapshot", "auto"):
        generator = build_inprocess_engine(engine, None, weights=weights, max_slots=2, max_seq_len=64)
        for _ in range(2):
            (answer,) = generator.generate([request([5, 9, 2, 7], temperature=0.7, max_new_tokens=12)])
            expected = trainer_logprobs(engine.full_model, answer.input_tokens, answer.output_tokens, 0.7)
            found = torch.tensor(answer.output_logprobs, dtype=torch.float64)
            torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-9)
            train(engine)
            generator.update_weights(engine_weights(engine))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and DoRA of it."""
    path = tmp_path_factory.mktemp("dora")
    base = base_of("phi3", path / "base")
    engine_of(base, lora=DORA).save(path / "lora", "peft")
    return base, path / "lora"


KEY = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_magnitude_vector"
A = KEY.replace("lora_magnitude_vector", "lora_A.weight")
B = KEY.replace("lora_magnitude_vector", "lora_B.weight")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda x: x.pop(KEY), f"key '{KEY}' is missing, and use_dora of adapter_config.json is true"),
        (lambda x: x.update({KEY: x[KEY][1:].clone()}), rf"key '{KEY}' is torch.float32 \(\d+,\); expected \(\d+,\)"),
        (lambda x: x.update({KEY: x[KEY].long()}), f"key '{KEY}' is torch.int64 .* floating-point numbers"),
        (lambda x: x[KEY].fill_(float("nan")), f"key '{KEY}' has values that are not finite"),
        (lambda x: [x.pop(A), x.pop(B)], f"key '{A}' is missing, and '{KEY}' is there"),
    ],
)
def test_magnitudes_that_do_not_fit_are_refused(
    folder: tuple[Path, Path], tmp_path: Path, change: Any, complaint: str
) -> None:
    tensors = load_file(folder[1] / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((folder[1] / "adapter_config.json").read_bytes())
    with pytest.raises(CheckpointError, match=complaint):
        engine_of(folder[0], lora={"path": str(tmp_path)})


def test_dora_that_peft_lacks_or_a_generator_cannot_serve_is_refused(folder: tuple[Path, Path], tmp_path: Path) -> None:
    base, lora = folder
    engine = engine_of(base, lora=DORA)
    sizes = {name: size for name, size in engine.lora.items() if "wk" not in name}
    with pytest.raises(ConfigError, match=r"lora.dora is true, and PEFT has one LoRA for the fused .*qkv_proj"):
        require_writable(engine.adapter, sizes)
    with pytest.raises(ConfigError, match=r"lora\.loras\.x has DoRA, and multi-LoRA does not support it"):
        engine_of(base, lora={"loras": {"x": DORA}})
    engine = engine_of(base)
    generator = build_inprocess_engine(engine, None, weights="auto", max_slots=2, max_seq_len=64)
    with pytest.raises(RolloutError, match=r"the LoRA has DoRA magnitudes, .* merge it with archon export --merge"):
        generator.load_lora("x", read_lora_weights(lora, engine.adapter, base))
    with pytest.raises(ConfigError, match="fp8 is rowwise, and DoRA of FP8 matmuls is not supported; set fp8 to none"):
        engine_of(base, lora=DORA, fp8="rowwise")
    seeing = base_of("qwen3_vl", tmp_path / "seeing")
    with pytest.raises(ConfigError, match="DoRA of a vision encoder is not supported; leave it out of targets"):
        engine_of(seeing, lora=DORA | {"targets": ["visual.blocks.0.attn.qkv"]})
    make_engine(tmp_path / "made", hf=MOE).save(tmp_path / "moe")
    with pytest.raises(
        ConfigError, match=r"lora\.dora is true, and '.*experts.*' is an expert; DoRA of experts is not"
    ):
        engine_of(tmp_path / "moe", lora=DORA)
    engine = engine_of(tmp_path / "moe", lora={"rank": 2})
    engine.save(tmp_path / "stacked", "peft")
    config = tmp_path / "stacked" / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"use_dora": True}
    config.write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "stacked" / "adapter_model.safetensors")
    save_file(
        {k: x for k, x in tensors.items() if ".experts." in k}, tmp_path / "stacked" / "adapter_model.safetensors"
    )
    config.write_text(json.dumps(fields | {"target_modules": []}))
    with pytest.raises(CheckpointError, match=r"use_dora of adapter_config.json is true, and .* stacks experts"):
        engine_of(tmp_path / "moe", lora={"path": str(tmp_path / "stacked")})


def test_ranks_with_some_columns_of_a_matrix_get_it_merged(tmp_path: Path) -> None:
    make_engine(tmp_path / "made").save(tmp_path / "base")
    base, lora = tmp_path / "base", tmp_path / "lora"
    engine_of(base, lora=DORA).save(lora, "peft")
    convert(base, tmp_path / "merged", "hf", lora=lora)
    convert(base, tmp_path / "ranks", "megatron", lora=lora, layout=MegatronLayout(tp=2))
    convert(tmp_path / "ranks", tmp_path / "joined", "hf", like=base)
    merged, joined = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "joined"))
    assert merged.keys() == joined.keys()
    # In float32, products of other shapes add in another order.
    assert all(difference(joined[name], tensor) <= 1e-6 for name, tensor in merged.items())


def test_servers_get_merged_weights_of_dora(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    lora = {"rank": 2, "dora": True}
    engine = engine_of(base, lora=lora)
    servers = {"servers": ["http://127.0.0.1:1"]}
    actor = {"path": str(base), "device": "cpu", "optimizer": {}, "lora": lora}
    for transport in ("auto", "disk"):
        config = rl_run(
            base, tmp_path / "run", actor=actor, generator={}, rollout=servers | {"push": {"transport": transport}}
        )
        assert not _pushes_lora(config, engine)
        assert _pushes_lora(config, engine_of(base, lora={"rank": 2}))
    with pytest.raises(ConfigError, match=r"transport is lora, and servers cannot load the DoRA of actor.lora"):
        _pushes_lora(
            rl_run(
                base, tmp_path / "run", actor=actor, generator={}, rollout=servers | {"push": {"transport": "lora"}}
            ),
            engine,
        )


def test_a_row_of_zeros_has_no_direction(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    file = base / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight"][3] = 0
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"divides by the norms of rows, and row 3 of layers.1.attention.wo.weight is ze"
    ):
        engine_of(base, lora=DORA | {"init": "zero"})


def test_predicted_memory_is_what_autograd_keeps() -> None:
    def kept(dora: bool) -> int:
        layer = Linear(24, 16, bias=False, role="column")
        layer.weight.requires_grad_(False)
        layer.lora = LoRALayer(24, 16, 4, 1.0, dora=dora)
        x = torch.randn(10, 24, requires_grad=True)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.shape[0] == 10:
                saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = layer(x)
        assert out.requires_grad
        return sum(size for pointer, size in saved.items() if pointer != x.data_ptr())

    shard = MicroBatchShard(parse_layout("d1"), 10, 4)
    matrices = [LoRAMatrix("attention.wq", "column", 24, 16, 4, has_dora=dora) for dora in (False, True)]
    sizes = [sum(t.bytes for t in lora_tensors(matrix, DenseLayer(8), shard) if t.saved) for matrix in matrices]
    assert sizes == [kept(False), kept(True)]
