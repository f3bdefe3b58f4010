"""SmolLM2-135M-Instruct: what transformers computes with it, its layouts, its training, its export."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import archon
from archon.data.config import DatasetConfig
from archon.data.registry import load_rows
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.schema.config import EngineConfig
from archon.schema.errors import LayoutError
from archon.tools.check.rank_pool import Pool
from archon.training.metrics import read_jsonl
from tests.real.compare import QUESTIONS, answers, greedy_answers, perplexities, require_bitwise_export
from tests.tolerances import PARITY_FP32, REORDER_FP32

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
STEPS = 50


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    return archon.load_model(smollm2, dtype=torch.float32).requires_grad_(False)


@pytest.mark.xdist_group("smollm2-parity")
def test_greedy_answers_to_twenty_prompts_are_transformers_token_for_token(
    model: Any, reference: Any, tokenizer: Any
) -> None:
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    found, expected = greedy_answers(model, reference, tokenizer, prompts)
    assert found == expected
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    assert "Paris" in texts[0] and "5" in texts[1], "the model is a fluent one"


@pytest.mark.data
@pytest.mark.xdist_group("smollm2-parity")
def test_the_perplexity_of_two_hundred_answers_is_transformers(
    model: Any, reference: Any, tokenizer: Any, data_dir: Path
) -> None:
    documents = answers(data_dir, tokenizer, 200)
    found, expected = perplexities(model, reference, documents)
    assert 5 < expected < 100
    assert found == pytest.approx(expected, rel=1e-5)


def loss_batch(folder: str) -> dict[str, Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [question + " I do not know." * n for n, question in enumerate(QUESTIONS[:6])]
    documents = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, documents))
    ids = torch.tensor([[*document, *[0] * (width - len(document))] for document in documents])
    mask = torch.arange(width) < torch.tensor([len(document) for document in documents]).unsqueeze(1)
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": mask.long()}


def layout_loss(folder: str, layout: str, options: dict[str, Any]) -> float:
    """The loss of a small batch; every rank of the layout calls it."""
    config = {"path": folder, "device": "cpu", "dtype": "float32", "layout": layout, "optimizer": None}
    engine = ArchonEngine(EngineConfig.model_validate(config | {"max_tokens_per_mb": 256} | options))
    engine.initialize()
    ranks = engine.ranks
    rows = {name: x[ranks.dp.rank :: ranks.dp.size] for name, x in loss_batch(folder).items()}
    return engine.eval_batch(rows, CrossEntropyLoss(), loss_token_count)["loss"]


@pytest.mark.xdist_group("smollm2-ranks")
def test_every_layout_of_two_ranks_gives_the_loss_of_one_process(smollm2: Path, reference: Any) -> None:
    alone = layout_loss(str(smollm2), "d1", {})
    batch = loss_batch(str(smollm2))
    labels = batch["input_ids"].masked_fill(~batch["attention_mask"], -100)[:, 1:].flatten()
    with torch.no_grad():
        out = reference(batch["input_ids"], attention_mask=batch["attention_mask"].long())
    assert alone == pytest.approx(float(F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels)), rel=PARITY_FP32)
    with Pool(2) as pool:
        for layout, options in (("d2", {}), ("r2", {}), ("c2", {"context_parallel": "allgather"}), ("p2", {})):
            found = pool.run(layout_loss, str(smollm2), layout, options)
            assert found == pytest.approx([alone] * 2, rel=REORDER_FP32), layout
    for layout, options in (("t2", {}), ("c2", {"context_parallel": "ulysses"})):
        with pytest.raises(LayoutError, match=r"\b9\b.*heads|heads.*\b9\b"):
            layout_loss(str(smollm2), layout, options)


@pytest.mark.xdist_group("smollm2-export")
def test_an_export_is_bitwise_the_checkpoint(model: Any, smollm2: Path, tmp_path: Path) -> None:
    require_bitwise_export(model, smollm2, tmp_path / "out")


@torch.no_grad()
def held_out_loss(model: Any, rows: Sequence[dict[str, Any]]) -> float:
    """The mean cross entropy of the rows' answers, each row alone."""
    total, count = 0.0, 0
    for row in rows:
        tokens, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"]).bool()
        length = len(tokens)
        logits = model(tokens, torch.arange(length), torch.tensor([0, length], dtype=torch.int32), length)
        total += float(F.cross_entropy(logits[:-1][mask[1:]].double(), tokens[1:][mask[1:]], reduction="sum"))
        count += int(mask[1:].sum())
    return total / count


@pytest.mark.data
@pytest.mark.xdist_group("smollm2-export")
def test_fifty_steps_of_sft_on_gsm8k_lower_its_loss(
    model: Any, tokenizer: Any, smollm2: Path, data_dir: Path, tmp_path: Path
) -> None:
    config = {
        "run_dir": str(tmp_path / "run"),
        "total_steps": STEPS,
        "batch_size": 2,
        "eval_every": STEPS,
        "model": {"path": str(smollm2), "device": "cpu", "optimizer": {"lr": 3e-5}, "max_tokens_per_mb": 256},
        "train_data": {"path": "gsm8k", "data_dir": str(data_dir / "gsm8k"), "max_length": 120, "limit": 600},
        "eval_data": {
            "path": "gsm8k", "data_dir": str(data_dir / "gsm8k"), "split": "test", "max_length": 120, "limit": 200,
        },
        "checkpoint": {"every": 0},
    }  # fmt: skip
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "archon", "sft", "--config", str(tmp_path / "sft.yaml")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *_, last = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert last["step"] == STEPS
    rows = load_rows(DatasetConfig.model_validate(config["eval_data"]), "sft", tokenizer)
    assert len(rows) >= 10
    trained = archon.load_model(tmp_path / "run" / "export", dtype=torch.float32)
    before, after = held_out_loss(model, rows), held_out_loss(trained, rows)
    assert after == pytest.approx(last["eval/loss"], rel=1e-5), "the export is what was evaluated"
    assert after < before - 0.05
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32)
    tokens = torch.arange(100, 140)
    with torch.no_grad():
        ours = trained(tokens, torch.arange(40), torch.tensor([0, 40], dtype=torch.int32), 40)
        expected = theirs(tokens[None]).logits[0]
    assert float((ours - expected).abs().max() / expected.abs().max()) <= PARITY_FP32
