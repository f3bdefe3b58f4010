"""lm-eval's own client against `archon serve`: the scores of its backend for transformers, on the same local tasks."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.rl.bootstrap import make_tokenizer
from archon.training.config import TokenizerRecipe
from tests.serve.served import served

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
output_type: {output}
"""
CHOICE = """doc_to_target: 0
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """doc_to_target: "{{target}}"
generation_kwargs: {until: ["+"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}


def write_checkpoint(folder: Path) -> tuple[Any, Any]:
    """A random Qwen3 by transformers, and a tokenizer of characters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet="0123456789+= ", chat_template="plain"))
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **ids, **SIZES))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_tasks(folder: Path, model: Any, tokenizer: Any) -> None:
    """Sum with two answers each to choose from, of which every other row has a likely wrong one, and sums to be
    answered, of which every other row wants what the model says."""
    rows = []
    for a, b in ((2, 3), (4, 3), (5, 1), (6, 2), (9, 7), (8, 8)):
        question, right = f"{a}+{b}=", str(a + b)
        ids = torch.tensor([tokenizer.encode(question)])
        said = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(said, skip_special_tokens=True).partition("+")[0]
        likely = len(rows) % 2 == 0
        other, target = (text[:1], right) if likely else (f"{a * b}0", text)
        rows.append({"question": question, "choices": [right, other], "target": target})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, output, rest in (("choice", "multiple_choice", CHOICE), ("answer", "generate_until", GENERATE)):
        task = TASK.format(name=f"sums_{name}", rows=folder / "rows.jsonl", output=output)
        (folder / f"{name}.yaml").write_text(task + rest)


if find_spec("lm_eval"):

    @pytest.mark.slow
    def test_scores_of_served_and_of_transformers_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        import lm_eval
        from lm_eval.tasks import TaskManager

        checkpoint = tmp_path / "checkpoint"
        write_tasks(tmp_path, *write_checkpoint(checkpoint))
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

        def evaluated(backend: str, **arguments: Any) -> dict[str, Any]:
            tasks = ["sums_choice", "sums_answer"]
            found: dict[str, Any] = lm_eval.simple_evaluate(
                model=backend, model_args=arguments, tasks=tasks, task_manager=manager, bootstrap_iters=0
            )
            return found

        direct = evaluated("hf", pretrained=str(checkpoint), device="cpu", dtype="float32")
        with served(checkpoint) as url:
            client = {"tokenizer": str(checkpoint), "tokenizer_backend": "huggingface", "max_length": 64}
            through = evaluated("local-completions", model="checkpoint", base_url=f"{url}/completions", **client)

        assert through["results"] == direct["results"]
        assert 0 < direct["results"]["sums_choice"]["acc,none"] < 1
        assert 0.5 <= direct["results"]["sums_answer"]["exact_match,none"] < 1
        for task, samples in direct["samples"].items():
            for one, other in zip(samples, through["samples"][task], strict=True):
                for (expected,), (found,) in zip(one["resps"], other["resps"], strict=True):
                    if task == "sums_answer":
                        assert found == expected
                    else:
                        assert tuple(found)[1] == expected[1]
                        assert found[0] == pytest.approx(expected[0], abs=1e-4)
