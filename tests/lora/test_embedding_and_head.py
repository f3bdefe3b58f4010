"""LoRA of the embedding and the head: PEFT's training and files, the generator, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from archon.checkpoint.convert import convert
from archon.checkpoint.hf_io import load_model
from archon.checkpoint.peft.export import export_lora, read_lora_weights
from archon.models.layers.head import LMHead
from archon.models.lora.layers import LoRALayer
from archon.rl.servers import _pushes_lora
from archon.rl.weight_sync import build_inprocess_engine
from archon.schema.errors import CheckpointError, ConfigError, RolloutError
from tests.lora.oracle import TOKENS, TOLERANCE, base_of, difference, engine_of, logits_of, their_logits, theirs
from tests.lora.test_saved_modules import check_pushed_policy, train
from tests.lora.tiny import rl_run

TARGETS = ["q_proj", "embed_tokens", "lm_head"]
LORA: dict[str, Any] = {"rank": 3, "alpha": 6, "init": "random", "targets": TARGETS}
MODELS = ("llama", "gemma2", "granite")  # gemma2: scaled embeddings, a soft cap; granite: two multipliers


def untied(model_type: str, folder: Path) -> Path:
    return base_of(model_type, folder, tie_word_embeddings=False)


@pytest.mark.parametrize("model_type", MODELS)
def test_training_is_pefts(model_type: str, tmp_path: Path) -> None:
    """Three steps of AdamW from PEFT's folder: every weight and the logits; then exports, merged and not."""
    base = untied(model_type, tmp_path / "base")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=[*TARGETS], init_lora_weights=False)
    model = peft.get_peft_model(theirs(base).double(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_embedding" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "start")
    # transformers computes norms in float32; a large eps keeps Adam from dividing that rounding by tiny gradients.
    options: dict[str, Any] = {"dtype": "float64", "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-4}}
    engine = engine_of(base, lora={"path": str(tmp_path / "start")}, **options)
    assert engine.lora == engine_of(base, lora=LORA).lora
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
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, given = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs"))
    assert ours.keys() == given.keys()
    for key, tensor in given.items():
        assert difference(ours[key], tensor) <= TOLERANCE, key
    logits = logits_of(engine)
    assert difference(logits, their_logits(model.eval())) <= TOLERANCE
    assert difference(their_logits(theirs(base)).double(), logits) > 0.05
    # PEFT computes with the written folder what archon does, and so do merged checkpoints.
    assert difference(their_logits(theirs(base, tmp_path / "ours")).double(), logits) <= TOLERANCE
    engine.save(tmp_path / "merged", dtype=torch.float32)
    convert(base, tmp_path / "converted", "hf", lora=tmp_path / "ours")
    for name in ("merged", "converted"):
        assert difference(their_logits(theirs(tmp_path / name)).double(), logits) <= TOLERANCE
    loaded = load_model(base, dtype=torch.float64, lora=tmp_path / "ours")
    ends = torch.tensor([0, len(TOKENS)], dtype=torch.int32)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS, torch.arange(len(TOKENS)), ends, len(TOKENS)), logits)


@pytest.mark.parametrize("model_type", MODELS[:2])
@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-9), ("float32", 1e-4)])  # float32 is packed on a CPU
def test_the_generator_computes_the_trainers_policy_after_every_push(
    model_type: str, dtype: str, error: float, tmp_path: Path
) -> None:
    base = untied(model_type, tmp_path / "base")
    engine = engine_of(base, lora=LORA, dtype=dtype, optimizer={"lr": 1e-2})
    check_pushed_policy(engine, error)


def test_training_starts_at_the_base_and_the_base_is_the_reference(tmp_path: Path) -> None:
    base = untied("llama", tmp_path / "base")
    for dtype in ("float32", "bfloat16"):
        plain = logits_of(engine_of(base, dtype=dtype, optimizer=None))
        engine = engine_of(base, lora=LORA | {"init": "zero"}, dtype=dtype, optimizer={"lr": 1e-2})
        assert torch.equal(logits_of(engine), plain)
        train(engine)
        assert not torch.equal(logits_of(engine), plain)
        with engine.without_lora():
            assert torch.equal(logits_of(engine), plain)
    weights = dict(engine_of(base, lora=LORA | {"init": "zero"}).lora_weights())
    a = weights["tok_embeddings.lora.a"]  # PEFT draws B of an embedding from a normal distribution; A is 0
    # One standard error of the deviation of 384 draws is 4 %.
    assert a.std().item() == pytest.approx(1, rel=0.15) and not weights["tok_embeddings.lora.b"].any()


def test_all_linear_leaves_embedding_and_head_out(tmp_path: Path) -> None:
    base = untied("llama", tmp_path / "base")
    names = engine_of(base, lora={"rank": 2}).lora
    assert names and not {"tok_embeddings.weight", "output.weight"} & names.keys()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_scores_and_losses_have_the_gradients_of_plain_logits(dtype: torch.dtype, soft_cap: float | None) -> None:
    torch.manual_seed(0)
    head = LMHead(12, 5000, soft_cap=soft_cap).to(dtype)  # several tiles of columns
    head.lora = LoRALayer(12, 5000, 3, 1.7).to(dtype)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(9, 12, dtype=dtype, requires_grad=True)
    labels, weights = torch.randint(5000, (9,)), torch.rand(9, dtype=dtype)
    leaves = [hidden, *head.parameters()]

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, leaves, retain_graph=True))

    logits = head(hidden) / 0.7
    logprobs = logits.log_softmax(-1)
    chosen, entropies = logprobs[torch.arange(9), labels], -(logprobs.exp() * logprobs).sum(-1)
    expected = gradients((chosen * weights + entropies * weights).sum()), gradients(-(chosen * weights).sum())
    scores = head(hidden, labels, 0.7)
    found = gradients(((scores.logprobs + scores.entropy) * weights).sum())
    fused = gradients(head(hidden, labels, 0.7, weights=weights).loss)
    for ours, theirs_ in zip((*found, *fused), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(ours, theirs_, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-10)
    # A frozen matrix has no gradient, and the LoRA has the same.
    head.weight.requires_grad_(False)
    loss = head(hidden, labels, 0.7, weights=weights).loss
    for ours, theirs_ in zip(torch.autograd.grad(loss, [*head.lora.parameters()]), expected[1][2:], strict=True):
        torch.testing.assert_close(ours, theirs_, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and PEFT's LoRA of its embedding and head, with PEFT's copies of both."""
    path = tmp_path_factory.mktemp("outer")
    base = untied("llama", path / "base")
    config = peft.LoraConfig(r=3, target_modules=[*TARGETS], init_lora_weights=False)
    peft.get_peft_model(theirs(base), config).save_pretrained(path / "lora")
    return base, path / "lora"


EMBEDDING = "base_model.model.model.embed_tokens"


def test_copies_of_the_base_are_read_and_not_written(folder: tuple[Path, Path], tmp_path: Path) -> None:
    base, lora = folder
    stored = load_file(lora / "adapter_model.safetensors")
    assert f"{EMBEDDING}.base_layer.weight" in stored
    export_lora(lora, tmp_path / "lora", base)
    written = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert written.keys() == {key for key in stored if "base_layer" not in key}
    assert all(torch.equal(stored[key], tensor) for key, tensor in written.items())


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_changed_copy_of_the_base_is_refused(folder: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    base, lora = folder
    tensors = load_file(lora / "adapter_model.safetensors")
    key = next(key for key in tensors if key.endswith(f"{name}.base_layer.weight"))
    tensors[key][5, 3] += 1
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(tensors, changed / "adapter_model.safetensors")
    (changed / "adapter_config.json").write_bytes((lora / "adapter_config.json").read_bytes())
    complaint = r"its copy of the base's '.*' differs from the base; write the changed base with PEFT's"
    with pytest.raises(CheckpointError, match=complaint):
        engine_of(base, lora={"path": str(changed)})
    with pytest.raises(CheckpointError, match=complaint):
        convert(base, tmp_path / "merged", "hf", lora=changed)
    with pytest.raises(CheckpointError, match=complaint):
        export_lora(changed, tmp_path / "again", base)


@pytest.mark.parametrize(
    ("tied", "lora", "complaint"),
    [
        (
            True,
            {"targets": ["embed_tokens"]},
            "'model.embed_tokens' is the embedding or the head, which this model ties",
        ),
        (
            True,
            {"targets": ["lm_head"]},
            "'lm_head' is the embedding or the head, which this model ties, so .* by modules_",
        ),
        (False, {"dora": True}, "lora.dora is true, and 'model.embed_tokens' is the embedding or the head, whose DoRA"),
        (False, {"dropout": 0.1}, "lora.dropout is 0.1, and a LoRA of the head does not support dropout; set it to 0"),
        (
            False,
            {"loras": {"x": {"targets": TARGETS}}},
            r"lora\.loras\.x\.targets names the embedding or the head, and mul",
        ),
    ],
)
def test_what_is_not_supported_is_refused(tied: bool, lora: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base", tie_word_embeddings=tied)
    with pytest.raises(ConfigError, match=complaint):
        engine_of(base, lora=lora if "loras" in lora else LORA | lora, optimizer={})


def test_pefts_lora_of_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base", tie_word_embeddings=True)
    model = peft.get_peft_model(theirs(base), peft.LoraConfig(target_modules=["embed_tokens"]))
    model.save_pretrained(tmp_path / "lora")
    with pytest.raises(
        CheckpointError, match=r"'model\.embed_tokens' is the embedding or the head, which this model ties"
    ):
        engine_of(base, lora={"path": str(tmp_path / "lora")})


def test_servers_get_merged_weights_and_generators_refuse_it_by_name(folder: tuple[Path, Path], tmp_path: Path) -> None:
    base, lora = folder
    engine = engine_of(base, lora=LORA)
    actor = {"path": str(base), "device": "cpu", "optimizer": {}, "lora": LORA}
    disk, by_name = (
        rl_run(
            base,
            tmp_path / "run",
            actor=actor,
            generator={},
            rollout={"servers": ["http://127.0.0.1:1"], "push": {"transport": transport}},
        )
        for transport in ("disk", "lora")
    )
    assert not _pushes_lora(disk, engine)
    with pytest.raises(
        ConfigError, match=r"servers cannot load the LoRA of embedding or head of actor\.lora; set it to"
    ):
        _pushes_lora(by_name, engine)
    plain = engine_of(base)
    generator = build_inprocess_engine(plain, None, weights="auto", max_slots=2, max_seq_len=64)
    with pytest.raises(RolloutError, match=r"by name does not support the embedding and the head; merge it with"):
        generator.load_lora("x", read_lora_weights(lora, plain.adapter, base))
