"""Weight sync from an engine in any layout to an in-process generator or inference servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from archon.checkpoint.hf_export import buffer_keys
from archon.data.encoding import encode_prompt
from archon.engine.engine import ArchonEngine
from archon.generation import InProcessEngine
from archon.generation.replica import WeightSource
from archon.parallel.gather import BUCKET_BYTES
from archon.remote.dialects.base import Transport
from archon.remote.engine import PROBE_TOKENS, RemoteEngine
from archon.training.batch_sharding import score_sharded


def engine_weights(engine: ArchonEngine) -> WeightSource:
    """Return the weights for an in-process push: the model, or an iterator that all ranks consume.

    A sharded model yields its gathered weights, and a LoRA model only the LoRA weights.
    """
    if engine.lora:
        return engine.lora_weights()
    return engine.full_model if _is_plain(engine) else engine.weights()


def _is_plain(engine: ArchonEngine) -> bool:
    return engine.parallel_dims.world_size == 1 and not engine.lora


def build_inprocess_engine(engine: ArchonEngine, tokenizer: Any, **options: Any) -> InProcessEngine:
    """Return a generator with the engine's weights; each process gets a full replica of a sharded model.

    A LoRA replica keeps the LoRA separate from the frozen weights, like the trainer, so both compute the same. A
    single-process trainer shares the frozen weights.

    `options` are the options of `InProcessEngine.from_model`. Raises `RolloutError` if replica and cache do not fit.
    """
    if _is_plain(engine):
        return InProcessEngine.from_model(engine.full_model, tokenizer, **options)
    source = chain(engine.base_weights(), engine.lora_weights())
    return InProcessEngine.from_model(engine.meta_model(), tokenizer, source=source, device=engine.device, **options)


@dataclass(frozen=True)
class PushedWeights:
    """Weights of an engine in any layout for `RemoteEngine.update_weights`; all methods are collectives."""

    engine: ArchonEngine

    def write(self, transport: Transport, folder: Path, dtype: str | None) -> None:
        """Write a checkpoint, or the LoRA in PEFT's format, from rank 0."""
        if transport == "lora":
            self.engine.save(folder, format="peft")
        else:
            self.engine.save(folder, dtype=None if dtype is None else getattr(torch, dtype))

    def tensors(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, whole tensor); every rank must consume all tensors."""
        engine, target = self.engine, None if dtype is None else getattr(torch, dtype)
        buffers = buffer_keys(engine.adapter)
        for name, tensor in engine.hf_weights(target, bucket_bytes=BUCKET_BYTES):
            yield name, tensor if target is None or name in buffers else tensor.to(target)

    def score(self, tokens: list[int]) -> list[float]:
        """Return the trainer's logprobs of tokens 1 to L − 1 at temperature 1, on every rank."""
        ids = torch.tensor([tokens])
        document = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
        document["loss_mask"] = torch.ones_like(ids)
        scores = score_sharded(self.engine.forward_batch, document, self.engine.ranks.dp, self.engine.device)
        return [float(x) for x in scores[0, 1:]]


def probe_tokens(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return concatenated prompt tokens, at least `PROBE_TOKENS` if possible, for `RemoteEngine.probe`.

    The result is empty if only the run's workflow can read the rows.
    """
    tokens: list[int] = []
    for row in rows[:PROBE_TOKENS]:
        if "messages" not in row and "prompt" not in row:
            return []
        tokens += encode_prompt(tokenizer, row)
        if len(tokens) >= PROBE_TOKENS:
            break
    return tokens


def generator_weights(engine: ArchonEngine, generator: InProcessEngine | RemoteEngine) -> Any:
    """Return the engine's weights as the generator's `update_weights` takes them."""
    return PushedWeights(engine) if isinstance(generator, RemoteEngine) else engine_weights(engine)
