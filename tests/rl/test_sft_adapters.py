"""`archon sft` of several adapters: each learns its own rows, as in a run of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.checkpoint.convert import convert
from archon.checkpoint.peft.export import export_lora
from archon.checkpoint.safetensors_file import SafetensorsFile, tensor_bytes
from archon.checkpoint.tokenizer import load_tokenizer
from archon.engine.engine import ArchonEngine
from archon.rl import SFTTrainer
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.training.config import SFTConfig
from archon.training.metrics import read_jsonl

LONG: dict[str, Any] = {"rank": 4, "alpha": 8.0, "init": "random", "optimizer": {"lr": 1e-2}}
SHORT: dict[str, Any] = {"rank": 2, "seed": 3, "scheduler": {"kind": "cosine"}, "total_steps": 4}
OPTIMIZER = {"lr": 5e-3}


@pytest.fixture(scope="module")
def folder(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and two sets of rows: numbers reversed, and numbers repeated."""
    folder = tmp_path_factory.mktemp("loras")
    for name, answer in (("reversed", lambda i: str(i)[::-1]), ("repeated", lambda i: str(i) * 2)):
        for split, numbers in (("train", range(40)), ("test", range(40, 52))):
            rows = [{"prompt": f"{i}=", "response": answer(i)} for i in numbers]
            file = folder / name / f"{split}.jsonl"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = ArchonEngine(EngineConfig(path=str(blank), init_from_scratch=True, dtype="float64", device="cpu"))
    engine.initialize()
    engine.save(folder / "base")
    return folder


def config_of(
    folder: Path, run: Path, lora: dict[str, Any] | None, rows: str = "reversed", **changes: Any
) -> SFTConfig:
    model = {"path": str(folder / "base"), "device": "cpu", "dtype": "float64", "optimizer": OPTIMIZER, "lora": lora}
    model |= changes.pop("model", {})
    data = {"train_data": {"path": str(folder / rows)}, "eval_data": {"path": str(folder / rows), "split": "test"}}
    common = {"run_dir": str(run), "total_steps": 6, "batch_size": 8, "eval_every": 0, "model": model}
    return SFTConfig.parse(common | data | changes)


def both(folder: Path, run: Path, **changes: Any) -> SFTConfig:
    repeated = {"path": str(folder / "repeated")}
    data = {"short": {"train_data": repeated, "batch_size": 4, "eval_data": repeated | {"split": "test"}}}
    return config_of(folder, run, {"loras": {"long": LONG, "short": SHORT}}, lora_data=data, **changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    with SafetensorsFile(folder / "adapter_model.safetensors") as file:
        for name, entry in file.entries.items():
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            file.read_into(tensor_bytes(tensors[name]), entry.start, name)
    return tensors


TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def tokenizer_files(folder: Path) -> dict[str, str]:
    """The files of a tokenizer and the generation config, by name."""
    patterns = ("*token*", "generation_config.json", "*.jinja", "*/*.jinja")
    return {str(f.relative_to(folder)): f.read_text() for pattern in patterns for f in folder.glob(pattern)}


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_a_later_export_of_a_checkpoint_has_the_runs_tokenizer(
    folder: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    """The tokenizer of another folder, every chat template, the separator and every stop id; not the base's."""
    tokenizer = load_tokenizer(folder / "base")
    tokenizer.chat_template = {"default": TEMPLATE, "other": TEMPLATE + "0"}
    tokenizer.pad_token = "0"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 5}')
    run = tmp_path / "run"
    SFTTrainer(config_of(folder, run, lora, tokenizer=str(tmp_path / "tokenizer"))).train()
    if lora is None:
        convert(run / "checkpoints", tmp_path / "dcp", "dcp", like=folder / "base")
        convert(tmp_path / "dcp", tmp_path / "export", "hf")
        convert(run / "checkpoints", tmp_path / "native", "native", like=folder / "base")
        convert(tmp_path / "native", tmp_path / "again", "hf", like=folder / "base")
    else:
        export_lora(run, tmp_path / "export", folder / "base")
        convert(folder / "base", tmp_path / "again", "hf", lora=run)
    expected = tokenizer_files(run / "export")
    assert {"chat_template.jinja", "additional_chat_templates/other.jinja"} < expected.keys()
    assert 5 in json.loads(expected["generation_config.json"])["eos_token_id"]
    assert tokenizer_files(tmp_path / "export") == tokenizer_files(tmp_path / "again") == expected


def test_each_adapter_of_a_run_is_that_of_a_run_of_its_own(folder: Path, tmp_path: Path) -> None:
    SFTTrainer(both(folder, tmp_path / "both")).train()
    long = dict(LONG)
    own = {"optimizer": long.pop("optimizer")}
    SFTTrainer(config_of(folder, tmp_path / "long", long, model=own)).train()
    short = {key: x for key, x in SHORT.items() if key not in ("scheduler", "total_steps")}
    own = {"scheduler": SHORT["scheduler"]}
    SFTTrainer(config_of(folder, tmp_path / "short", short, "repeated", model=own, batch_size=4, total_steps=4)).train()
    rows = read_jsonl(tmp_path / "both" / "metrics.jsonl")
    for name in ("long", "short"):
        together = weights(tmp_path / "both/export" / name)
        for key, tensor in weights(tmp_path / name / "export").items():
            assert float((together[key] - tensor).norm() / tensor.norm()) <= 1e-10, (name, key)
        alone = read_jsonl(tmp_path / name / "metrics.jsonl")
        for step, row in enumerate(alone):
            for key in ("loss", "lr", "grad_norm", "token_prob", "tokens"):
                assert abs(rows[step][f"{name}/{key}"] - row[key]) <= 1e-10 * max(1, abs(row[key])), (name, step, key)
        assert abs(rows[-1][f"eval/{name}/loss"] - alone[-1]["eval/loss"]) <= 1e-10
    assert "short/loss" not in rows[4], "its schedule had ended"


def test_a_run_of_several_adapters_resumes_bitwise(folder: Path, tmp_path: Path) -> None:
    SFTTrainer(both(folder, tmp_path / "whole")).train()
    SFTTrainer(both(folder, tmp_path / "parts", total_steps=3)).train()
    SFTTrainer(both(folder, tmp_path / "parts", resume=True)).train()
    for name in ("long", "short"):
        parts = weights(tmp_path / "parts/export" / name)
        assert all(torch.equal(parts[key], x) for key, x in weights(tmp_path / "whole/export" / name).items())


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (
            {"nobody": {"train_data": {"path": "x"}}},
            "lora_data names nobody, but model.lora.loras names long",
        ),
        (
            {name: {"train_data": {"path": "x"}} for name in ("long", "short")},
            "so train_data is unused",
        ),
    ],
)
def test_rows_without_an_adapter_are_refused(
    folder: Path, tmp_path: Path, data: dict[str, Any], complaint: str
) -> None:
    config = config_of(folder, tmp_path / "run", {"loras": {"long": LONG, "short": SHORT}}, lora_data=data)
    with pytest.raises(ConfigError, match=complaint):
        SFTTrainer(config).train()


def test_a_run_ends_with_the_last_step_of_the_last_adapter(folder: Path, tmp_path: Path) -> None:
    lora = {"loras": {"long": LONG | {"total_steps": 3}, "short": SHORT | {"total_steps": 2}}}
    SFTTrainer(config_of(folder, tmp_path / "run", lora, total_steps=6)).train()
    assert len([row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]) == 3


def test_a_run_exports_the_tokenizer_that_it_was_trained_with(folder: Path, tmp_path: Path) -> None:
    """Full weights, one LoRA, two LoRAs, and a LoRA merged into its base."""
    tokenizer = load_tokenizer(folder / "base")
    template = tokenizer.chat_template + "{# trained #}"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "trained")
    one = {"rank": 2, "alpha": 4.0}
    exports = {"full": [""], "lora": [""], "loras": ["long", "short"]}
    loras = {"full": None, "lora": one, "loras": {"loras": {"long": LONG, "short": SHORT}}}
    for name, lora in loras.items():
        changes = {"tokenizer": str(tmp_path / "trained"), "total_steps": 1, "eval_data": None}
        SFTTrainer(config_of(folder, tmp_path / name, lora, **changes)).train()
        for export in exports[name]:
            assert load_tokenizer(tmp_path / name / "export" / export).chat_template == template
    convert(folder / "base", tmp_path / "merged", "hf", lora=tmp_path / "lora" / "export")
    assert load_tokenizer(tmp_path / "merged").chat_template == template
    export_lora(tmp_path / "lora" / "export", tmp_path / "again", folder / "base")
    assert load_tokenizer(tmp_path / "again").chat_template == template
