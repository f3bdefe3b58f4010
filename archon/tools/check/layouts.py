"""Two ranks against one process, in float64: the loss, every gradient, and the isolation of documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archon.checkpoint.hf_io import load_model
from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.loss import Metrics, document_sums, loss_token_count, masked_sum
from archon.models import BaseArchonModel
from archon.parallel.gather import full_tensors
from archon.schema.config import EngineConfig
from archon.schema.errors import FamilyError, UserError
from archon.tools.check.family import CheckedFamily, load_families
from archon.tools.check.oracle import ContractError, relative_error
from archon.tools.check.random_configs import draw_fields
from archon.tools.check.rank_pool import Pool, RankError
from archon.tools.check.round_trip import fresh_checkpoint

FP64_TOLERANCE = 1e-10
"""Maximum max|a - b| / max|b| per tensor: sums in another order."""
VOCAB = 104
# Odd lengths that no rank count divides, two equal neighbors, one document of a single token.
LENGTHS = (13, 5, 5, 1, 21, 8, 3, 17, 2, 9, 30)
MAX_TOKENS = 40
# Sizes divisible by two ranks; fields that a family lacks are ignored.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "mlp_bias": True,
}


@dataclass(frozen=True)
class LayoutCase:
    """Layout of two ranks with engine options; `needs_experts` excludes dense models."""

    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    needs_experts: bool = False

    @property
    def name(self) -> str:
        """Layout and values of the options."""
        return " ".join([self.layout, *(str(value) for value in self.options.values())])


LAYOUTS = (
    LayoutCase("d2"),
    LayoutCase("t2"),
    LayoutCase("c2", {"context_parallel": "allgather"}),
    LayoutCase("c2", {"context_parallel": "ulysses"}),
    LayoutCase("p2"),
    LayoutCase("d2e2", needs_experts=True),
    LayoutCase("t2e2", needs_experts=True),
    LayoutCase("(attn:d1t2|ffn:d1t2)", needs_experts=True),
)


@dataclass(frozen=True)
class LayoutResult:
    """Largest difference of a layout from one process, or the engine's reason to reject the layout."""

    case: str
    difference: float | None = None
    refused: str | None = None


class SequenceLoss:
    """Loss over whole documents in order: the squared mean log-probability of each document."""

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """Return the loss and the sum of log-probabilities."""
        counts = document_sums(mb["loss_mask"].to(logprobs.dtype), mb).clamp(min=1)
        means = document_sums(logprobs * mb["loss_mask"], mb) / counts
        loss = means.square().sum() - 0.1 * (logprobs * mb["loss_mask"]).sum()
        if entropy is not None:
            loss = loss - 0.01 * (entropy * mb["loss_mask"]).sum()
        return loss, {"logprob": masked_sum(logprobs.detach(), mb["loss_mask"])}


def padded_batch(lengths: tuple[int, ...], vocab: int, seed: int) -> dict[str, Tensor]:
    """Return a padded batch that trains no prompts and nothing of the second document."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    loss_mask = mask.clone()
    for row, length in enumerate(lengths):
        loss_mask[row, : length if row == 1 else max(1, length // 3)] = False
    return {
        "input_ids": torch.randint(vocab, (len(lengths), width), generator=generator) * mask,
        "attention_mask": mask,
        "loss_mask": loss_mask.long(),
        "target": torch.randn(len(lengths), width, generator=generator, dtype=torch.float64),
    }


def rank_rows(data: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the documents of one data-parallel rank; ranks differ in tokens and micro-batches."""
    count = data["input_ids"].shape[0]
    bounds = [0, *(max(r + 1, int(count * ((r + 1) / ranks) ** 1.5)) for r in range(ranks))]
    return {name: x[bounds[rank] : bounds[rank + 1]] for name, x in data.items()}


def compare(actual: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Return max|a - b| / max|b| of each tensor that this rank holds.

    Raises:
        AssertionError: shapes differ, or a reference tensor is all zero.
    """
    differences = {}
    for name, expected in reference.items():
        if name not in actual:
            continue
        scale = float(expected.abs().max())
        assert scale > 0, f"the reference's {name} is all zero"
        tensor = actual[name]
        assert tensor.shape == expected.shape, f"{name}: {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
        differences[name] = float((tensor.double() - expected.double()).abs().max()) / scale
    return differences


def check_layouts(family: CheckedFamily, folder: Path, *, seed: int = 0, tied: bool = False) -> list[LayoutResult]:
    """Compare each layout of two ranks with one process that has the same weights.

    Raises:
        ContractError: a layout differs, omits a gradient, or mixes documents.
    """
    fields = family.spec.model_args_class.hf_fields
    fixed = {name: value for name, value in SIZES.items() if name in fields}
    if "kv_lora_rank" in fields:  # every head has separate keys
        fixed["num_key_value_heads"] = fixed["num_attention_heads"]
    if "tie_word_embeddings" in fields:
        fixed["tie_word_embeddings"] = tied
    config = {"model_type": family.model_type}
    config |= draw_fields(seed, family.model_type, rope_kind="default", **fixed)
    model = fresh_checkpoint(folder, config, seed, torch.float64)
    checkpoint = folder / "weights"
    single = _engine(checkpoint, LayoutCase("d1"))
    _require_forward(single, load_model(checkpoint, dtype=torch.float64, text_only=True))
    actual = _measure(single)
    save_file(actual, folder / "reference.safetensors")
    sparse = any(layer.feed_forward.n_experts for layer in model.layer_specs)
    results, broken = [], []
    with Pool(2) as pool:
        for case in LAYOUTS:
            if case.needs_experts and not sparse:
                continue
            try:
                ranks = pool.run(measure_rank, family.target, str(checkpoint), case)
                results.append(_compare_case(case, ranks, actual.keys()))
            except (ContractError, RankError) as error:
                broken.append(f"{case.name}: {str(error).strip().splitlines()[-1]}")
    if broken:
        raise ContractError("; ".join(broken))
    return results


def _compare_case(case: LayoutCase, ranks: list[dict[str, float] | str], names: Any) -> LayoutResult:
    refused = [rank for rank in ranks if isinstance(rank, str)]
    if len(refused) == len(ranks):
        return LayoutResult(case.name, refused=refused[0])
    if refused:
        raise ContractError(f"only some ranks reject it: {refused[0]}")
    held = [rank for rank in ranks if isinstance(rank, dict)]
    if missing := set(names) - set().union(*held):
        raise ContractError(f"no rank holds {sorted(missing)[:3]}")
    worst, name = max((value, name) for rank in held for name, value in rank.items())
    if not worst <= FP64_TOLERANCE:
        raise ContractError(f"{name} differs by {worst:.1e} from one process")
    return LayoutResult(case.name, worst)


def measure_rank(target: str, checkpoint: str, case: LayoutCase) -> dict[str, float] | str:
    """Return this rank's differences from one process, or the reason of a rejected layout. A collective."""
    load_families(target)
    try:
        engine = _engine(Path(checkpoint), case)
    except FamilyError:
        raise
    except UserError as error:
        return str(error)
    actual = _measure(engine)
    return compare(actual, load_file(Path(checkpoint).parent / "reference.safetensors"))


def _engine(checkpoint: Path, case: LayoutCase) -> ArchonEngine:
    options = {"path": str(checkpoint), "device": "cpu", "dtype": "float64", "layout": case.layout, "vision": "off"}
    engine = ArchonEngine(EngineConfig.model_validate(options | {"max_tokens_per_mb": MAX_TOKENS} | case.options))
    engine.initialize()
    return engine


@torch.no_grad()
def _require_forward(engine: ArchonEngine, model: BaseArchonModel) -> None:
    """Check that the engine's scores of each document follow from the logits of the model's forward."""
    data = padded_batch(LENGTHS, VOCAB, 10)
    scores, expected = engine.forward_batch(data), []
    for tokens, length in zip(data["input_ids"], LENGTHS, strict=True):
        tokens, bounds = tokens[:length], torch.tensor([0, length], dtype=torch.int32)
        logprobs = model(tokens, torch.arange(length), bounds, length)[:-1].log_softmax(-1)
        expected.append(logprobs.gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1))
    actual = [row[1:length] for row, length in zip(scores, LENGTHS, strict=True)]
    if not (difference := relative_error(torch.cat(actual), torch.cat(expected))) <= FP64_TOLERANCE:
        raise ContractError(f"the engine's scores differ by {difference:.1e} from the logits of the model's forward")


def _measure(engine: ArchonEngine) -> dict[str, Tensor]:
    """Return loss, norm and all gradients of one batch, after checking that documents are isolated."""
    ranks = engine.ranks
    data = rank_rows(padded_batch(LENGTHS, VOCAB, 10), ranks.dp.rank, ranks.dp.size)
    grads, metrics = engine.gradients(data, SequenceLoss(), loss_token_count, 0.8, full=False)
    missing = dict(engine.model.named_parameters()).keys() - grads.keys()
    if missing:
        raise ContractError(f"{sorted(missing)[:3]} have no gradient")
    actual = {name: grad.clone() for name, grad in full_tensors(grads.items())}
    actual["loss"] = torch.tensor(metrics["loss"], dtype=torch.float64)
    actual["norm"] = torch.tensor(metrics["grad_norm"], dtype=torch.float64)
    _require_isolation(engine, data)
    return actual


def _require_isolation(engine: ArchonEngine, data: dict[str, Tensor]) -> None:
    """Check that a changed document leaves the scores of its neighbors unchanged."""
    changed, row = data["input_ids"].clone(), int(data["attention_mask"].sum(1).argmax())
    changed[row] = (changed[row] + 1) % VOCAB * data["attention_mask"][row]
    before, after = (engine.forward_batch(data | {"input_ids": ids}) for ids in (data["input_ids"], changed))
    differences = (before - after).abs().amax(1)
    if not differences[row] > 0:
        raise ContractError("a changed document keeps its scores")
    # Experts process their tokens together, in matmuls of other sizes.
    sparse = any(layer.feed_forward.n_experts for layer in engine.args.layer_specs)
    tolerance = FP64_TOLERANCE if sparse else 0.0
    differences[row] = 0
    if (difference := float(differences.max())) > tolerance:
        raise ContractError(f"a changed document changes another one's scores by {difference:.1e}")


def describe_layouts(results: list[LayoutResult]) -> str:
    """Return the verified and the rejected layouts as one line of text."""
    verified = [result.case for result in results if result.refused is None]
    refused = [result.case for result in results if result.refused is not None]
    return ", ".join(verified) + (f"; refused: {', '.join(refused)}" if refused else "")
