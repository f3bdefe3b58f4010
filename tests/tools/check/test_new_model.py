"""`archon new-model` writes a family's file from a config and the keys of its checkpoint."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from archon.cli.new_model import command
from archon.schema.errors import ConfigError
from archon.tools.check.contracts import CONTRACTS
from archon.tools.check.oracle import checkpoint_tensors, family_config, hf_model, random_config
from tests.tools.check.test_check_model import check_model
from tests.warm import run_archon

NEW_TYPE = "my_llama"


def write_model(folder: Path, family: str, weights: bool = True, **fields: Any) -> Path:
    """A config of `family` under a new name and with further fields, and its checkpoint."""
    folder.mkdir()
    config = random_config(1, family)
    (folder / "config.json").write_text(json.dumps(family_config(config, NEW_TYPE) | fields))
    if weights:
        torch.manual_seed(0)
        tensors = {name: tensor.clone() for name, tensor in checkpoint_tensors(hf_model(config)).items()}
        save_file(tensors, folder / "model.safetensors")
    return folder


def new_model(source: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints."""
    capsys.readouterr()
    command(source, target)
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_llama_under_another_name_becomes_a_family_that_passes(tmp_path: Path) -> None:
    source, file = write_model(tmp_path / "model", "llama"), tmp_path / "my_llama.py"
    done = run_archon("new-model", source, "--output", file)
    assert done.returncode == 0, done.stderr
    assert "nearest       llama" in done.stdout, done.stdout
    assert re.search(r"(\d+) of \1 tensors covered", done.stdout), done.stdout
    assert "not covered" not in done.stdout
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    assert [node.name for node in nodes if isinstance(node, ast.ClassDef)] == ["MyLlamaModelArgs"]
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert {"MyLlamaModel", "MyLlamaStateDictAdapter", "parallelize_my_llama", "SPEC"} <= stored
    contracts = [contract for contract in CONTRACTS if contract != "two ranks"]
    checked = check_model(file, "--reference", "llama", *(x for name in contracts for x in ("--only", name)))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("✓") == len(contracts)


@pytest.mark.slow
def test_such_a_family_trains_on_two_ranks(tmp_path: Path) -> None:
    source, file = write_model(tmp_path / "model", "llama", weights=False), tmp_path / "my_llama.py"
    command(source / "config.json", file)
    checked = check_model(file, "--only", "two ranks")
    assert checked.returncode == 0 and "d2, t2, c2 allgather, c2 ulysses, p2" in checked.stdout, checked.stdout


def test_the_keys_of_the_checkpoint_choose_the_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without keys Qwen2's and Qwen3's configs are alike."""
    said = new_model(write_model(tmp_path / "model", "qwen3"), tmp_path / "new.py", capsys)
    assert "nearest       qwen3\n" in said and "not covered" not in said, said


def test_what_no_layer_covers_is_said_and_stands_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model(tmp_path / "model", "llama", hash_routing=7, logits_cube=True)
    tensors = load_file(source / "model.safetensors")
    tensors |= {f"model.layers.{layer}.hash.table": torch.zeros(3, 5) for layer in range(2)}
    save_file(tensors, source / "model.safetensors")
    said = new_model(source, tmp_path / "new.py", capsys)
    for gap in ("'hash_routing' is 7", "'logits_cube' is True", "model.layers.{}.hash.table [3, 5] (2 tensors)"):
        assert gap in said, said
        assert gap in (tmp_path / "new.py").read_text()


def test_a_field_of_another_family_is_taken_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Granite's config has no final_logit_softcapping, Gemma 3's has: the name is read as there."""
    source = write_model(tmp_path / "model", "granite", final_logit_softcapping=30.0)
    said = new_model(source, tmp_path / "new.py", capsys)
    assert "from others   final_logit_softcapping: logits_soft_cap" in said and "not covered" not in said, said
    field = '"final_logit_softcapping": Field("logits_soft_cap", float, None, null=None),'
    assert field in (tmp_path / "new.py").read_text()


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("llama", "already belongs to family 'llama'"),
        ("a b", "a valid Python module name"),
        (NEW_TYPE, "already exists"),
    ],
)
def test_a_supported_type_a_bad_name_and_a_file_that_is_there_are_refused(
    tmp_path: Path, model_type: str, said: str
) -> None:
    source, file = write_model(tmp_path / "model", "llama", weights=False), tmp_path / "new.py"
    config = json.loads((source / "config.json").read_text()) | {"model_type": model_type}
    (source / "config.json").write_text(json.dumps(config))
    file.write_text("mine")
    with pytest.raises(ConfigError, match=said):
        command(source, file)
    assert file.read_text() == "mine"
