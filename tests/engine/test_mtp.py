"""Multi-token prediction: losses, gradients, names and exports, against a plain loop over documents."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

import archon
from archon.checkpoint.convert import convert
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.generation.inprocess import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.models import get_model_spec
from archon.models.attention.meta import PackedAttention
from archon.models.base import ModelInputs
from archon.models.hf.mtp import DEEPSEEK_MTP, QWEN_MTP
from archon.models.layers.moe import expert_biases
from archon.models.mtp import MTP_PREFIX
from archon.rl.weight_sync import PushedWeights
from archon.schema.config import EngineConfig, derive_critic, derive_reference
from archon.schema.errors import CheckpointError, ConfigError
from archon.tools.check.family import REFERENCES
from archon.tools.check.oracle import family_config, hf_classes, random_config, relative_error
from archon.tools.planner.prediction import predict_recompute
from tests.engine.tiny import VOCAB, documents, loss_masks, padded, sft_batch
from tests.tolerances import PARITY_FP64, REORDER_FP64

DEEPSEEK = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
FAST = ("deepseek_v3", "glm4_moe", "qwen3_next")
FILE = "model.safetensors"
OUTSIDE = {  # names of the weights outside the block, by their names in `Reference`
    "deepseek": {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
    "qwen": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "norm": "mtp.norm",
    },
}


def config_of(family: str, seed: int = 0, **changes: Any) -> dict[str, Any]:
    config = family_config(random_config(seed, family, REFERENCES.get(family)), family)
    rope = config["rope_parameters"]
    if rope["rope_type"] in ("dynamic", "longrope"):  # refused, since they depend on the length of a document
        kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        config["rope_parameters"] = kept | {"rope_type": "default"}
    return config | {"vocab_size": VOCAB, "pad_token_id": None} | changes


def engine_of(path: Path, **options: Any) -> ArchonEngine:
    defaults = {"device": "cpu", "dtype": "float64", "mtp_loss_weight": 0.3, "max_tokens_per_mb": 32}
    engine = ArchonEngine(EngineConfig(path=str(path), **(defaults | options)))
    engine.initialize(10)
    return engine


def checkpoint(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of new weights with an MTP layer, whose router has a bias if its family has one."""
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "config.json").write_text(json.dumps(config_of(family, seed, **changes)))
    engine_of(folder / "config", init_from_scratch=True).save(folder / "model", dtype=torch.float64)
    tensors = load_file(folder / "model" / FILE)
    generator = torch.Generator().manual_seed(seed)
    for name, x in tensors.items():
        if name.endswith("correction_bias"):
            tensors[name] = 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        elif "norm" in name:
            tensors[name] = x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    save_file(tensors, folder / "model" / FILE, {"format": "pt"})
    return folder / "model"


def kind_of(family: str) -> str:
    return "deepseek" if family in DEEPSEEK else "qwen"


def is_mtp(name: str, config: Mapping[str, Any]) -> bool:
    return name.startswith((f"model.layers.{config['num_hidden_layers']}.", "mtp."))


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    """Loading a trunk lists the keys of its MTP layer as unexpected."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


class Reference:
    """The definition, one document at a time, with transformers' trunk and block and weights of a checkpoint file."""

    def __init__(self, family: str, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        model_class: Any = hf_classes(REFERENCES.get(family, family))[1]
        options = {"experts_implementation": "eager", "attn_implementation": "eager"}
        self.model = model_class.from_pretrained(folder, dtype=torch.float64, **options)
        trunk = self.model.model
        kinds = getattr(self.model.config, "layer_types", None) or ["full_attention"] * len(trunk.layers)
        like = [kind == "full_attention" for kind in kinds].index(True)
        settings = copy.deepcopy(self.model.config)
        settings.first_k_dense_replace = 0
        if getattr(settings, "mlp_layer_types", None) is not None:
            settings.mlp_layer_types = ["sparse"] * len(trunk.layers)
        block_class, norm_class = type(trunk.layers[like]), type(trunk.norm)
        width, eps = settings.hidden_size, settings.rms_norm_eps
        self.block = block_class(settings, like).double()
        self.parts = nn.ModuleDict({name: norm_class(width, eps=eps) for name in ("enorm", "hnorm", "norm")}).double()
        self.parts["eh_proj"] = nn.Linear(2 * width, width, bias=False).double()
        number = config["num_hidden_layers"]
        prefix = f"model.layers.{number}." if kind_of(family) == "deepseek" else "mtp.layers.0."
        self.names = {
            part: (f"{prefix}{name}" if kind_of(family) == "deepseek" else name) + ".weight"
            for part, name in OUTSIDE[kind_of(family)].items()
        }
        self.prefix = prefix
        tensors = load_file(folder / FILE)
        for part, name in self.names.items():
            self.parts[part].weight.data = tensors[name]
        self.block.load_state_dict({name: self._stored(name, tensors) for name in self.block.state_dict()})
        self.model.requires_grad_(False)

    def _stored(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return tensors[self.prefix + name]
        stem, _, matrix = (self.prefix + name).rpartition(".")
        count = sum(key.startswith(f"{stem}.") and key.endswith(".down_proj.weight") for key in tensors)
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
        return torch.stack([torch.cat([tensors[f"{stem}.{e}.{p}.weight"] for p in parts]) for e in range(count)])

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [T - 1, V] of the tokens after the next one."""
        hidden = self.model.model(tokens[None]).last_hidden_state[:, :-1].detach()
        embedding = self.model.get_input_embeddings()(tokens[None, 1:]).detach()
        count = hidden.shape[1]
        joined = torch.cat((self.parts["enorm"](embedding), self.parts["hnorm"](hidden)), -1)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
        out = self.block(
            self.parts["eh_proj"](joined),
            attention_mask=mask,
            position_embeddings=self.model.model.rotary_emb(hidden, position_ids=positions),
            position_ids=positions,
        )
        out = out[0] if isinstance(out, tuple) else out
        return self.model.lm_head(self.parts["norm"](out))[0]

    def gradients(
        self, docs: Sequence[Tensor], masks: Sequence[Tensor], weight: float
    ) -> tuple[float, dict[str, Tensor]]:
        """The mean cross-entropy, and the gradient of each tensor of the checkpoint, in its names."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for tokens, mask in zip(docs, masks, strict=True):
            if len(tokens) > 2:
                kept = mask[2:] != 0
                total = total + F.cross_entropy(self.logits(tokens)[:-1][kept], tokens[2:][kept], reduction="sum")
                count += int(kept.sum())
        (weight * total / count).backward()
        grads = {name: self.parts[part].weight.grad for part, name in self.names.items()}
        for name, parameter in self.block.named_parameters():
            grads |= dict(self._split(name, parameter.grad))
        return float(total) / count, grads

    def _split(self, name: str, grad: Tensor) -> Iterator[tuple[str, Tensor]]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield self.prefix + name, grad
            return
        stem, _, matrix = (self.prefix + name).rpartition(".")
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
        for expert, rows in enumerate(grad):
            for part, x in zip(parts, rows.chunk(len(parts)), strict=True):
                yield f"{stem}.{expert}.{part}.weight", x


def mtp_gradients(engine: ArchonEngine, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of the MTP layers in the names of the checkpoint, and the metrics."""
    grads, metrics = engine.gradients(batch, CrossEntropyLoss(), loss_token_count)
    mtp = {name: grad for name, grad in grads.items() if name.startswith(MTP_PREFIX)}
    return dict(engine.adapter.export(mtp.items())), metrics


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(family, seed, marks=pytest.mark.slow if seed or family not in FAST else ())
        for family in (*DEEPSEEK, *QWEN)
        for seed in range(3)
    ],
)
def test_loss_and_gradients_are_those_of_the_definition(family: str, seed: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, family, seed)
    reference = Reference(family, folder)
    docs = documents()
    masks = loss_masks(docs)
    expected_loss, expected = reference.gradients(docs, masks, 0.3)
    actual, metrics = mtp_gradients(engine_of(folder), padded(docs, loss_mask=masks))
    assert metrics["mtp_loss"] == pytest.approx(expected_loss, rel=PARITY_FP64)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is None or not grad.any():  # an expert that no token chooses
            assert ".experts." in name and not actual[name].any(), name
        else:
            assert relative_error(actual[name], grad) <= PARITY_FP64, name


@pytest.mark.parametrize("max_tokens", [24, 64])
def test_a_loop_over_documents_agrees_in_float64(max_tokens: int, tmp_path: Path) -> None:
    engine = engine_of(checkpoint(tmp_path, "deepseek_v3"), max_tokens_per_mb=max_tokens)
    docs = documents()
    masks = loss_masks(docs)
    grads, metrics = engine.gradients(padded(docs, loss_mask=masks), CrossEntropyLoss(), loss_token_count)
    model = engine.full_model
    assert model.mtp is not None and model.tok_embeddings is not None and model.output is not None
    layer: Any = model.mtp["0"]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, mask in zip(docs, masks, strict=True):
        if len(tokens) < 3:
            continue
        attention = PackedAttention(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens), "sdpa")
        hidden = model.hidden_states(ModelInputs(tokens, torch.arange(len(tokens)), attention)).detach()[:-1]
        embedding = model.tok_embeddings.weight.detach()[tokens[1:]]
        attention = PackedAttention(torch.tensor([0, len(hidden)], dtype=torch.int32), len(hidden), "sdpa")
        attention.prepare(hidden)
        rotation = model.ropes[0](torch.arange(len(hidden)), hidden.dtype, None)
        x = torch.cat((layer.enorm(embedding), layer.hnorm(hidden)), -1) @ layer.eh_proj.weight.T
        out = layer.norm(layer.block(x, rotation, attention)[0])
        logp = (out @ model.output.weight.detach().T).log_softmax(-1)[:-1]
        total = total - (logp.gather(1, tokens[2:, None])[:, 0] * mask[2:]).sum()
        count += int(mask[2:].sum())
    assert metrics["mtp_loss"] == pytest.approx(float(total.detach()) / count, rel=REORDER_FP64)
    (0.3 * total / count).backward()
    expected = {f"{MTP_PREFIX}{name}": parameter.grad for name, parameter in model.mtp.named_parameters()}
    assert expected.keys() == {name for name in grads if name.startswith(MTP_PREFIX)}
    for name, grad in expected.items():
        assert grad is not None and relative_error(grads[name], grad) <= REORDER_FP64, name
    assert all(p.grad is None for name, p in model.named_parameters() if not name.startswith(MTP_PREFIX))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_transformers_reads_the_layer_from_an_export(family: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, family)
    number = config_of(family)["num_hidden_layers"]
    reference = Reference(family, folder)
    reference.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\..*"]
    loaded = MtpModel.from_pretrained(reference.model).double().layers[0]
    expected = {f"mtp_block.{name}": x for name, x in reference.block.state_dict().items()}
    expected |= {
        f"{part}.weight".replace("norm.", "post_norm.") if part == "norm" else f"{part}.weight": layer.weight
        for part, layer in reference.parts.items()
    }
    state = loaded.state_dict()
    assert state.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(state[name].float(), x.float()), name  # it keeps routers in float32


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpoint": {"mode": "full"}},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "float32"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_trunk_trains_bitwise_as_without_mtp(options: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "glm4_moe")
    options = {"optimizer": {"lr": 1e-2, "max_grad_norm": 0.01}, "share_prefixes": False} | options
    without, trained = engine_of(folder, mtp_loss_weight=0.0, **options), engine_of(folder, **options)
    expected, _ = without.gradients(sft_batch(), CrossEntropyLoss(), loss_token_count)
    grads, _ = trained.gradients(sft_batch(), CrossEntropyLoss(), loss_token_count)
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())
    assert {name for name in grads if not name.startswith(MTP_PREFIX)} == expected.keys()
    losses = []
    for seed in range(3):
        numbers = without.train_batch(sft_batch(seed=seed), CrossEntropyLoss(), loss_token_count)
        metrics = trained.train_batch(sft_batch(seed=seed), CrossEntropyLoss(), loss_token_count)
        without.step_lr_scheduler()
        trained.step_lr_scheduler()
        losses.append(metrics["mtp_loss"])
        assert all(metrics[name] == number for name, number in numbers.items())
    before = dict(engine_of(folder, **options).weights())
    after, plain = dict(trained.weights()), dict(without.weights())
    assert all(torch.equal(after[name], x) for name, x in plain.items())
    moved = [name for name in after if name.startswith(MTP_PREFIX) and not torch.equal(after[name], before[name])]
    assert {name for name in after if name.startswith(MTP_PREFIX)} - {*moved} <= {"mtp.0.block.moe.router.expert_bias"}


def test_mtp_learns_the_token_after_next(tmp_path: Path) -> None:
    """Token t + 2 is a function of tokens t and t + 1, which a trunk of random weights passes on."""
    folder = checkpoint(tmp_path, "glm4_moe", first_k_dense_replace=0)
    engine = engine_of(folder, dtype="float32", optimizer={"lr": 1e-2}, scheduler={"warmup_steps": 0})
    docs = [torch.arange(start, start + 24) % 12 for start in range(6)]
    batch = padded(docs, loss_mask=[torch.ones_like(doc) for doc in docs])
    losses = []
    for _ in range(20):
        losses.append(engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)["mtp_loss"])
        engine.step_lr_scheduler()
    assert losses[-1] < 0.3 * losses[0]


def test_documents_are_isolated(tmp_path: Path) -> None:
    engine = engine_of(checkpoint(tmp_path, "deepseek_v3"), max_tokens_per_mb=64)
    docs = documents((9, 12, 7))
    masks = [torch.zeros_like(doc) for doc in docs]
    masks[1][:] = 1
    other = [(docs[0] + 1) % VOCAB, docs[1], (docs[2] + 1) % VOCAB]
    first, second = (mtp_gradients(engine, padded(x, loss_mask=masks)) for x in (docs, other))
    assert first[1]["mtp_loss"] == second[1]["mtp_loss"]
    # Rows of other documents have zero gradients, and sums of an expert's rows are in another order.
    assert all(relative_error(second[0][name], grad) <= REORDER_FP64 for name, grad in first[0].items() if grad.any())


def test_a_document_without_a_token_after_next_has_no_loss(tmp_path: Path) -> None:
    engine = engine_of(checkpoint(tmp_path, "glm4_moe"))
    docs = documents((2, 2, 1))
    grads, metrics = mtp_gradients(engine, padded(docs, loss_mask=[torch.ones_like(doc) for doc in docs]))
    assert "mtp_loss" not in metrics and not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_export_has_trained_layers_and_untouched_ones_are_bitwise(family: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / FILE)
    untouched, engine = engine_of(folder, mtp_loss_weight=0.0), engine_of(folder, optimizer={"lr": 1e-2})
    for each, out in ((untouched, tmp_path / "untouched"), (engine, tmp_path / "trained")):
        for _ in range(2):
            each.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
            each.step_lr_scheduler()
        each.save(out)
        exported = load_file(out / FILE)
        assert exported.keys() == stored.keys()
        same = {name for name, x in exported.items() if is_mtp(name, config) and torch.equal(x, stored[name])}
        if each is untouched:
            assert same == {name for name in stored if is_mtp(name, config)}
        else:
            assert not {name for name in same if "correction_bias" not in name}
    pushed = {name for name, _ in engine.hf_weights()}
    assert pushed == stored.keys()
    # A native checkpoint resumes, and converts to the same export.
    engine.save(tmp_path / "run", format="native")
    convert(tmp_path / "run", tmp_path / "converted", "hf", like=folder)
    exported = load_file(tmp_path / "trained" / FILE)
    converted = load_file(tmp_path / "converted" / FILE)
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[name].to(x.dtype), x) for name, x in exported.items())
    with pytest.raises(CheckpointError, match="multi-token-prediction layers, which the format gguf has no names"):
        convert(tmp_path / "run", tmp_path / "gguf", "gguf", like=folder)
    resumed = engine_of(folder, optimizer={"lr": 1e-2})
    resumed.load(tmp_path / "run")
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(resumed.weights(), engine.weights(), strict=True))
    assert archon.load_model(tmp_path / "trained").mtp is None


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_embedding_and_head_follow_the_trunk(tied: bool, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "deepseek_v3", tie_word_embeddings=tied)
    stored, number = load_file(folder / FILE), config_of("deepseek_v3")["num_hidden_layers"]
    copies = {
        f"model.layers.{number}.embed_tokens.weight": "model.embed_tokens.weight",
        f"model.layers.{number}.shared_head.head.weight": "model.embed_tokens.weight" if tied else "lm_head.weight",
    }
    save_file(stored | {copy: stored[name].clone() for copy, name in copies.items()}, folder / FILE, {"format": "pt"})
    engine = engine_of(folder, optimizer={"lr": 1e-2}, scheduler={"warmup_steps": 0})
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    engine.save(tmp_path / "out")
    exported = load_file(tmp_path / "out" / FILE)
    assert exported.keys() == stored.keys() | copies.keys()
    for key, name in copies.items():
        assert torch.equal(exported[key], exported[name]) and not torch.equal(exported[key], stored[name])
    key = next(iter(copies))
    save_file(exported | {key: exported[key] + 1}, folder / FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight' differs from .* share it with the trunk"):
        engine_of(folder)


def test_the_reference_and_the_critic_of_a_model_with_mtp_have_none() -> None:
    config = EngineConfig(path="model", mtp_loss_weight=0.1)
    for derive, section in ((derive_reference, "ref"), (derive_critic, "critic")):
        assert derive(config, {}, section).mtp_loss_weight == 0
        with pytest.raises(ConfigError, match=f"{section}.*: mtp_loss_weight = 0.2 trains multi-token-prediction"):
            derive(config, {"mtp_loss_weight": 0.2}, section)


def test_counting_layers_takes_one_pass_over_the_keys_of_deepseek_v3() -> None:
    """DeepSeek-V3 has 91,000 keys; a pass for each possible layer takes 37 s."""
    experts = [f"model.layers.{n}.mlp.experts.{e}.up_proj.{i}" for n in range(62) for e in range(256) for i in range(6)]
    begun = time.process_time()
    assert DEEPSEEK_MTP.count([*experts, "model.layers.62.x", "model.layers.1x"], 61) == 2
    assert time.process_time() - begun < 2
    assert QWEN_MTP.count(["mtp.layers.0.x", "mtp.layers.0.y", "mtp.norm.weight", "model.layers.1.x"], 61) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lora": {"rank": 2}}, "lora freezes all other weights"),
        ({"is_critic": True}, "a critic has no language-model head"),
        ({"optimizer": None}, "optimizer is null"),
        ({"gradient_reduction": "step_in_backward", "optimizer": {"max_grad_norm": None}}, "does not separate"),
        ({"activation_checkpoint": {"mode": "auto"}}, "does not predict their memory"),
    ],
)
def test_options_that_exclude_mtp_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"mtp_loss_weight = 0.1 .*{complaint}"):
        EngineConfig.parse({"path": "model", "mtp_loss_weight": 0.1} | options)


@pytest.mark.parametrize(
    ("family", "keys", "complaint"),
    [
        ("qwen3", None, "archon computes none of Qwen3; set it to 0"),
        ("hy_v3", None, "archon computes none of HYV3|archon computes none of HyV3"),
        ("deepseek_v3", ["model.embed_tokens.weight"], r"has 0 \(keys model.layers.3.\*\); expected at least 1"),
        ("qwen3_next", ["mtp.layers.0.x", "mtp.layers.1.x"], r"has 2 \(keys mtp.layers.0.\*\); expected 1"),
    ],
)
def test_checkpoints_without_computable_layers_are_refused(family: str, keys: list[str] | None, complaint: str) -> None:
    adapter = get_model_spec(family).state_dict_adapter_class(config_of(family))
    with pytest.raises(ConfigError, match=complaint):
        adapter.with_mtp(keys)


def test_a_length_dependent_rope_and_a_pipeline_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    adapter = get_model_spec("glm4_moe").state_dict_adapter_class(config_of("glm4_moe", rope_parameters=rope))
    with pytest.raises(ConfigError, match="RoPE of kind dynamic depends on the length of a document"):
        adapter.with_mtp(None)
    (tmp_path / "config.json").write_text(json.dumps(config_of("glm4_moe")))
    with pytest.raises(ConfigError, match="a pipeline has them on different ranks; use p1"):
        engine_of(tmp_path, init_from_scratch=True, layout="p2")


def test_a_prediction_of_memory_is_refused() -> None:
    config = EngineConfig(path="model", mtp_loss_weight=0.1)
    with pytest.raises(ConfigError, match="the planner does not count their memory and time"):
        predict_recompute(config, config_of("glm4_moe"), torch.device("cpu"))


def test_a_layer_chain_predicts_further_tokens(tmp_path: Path) -> None:
    """Layer 2 reads layer 1's states and token t + 2, and predicts token t + 3."""
    folder = checkpoint(tmp_path, "glm4_moe")
    number = config_of("glm4_moe")["num_hidden_layers"]
    tensors = load_file(folder / FILE)
    prefix = f"model.layers.{number}."
    second = {
        name.replace(prefix, f"model.layers.{number + 1}."): x.clone()
        for name, x in tensors.items()
        if name.startswith(prefix)
    }
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | second, folder / FILE, {"format": "pt"})
    reference = Reference("glm4_moe", folder)
    tokens = documents((11,))[0]
    with torch.no_grad():
        first = F.cross_entropy(reference.logits(tokens)[:-1], tokens[2:])
        norm, model = reference.parts["norm"], reference.model
        states: list[Tensor] = []
        norm.register_forward_hook(lambda _, __, out: states.append(out))
        reference.logits(tokens)
        embedding = model.get_input_embeddings()(tokens[None, 2:])
        hidden = states[0][:, :-1]
        joined = torch.cat((reference.parts["enorm"](embedding), reference.parts["hnorm"](hidden)), -1)
        positions = torch.arange(hidden.shape[1])[None]
        mask = torch.full((hidden.shape[1],) * 2, float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
        rotary = model.model.rotary_emb(hidden, position_ids=positions)
        out = reference.block(
            reference.parts["eh_proj"](joined), attention_mask=mask, position_embeddings=rotary, position_ids=positions
        )
        out = out[0] if isinstance(out, tuple) else out
        later = F.cross_entropy(model.lm_head(norm(out))[0][:-1], tokens[3:])
    engine = engine_of(folder)
    batch = padded([tokens], loss_mask=[torch.ones_like(tokens)])
    assert engine.args.n_mtp_layers == 2
    _, metrics = mtp_gradients(engine, batch)
    count = len(tokens)
    expected = (float(first) * (count - 2) + float(later) * (count - 3)) / (2 * count - 5)
    assert metrics["mtp_loss"] == pytest.approx(expected, rel=PARITY_FP64)


@pytest.mark.parametrize("moe", [False, True])
def test_the_text_of_a_composite_checkpoint_trains_its_layer(moe: bool, tmp_path: Path) -> None:
    family = "qwen3_5_moe_text" if moe else "qwen3_5_text"
    folder, model_type = checkpoint(tmp_path, family), family.removesuffix("_text")
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: x
        for name, x in load_file(folder / FILE).items()
    }
    encoder = torch.randn(3, 2, dtype=torch.float64)
    (tmp_path / "composite").mkdir()
    save_file(tensors | {"model.visual.pos_embed.weight": encoder}, tmp_path / "composite" / FILE, {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    composite = {
        "model_type": model_type,
        "text_config": text,
        "vision_config": {},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    (tmp_path / "composite" / "config.json").write_text(json.dumps(composite))
    options = {"optimizer": {"lr": 1e-2}, "scheduler": {"warmup_steps": 0}}
    single = engine_of(folder, **options)
    engine = engine_of(tmp_path / "composite", vision="off", **options)
    (expected, metrics), (actual, found) = (mtp_gradients(each, sft_batch()) for each in (single, engine))
    assert found == metrics and actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    engine.save(tmp_path / "out")
    exported = load_file(tmp_path / "out" / FILE)
    assert exported.keys() == tensors.keys() | {"model.visual.pos_embed.weight"}
    assert torch.equal(exported["model.visual.pos_embed.weight"], encoder)
    assert not torch.equal(exported["mtp.fc.weight"], tensors["mtp.fc.weight"])


def test_pushes_hold_the_trained_layer_and_the_generator_leaves_it_out(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "glm4_moe")
    options = {"dtype": "float32", "optimizer": {"lr": 1e-2}, "scheduler": {"warmup_steps": 0}}
    trained, without = engine_of(folder, **options), engine_of(folder, **options | {"mtp_loss_weight": 0.0})
    answers = []
    for engine in (trained, without):
        generator = InProcessEngine.from_model(
            engine.full_model, weights="snapshot", page_size=4, n_pages=50, max_slots=2
        )
        generator.record_experts()
        engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
        generator.update_weights(engine.full_model)
        (answer,) = generator.generate(
            [ModelRequest([3, 1, 4], GenerationHyperparameters(max_new_tokens=6, greedy=True))]
        )
        answers.append((answer.output_tokens, answer.output_logprobs))
    assert answers[0] == answers[1]
    pushed = dict(PushedWeights(trained).tensors("float32"))
    PushedWeights(trained).write("disk", tmp_path / "pushed", "float32")
    stored = load_file(tmp_path / "pushed" / FILE)
    before = load_file(folder / FILE)
    assert pushed.keys() == stored.keys() == before.keys()
    assert all(torch.equal(stored[name].to(x.dtype), x) for name, x in pushed.items())
    moved = f"model.layers.{config_of('glm4_moe')['num_hidden_layers']}.eh_proj.weight"
    assert not torch.equal(pushed[moved], before[moved].float())


def test_balancing_moves_the_biases_of_the_trunk_alone(tmp_path: Path) -> None:
    engine = engine_of(checkpoint(tmp_path, "glm4_moe"), router_bias_update_rate=0.1)
    before = {name: bias.clone() for name, bias in expert_biases(engine.model).items()}
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    same = {name for name, bias in expert_biases(engine.model).items() if torch.equal(bias, before[name])}
    assert same == {"mtp.0.block.moe.router.expert_bias"}
