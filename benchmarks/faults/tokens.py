"""Were all tokens trained on with the logprob that the weights of their version give them? By the checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from archon.checkpoint.native import open_state
from archon.checkpoint.tokenizer import load_tokenizer
from archon.engine.engine import ArchonEngine
from archon.schema.config import EngineConfig
from archon.training.metrics import TRAJECTORIES_FILE, read_jsonl

_OF_OPTIMIZERS = ("optimizer", "scheduler", "skipped_steps")

Row = dict[str, Any]


def token_differences(run_dir: Path, blank: Path) -> dict[str, Any]:
    """Return the largest |Δ logprob| between recorded tokens and the checkpoint of their version.

    Every step's checkpoint must exist; `blank` is the initial model. `resolution` is the smallest mean |Δ logprob|
    between tokens of a version and the weights of the version before, the signature of a server that is one push
    behind.
    """
    engine, tokenizer = _model(blank), load_tokenizer(blank)
    rows: defaultdict[int, list[Row]] = defaultdict(list)
    for row in read_jsonl(run_dir / TRAJECTORIES_FILE):
        for version in {row["version"]} if "version" in row else {*row["versions"]}:
            rows[version].append(row)
    largest, behind, tokens = 0.0, float("inf"), 0
    previous: int | None = None
    for version in sorted(rows):
        given = list(_given(rows[version], version))
        documents = _documents(rows[version], tokenizer)
        if previous == version - 1:  # the engine still has these weights
            behind = min(behind, float(_differences(engine, documents, given).mean()))
        _load(engine, run_dir / "checkpoints", version)
        differences = _differences(engine, documents, given)
        largest, tokens, previous = max(largest, float(differences.max())), tokens + len(differences), version
    return {"tokens": tokens, "largest_token_difference": largest, "resolution": behind}


def _model(blank: Path) -> ArchonEngine:
    engine = ArchonEngine(EngineConfig(path=str(blank), init_from_scratch=True, optimizer=None, device="cpu"))
    engine.initialize()
    return engine


def _load(engine: ArchonEngine, checkpoints: Path, version: int) -> None:
    """Load the weights after step `version` into the engine; without a step, it has them already."""
    if not version:
        return
    # A step that was trained again is saved under a further name.
    *_, newest = sorted(checkpoints.glob(f"step-{version:08d}*"), key=lambda path: (len(path.name), path.name))
    with open_state(newest) as (_, state):
        own = state["engine"]
        engine.load_state_dict({name: part for name, part in own.items() if name not in _OF_OPTIMIZERS})


def _given(rows: list[Row], version: int) -> Iterator[tuple[int, int, float]]:
    """Yield (row, place in its answer, logprob) of each token of a version."""
    for number, row in enumerate(rows):
        versions = row.get("versions", [version] * len(row["tokens"]))
        for place, (own, logprob) in enumerate(zip(versions, row["logprobs"], strict=True)):
            if own == version:
                yield number, place, logprob


def _documents(rows: list[Row], tokenizer: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return prompts with their answers, [B, S], and where each answer begins."""
    prompts = [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows]
    whole = [
        [*prompt, *tokenizer.convert_tokens_to_ids(row["tokens"])] for prompt, row in zip(prompts, rows, strict=True)
    ]
    ids = torch.zeros(len(rows), max(map(len, whole)), dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for number, document in enumerate(whole):
        ids[number, : len(document)] = torch.tensor(document)
        mask[number, : len(document)] = True
    batch = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask.long()}
    return batch, [len(prompt) for prompt in prompts]


def _differences(
    engine: ArchonEngine,
    documents: tuple[dict[str, torch.Tensor], list[int]],
    given: list[tuple[int, int, float]],
) -> torch.Tensor:
    """Return |Δ logprob| of each token."""
    batch, begins = documents
    scores = engine.forward_batch(batch)
    own = torch.stack([scores[row, begins[row] + place] for row, place, _ in given])
    return (own - torch.tensor([logprob for *_, logprob in given])).abs()
