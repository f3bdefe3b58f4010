"""A tokenizer knows every id that ends an answer, generation stops there, and an export names them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.chat_template import stop_token_ids
from archon.checkpoint.tokenizer import load_tokenizer, write_tokenizer
from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.schema.errors import TokenizerError
from tests.data.toy_tokenizers import CHATML, toy_tokenizer
from tests.small_qwen3 import small_model

OTHER = CHATML.replace("<|im_end|>", "<|end|>")


def save(folder: Path, template: str | None = None, **configs: Any) -> Path:
    tokenizer = toy_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.save_pretrained(folder)
    for name, eos in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(eos))
    return folder


def stops(folder: Path, *model: Path) -> list[int]:
    return sorted(stop_token_ids(load_tokenizer(folder, *model)))


def test_the_stop_ids_come_from_configs_tokenizer_and_template(tmp_path: Path) -> None:
    eos = 1  # <|im_end|>
    end = len(toy_tokenizer())
    assert stops(save(tmp_path / "plain")) == [eos]
    assert stops(save(tmp_path / "list", generation_config={"eos_token_id": [7, 9]})) == [eos, 7, 9]
    assert stops(save(tmp_path / "one", config={"eos_token_id": 7, "text_config": {"eos_token_id": 8}})) == [eos, 7, 8]
    both = {"generation_config": {"eos_token_id": 9}, "config": {"eos_token_id": 7}}
    assert stops(save(tmp_path / "both", **both)) == [eos, 9]
    assert stops(save(tmp_path / "chat", OTHER, generation_config={"eos_token_id": None})) == [eos, end]
    assert stops(tmp_path / "chat", tmp_path / "list") == [eos, 7, 9, end]
    with pytest.raises(TokenizerError, match=r"eos_token_id is .* expected token ids"):
        load_tokenizer(save(tmp_path / "bad", generation_config={"eos_token_id": ["</s>"]}))


def test_an_export_names_every_stop_id_once_and_keeps_the_rest(tmp_path: Path) -> None:
    model = save(tmp_path / "model", generation_config={"eos_token_id": 7, "temperature": 0.6})
    chat = save(tmp_path / "chat", OTHER)
    for number, tokenizer in enumerate((load_tokenizer(chat, model), chat)):
        export = tmp_path / f"export{number}"
        export.mkdir()
        write_tokenizer(export, tokenizer, model)
        written = json.loads((export / "generation_config.json").read_text())
        assert written["temperature"] == 0.6 and sorted(written["eos_token_id"]) == stops(chat, model)
        assert stops(export) == stops(chat, model)
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (export / name).read_bytes() == (chat / name).read_bytes()


def test_generation_stops_at_each_of_them(tmp_path: Path) -> None:
    model = small_model(vocab_size=500)
    folder = save(tmp_path / "model")
    request = [5, 6, 7]

    def answer(ids: list[int]) -> list[int]:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        engine = InProcessEngine.from_model(model, load_tokenizer(folder), max_slots=1)
        gconfig = GenerationHyperparameters(max_new_tokens=12, greedy=True)
        return asyncio.run(engine.agenerate(ModelRequest(request, gconfig))).output_tokens

    free = answer([])
    stop = next(token for token in free[3:] if token not in free[:3])
    assert answer([stop]) == free[: free.index(stop) + 1]


def test_a_tokenizer_that_was_changed_is_exported_as_it_is(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path / "model", CHATML))
    tokenizer.chat_template = OTHER
    write_tokenizer(tmp_path, tokenizer, None)
    assert load_tokenizer(tmp_path).chat_template == OTHER
