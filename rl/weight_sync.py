"""Passes weights from an engine in any layout to a generator in this process, or to inference servers."""

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
    """Return what a push after a step sends: the model, or where it is sharded over processes an iterator of its
    weights, or of a model with adapters of theirs alone; all ranks consume it."""
    if engine.lora:
        return engine.lora_weights()
    return engine.full_model if _is_plain(engine) else engine.weights()


def _is_plain(engine: ArchonEngine) -> bool:
    return engine.parallel_dims.world_size == 1 and not engine.lora


def build_inprocess_engine(engine: ArchonEngine, tokenizer: Any, **options: Any) -> InProcessEngine:
    """Return a generator with the engine's weights; each process gets a full replica of a sharded model.

    A replica of a model with adapters has them next to its frozen weights, as the trainer has, so that both compute the
    same. It shares those weights with a trainer that is one process.

    `options` are those of `InProcessEngine.from_model`. Raises `RolloutError` where replica and cache do not fit.
    """
    if _is_plain(engine):
        return InProcessEngine.from_model(engine.full_model, tokenizer, **options)
    source = chain(engine.base_weights(), engine.lora_weights())
    return InProcessEngine.from_model(engine.meta_model(), tokenizer, source=source, device=engine.device, **options)


@dataclass(frozen=True)
class PushedWeights:
    """The weights of an engine in any layout, for `RemoteEngine.update_weights`; all methods are collectives."""

    engine: ArchonEngine

    def write(self, transport: Transport, folder: Path, dtype: str | None) -> None:
        if transport == "lora":
            self.engine.save(folder, format="peft")
        else:
            self.engine.save(folder, dtype=None if dtype is None else getattr(torch, dtype))

    def tensors(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        engine, target = self.engine, None if dtype is None else getattr(torch, dtype)
        buffers = buffer_keys(engine.adapter)
        for name, tensor in engine.hf_weights(target, bucket_bytes=BUCKET_BYTES):
            yield name, tensor if target is None or name in buffers else tensor.to(target)

    def score(self, tokens: list[int]) -> list[float]:
        ids = torch.tensor([tokens])
        document = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
        document["loss_mask"] = torch.ones_like(ids)
        scores = score_sharded(self.engine.forward_batch, document, self.engine.ranks.dp, self.engine.device)
        return [float(x) for x in scores[0, 1:]]


def probe_tokens(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the tokens of up to `PROBE_TOKENS` prompts one after another, for `RemoteEngine.probe`.

    Empty where the rows are of a form that only the run's own workflow can read.
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
