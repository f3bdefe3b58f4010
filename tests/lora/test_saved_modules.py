"""`modules_to_save`: PEFT's training and files, the reference model, the generator, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from archon.checkpoint.convert import convert
from archon.checkpoint.hf_io import load_model
from archon.checkpoint.native import find_checkpoint, open_state
from archon.checkpoint.peft.export import export_lora, read_lora_weights
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.rl.servers import _pushes_lora
from archon.rl.weight_sync import build_inprocess_engine, engine_weights
from archon.schema.errors import CheckpointError, ConfigError, RolloutError
from tests.engine.tiny import make_engine
from tests.generation.models import request, trainer_logprobs
from tests.lora.oracle import TOKENS, TOLERANCE, base_of, difference, engine_of, logits_of, their_logits, theirs
from tests.lora.tiny import MOE, rl_run

BATCH: dict[str, Tensor] = {"input_ids": TOKENS[None], "attention_mask": torch.ones(1, len(TOKENS), dtype=torch.bool)}
BATCH["loss_mask"] = BATCH["attention_mask"].long()
LORA: dict[str, Any] = {"rank": 3, "alpha": 6, "init": "random", "targets": ["q_proj"]}
CASES: dict[str, tuple[str, bool, list[str], dict[str, Any]]] = {
    "head and embedding": ("llama", False, ["lm_head", "embed_tokens"], LORA),
    "norms": ("qwen3", False, ["norm"], LORA),  # by PEFT's rule also layernorms, q_norm and k_norm
    "tied": ("llama", True, ["embed_tokens"], LORA),
    "fused": ("phi3", False, ["qkv_proj", "lm_head"], LORA | {"targets": ["o_proj"]}),
    "biases": ("qwen2", False, ["k_proj", "model.norm"], LORA),
}


def saved_base(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the base of a case, and the fields of its LoRA."""
    model_type, tied, modules, lora = CASES[name]
    return base_of(model_type, folder, tie_word_embeddings=tied), lora | {"modules_to_save": modules}


def train(engine: Any, steps: int = 1) -> list[float]:
    return [engine.train_batch(BATCH, CrossEntropyLoss(), loss_token_count)["loss"] for _ in range(steps)]


def check_pushed_policy(engine: Any, error: float) -> None:
    """Check that a generator samples with the trainer's logprobs, before and after a step and its push."""
    generator = build_inprocess_engine(engine, None, weights="auto", max_slots=2, max_seq_len=64)
    for _ in range(2):
        (answer,) = generator.generate([request([5, 9, 2, 7], temperature=0.7, max_new_tokens=12)])
        expected = trainer_logprobs(engine.full_model, answer.input_tokens, answer.output_tokens, 0.7)
        found = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, expected.double(), rtol=0, atol=error)
        train(engine)
        generator.update_weights(engine_weights(engine))


@pytest.mark.parametrize("name", CASES)
def test_training_is_pefts(name: str, tmp_path: Path) -> None:
    """Three steps of AdamW from PEFT's folder: every weight and the logits."""
    base, lora = saved_base(name, tmp_path / "base")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=lora["targets"],
        modules_to_save=[*lora["modules_to_save"]],
        init_lora_weights=False,
        ensure_weight_tying=CASES[name][1],
    )
    model = peft.get_peft_model(theirs(base).double(), config)
    model.save_pretrained(tmp_path / "start")
    # transformers computes norms in float32; a large eps keeps Adam from dividing that rounding by tiny gradients.
    options: dict[str, Any] = {"dtype": "float64", "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-4}}
    engine = engine_of(base, lora={"path": str(tmp_path / "start")}, **options)
    assert engine.built.builder.saved_modules == engine_of(base, lora=lora).built.builder.saved_modules != ()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    for loss in train(engine, 3):
        expected = model(TOKENS[None], labels=TOKENS[None]).loss
        assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
        expected.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine.save(tmp_path / "ours", "peft")
    model.save_pretrained(tmp_path / "theirs")
    ours, given = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs"))
    assert ours.keys() == given.keys()
    for key, tensor in given.items():
        assert difference(ours[key], tensor) <= TOLERANCE, key
    assert difference(logits_of(engine), their_logits(model.eval())) <= TOLERANCE
    # PEFT computes with the written folder what archon does.
    assert difference(their_logits(theirs(base, tmp_path / "ours")).double(), logits_of(engine)) <= TOLERANCE


def test_exports_resume_and_merging_keep_them(tmp_path: Path) -> None:
    base, lora = saved_base("tied", tmp_path / "base")
    options: dict[str, Any] = {"lora": lora, "optimizer": {"lr": 1e-2}}
    engine = engine_of(base, **options)
    train(engine, 2)
    engine.save(tmp_path / "native", format="native")
    other, folder = engine_of(base, **options), find_checkpoint(tmp_path / "native")
    assert folder is not None
    with open_state(folder, other.fingerprint) as (_, state):
        other.load_state_dict(state["engine"])
    assert train(engine) == train(other)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(engine.saved_modules(), other.saved_modules(), strict=True))
    with (
        pytest.raises(CheckpointError, match=r"modules_to_save is \['tok_embeddings.weight'\] there and None here"),
        open_state(folder, engine_of(base, lora=lora | {"modules_to_save": []}).fingerprint),
    ):
        pass
    # The folder of the checkpoint, and merged: by the engine, on the way to a checkpoint, by PEFT.
    engine.load(folder)
    exported = export_lora(folder, tmp_path / "lora", base)
    assert exported.parameters == sum(p.numel() for p in engine.full_model.parameters() if p.requires_grad)
    loaded = read_lora_weights(tmp_path / "lora", engine.adapter, base)
    assert all(torch.equal(loaded.modules[name], tensor) for name, tensor in engine.saved_modules())
    fields = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (fields["modules_to_save"], fields["ensure_weight_tying"]) == (["model.embed_tokens"], True)
    ours = logits_of(engine)
    assert difference(their_logits(theirs(base)), ours) > 0.05
    engine.save(tmp_path / "merged")
    convert(base, tmp_path / "converted", "hf", lora=tmp_path / "lora")
    for name in ("merged", "converted"):
        assert difference(their_logits(theirs(tmp_path / name)), ours) <= TOLERANCE
    with torch.no_grad():
        assert difference(their_logits(theirs(base, tmp_path / "lora").merge_and_unload()), ours) <= TOLERANCE
    model = load_model(base, lora=tmp_path / "lora")
    ends = torch.tensor([0, len(TOKENS)], dtype=torch.int32)
    with torch.no_grad():
        assert torch.equal(model(TOKENS, torch.arange(len(TOKENS)), ends, len(TOKENS)), ours)


@pytest.mark.parametrize("name", ["head and embedding", "tied", "norms"])
@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-9), ("float32", 1e-4)])  # float32 is packed on a CPU
def test_the_generator_computes_the_trainers_policy_after_every_push(
    name: str, dtype: str, error: float, tmp_path: Path
) -> None:
    base, lora = saved_base(name, tmp_path / "base")
    engine = engine_of(base, lora=lora, dtype=dtype, optimizer={"lr": 1e-2})
    check_pushed_policy(engine, error)


def test_a_generator_has_copies_of_them(tmp_path: Path) -> None:
    """A step of the trainer changes nothing before the push, although the frozen weights are shared."""
    base, lora = saved_base("head and embedding", tmp_path / "base")
    engine = engine_of(base, lora=lora, dtype="float64", optimizer={"lr": 1e-2})
    generator = build_inprocess_engine(engine, None, weights="auto", max_slots=2, max_seq_len=64)
    asked = request([5, 9, 2, 7], greedy=True, max_new_tokens=12)
    (before,) = generator.generate([asked])
    train(engine)
    (after,) = generator.generate([asked])
    assert before.output_logprobs == after.output_logprobs


def test_narrow_dtypes_train_them_in_float32_from_the_base(tmp_path: Path) -> None:
    base, lora = saved_base("head and embedding", tmp_path / "base")
    engine = engine_of(base, lora=lora | {"init": "zero"}, dtype="bfloat16", optimizer={"lr": 1e-4})
    plain = engine_of(base, dtype="bfloat16", optimizer=None)
    assert torch.equal(logits_of(engine), logits_of(plain))
    first = {name: tensor.clone() for name, tensor in engine.saved_modules()}
    assert {x.dtype for x in first.values()} == {torch.float32}
    train(engine)
    for name, tensor in engine.saved_modules():
        moved = (tensor - first[name]).abs()
        assert 0 < moved.max() <= 1.01e-4, "less than bfloat16 can hold next to most weights"
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.bfloat16}


def test_a_value_head_is_stored_as_peft_stores_it(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    options: dict[str, Any] = {"is_critic": True, "init_score": True, "optimizer": {"lr": 1e-2}}
    critic = engine_of(base, lora=LORA, **options)
    critic.save(tmp_path / "lora", "peft")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0
    model = peft.PeftModel.from_pretrained(model, tmp_path / "lora").eval()
    ends = torch.tensor([0, len(TOKENS)], dtype=torch.int32)
    with torch.no_grad():
        values = critic.full_model(TOKENS, torch.arange(len(TOKENS)), ends, len(TOKENS))
        assert difference(model(TOKENS[None]).logits[0], values[-1:]) <= TOLERANCE
    model.save_pretrained(tmp_path / "theirs")
    again = engine_of(base, lora={"path": str(tmp_path / "theirs")}, seed=5, **options)
    with torch.no_grad():
        assert torch.equal(again.full_model(TOKENS, torch.arange(len(TOKENS)), ends, len(TOKENS)), values)


def test_servers_get_merged_weights(tmp_path: Path) -> None:
    base, lora = saved_base("head and embedding", tmp_path / "base")
    engine = engine_of(base, lora=lora)
    actor = {"path": str(base), "device": "cpu", "optimizer": {}, "lora": lora}
    for transport in ("disk", "lora"):
        rollout = {"servers": ["http://127.0.0.1:1"], "push": {"transport": transport}}
        config = rl_run(base, tmp_path / "run", actor=actor, generator={}, rollout=rollout)
        if transport == "disk":
            assert not _pushes_lora(config, engine)
            continue
        with pytest.raises(
            ConfigError, match=r"servers cannot load the modules_to_save of actor\.lora; set it to disk"
        ):
            _pushes_lora(config, engine)


@pytest.mark.parametrize(
    ("lora", "complaint"),
    [
        ({"modules_to_save": ["head"], "targets": ["nothing"]}, "lora.targets has 'nothing'"),
        (
            {"modules_to_save": ["lm_hat"]},
            "modules_to_save has 'lm_hat', which is none of .* such as down_proj, embed_tok",
        ),
        (
            {"modules_to_save": ["q_proj"]},
            r"selects 'model.layers.0.self_attn.q_proj.weight': it has a LoRA too; leave",
        ),
        (
            {"loras": {"x": {"modules_to_save": ["lm_head"]}}},
            r"lora\.loras\.x has modules_to_save, and multi-LoRA shares",
        ),
        (
            {"path": "x", "modules_to_save": ["lm_head"]},
            "modules_to_save configures a fresh LoRA, and path = 'x' loads",
        ),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_refused(
    folder: tuple[Path, Path], lora: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        engine_of(folder[0], lora=lora)


def test_experts_and_vision_encoders_are_not_trained_whole(tmp_path: Path) -> None:
    make_engine(tmp_path / "made", hf=MOE).save(tmp_path / "moe")
    with pytest.raises(ConfigError, match=r"selects '.*experts.*': whole experts are not trained next to a LoRA"):
        engine_of(tmp_path / "moe", lora=LORA | {"modules_to_save": ["mlp"]})
    seeing = base_of("qwen3_vl", tmp_path / "seeing")
    with pytest.raises(ConfigError, match=r"selects '.*visual.*': it belongs to a vision encoder"):
        engine_of(seeing, lora=LORA | {"modules_to_save": ["merger.norm"]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base with a tied embedding, and a LoRA with the whole embedding."""
    path = tmp_path_factory.mktemp("saved")
    base, lora = saved_base("tied", path / "base")
    engine_of(base, lora=lora).save(path / "lora", "peft")
    return base, path / "lora"


EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


@pytest.mark.parametrize(
    ("fields", "change", "complaint"),
    [
        (
            {"ensure_weight_tying": False},
            lambda x: None,
            "PEFT trained two matrices; train it with ensure_weight_tying",
        ),
        (
            {"modules_to_save": None},
            lambda x: None,
            "lm_head.weight' is no LoRA .*, but a weight of the base, and modules_to_save of .* does not name its",
        ),
        (
            {"modules_to_save": "embed_tokens"},
            lambda x: None,
            "modules_to_save is 'embed_tokens'; expected a list of names",
        ),
        ({"ensure_weight_tying": "yes"}, lambda x: None, "ensure_weight_tying is 'yes'; expected true or false"),
        ({}, lambda x: x.pop(HEAD), f"key '{HEAD}' is missing, and modules_to_save of adapter_config.json names its"),
        ({}, lambda x: x.update({HEAD: x[HEAD][1:].clone()}), rf"key '{HEAD}' is torch.float32 \(127, \d+\); expected"),
        ({}, lambda x: x.update({HEAD: x[HEAD].long()}), rf"key '{HEAD}' is torch.int64 .* floating-point numbers"),
        ({}, lambda x: x[HEAD].add_(1), "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
        ({}, lambda x: x[HEAD].fill_(float("nan")), f"key '{HEAD}' has values that are not finite"),
    ],
)
def test_stored_modules_that_do_not_fit_are_refused(
    folder: tuple[Path, Path], tmp_path: Path, fields: dict[str, Any], change: Any, complaint: str
) -> None:
    tensors = load_file(folder[1] / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = json.loads((folder[1] / "adapter_config.json").read_text()) | fields
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=complaint):
        engine_of(folder[0], lora={"path": str(tmp_path)})


def test_other_base_weights_and_serving_by_name_are_refused(folder: tuple[Path, Path]) -> None:
    base, lora = folder
    engine = engine_of(base, lora={"path": str(lora)})
    with pytest.raises(ConfigError, match="loading a base would replace the trained modules_to_save; set path to this"):
        engine.load(base)
    plain = engine_of(base)
    generator = build_inprocess_engine(plain, None, weights="auto", max_slots=2, max_seq_len=64)
    with pytest.raises(RolloutError, match=r"the LoRA has modules_to_save, .* merge it with archon export --merge"):
        generator.load_lora("x", read_lora_weights(lora, plain.adapter, base))
