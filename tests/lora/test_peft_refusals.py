"""Folders of adapters from anyone: what does not fit, contradicts itself or is made to do harm is one clear line."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archon.checkpoint.peft.reader import read_lora_tensors, read_sizes
from archon.checkpoint.safetensors_file import SafetensorsFile
from archon.models import get_model_spec
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError
from tests.lora.oracle import base_of, engine_of

pytestmark = pytest.mark.unsampled

LORA: dict[str, Any] = {"rank": 2, "alpha": 4, "init": "random"}
EXPERTS = "base_model.model.model.layers.0.mlp.experts"
QUERIES = "model.layers.1.self_attn.q_proj"

Tensors = dict[str, Tensor]


class Folder:
    """An adapter that archon wrote of a mixture of experts, and the names of its model."""

    def __init__(self, path: Path, adapter: BaseStateDictAdapter) -> None:
        self.path, self.adapter = path, adapter

    def change(self, target: Path, fields: dict[str, Any], tensors: Callable[[Tensors], Any] | None = None) -> None:
        """Read a copy of the folder with other fields and tensors."""
        shutil.copytree(self.path, target, dirs_exist_ok=True)
        file, config = target / "adapter_model.safetensors", target / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        if tensors is not None:
            with SafetensorsFile(file) as opened:
                metadata = opened.metadata
            found = load_file(file)
            tensors(found)
            save_file(found, file, metadata)
        sizes = read_sizes(target, self.adapter)
        assert sizes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    """Experts stacked and one by one."""
    folder = tmp_path_factory.mktemp("folders")
    base = base_of("qwen3_moe", folder / "base")
    found = {}
    for experts in ("stacked", "per_expert"):
        engine = engine_of(base, lora=LORA | {"export_experts": experts})
        engine.save(folder / experts, "peft")
        found[experts] = Folder(folder / experts, engine.adapter)
    return found


def rename(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda x: [x.update({key.replace(old, new): x.pop(key)}) for key in [*x] if old in key]


REFUSED_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "key .*q_proj.lora_magnitude_vector' is missing, and use_dora of .* is true"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only', which archon does not support"),
    "bias of adapters": ({"lora_bias": True}, "lora_bias is True, which archon does not support"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "lm_head.weight' is missing, and modules_to_save of .* names"),
    "tokens": ({"trainable_token_indices": [1]}, r"trainable_token_indices is \[1\], which archon does not support"),
    "layers twice": ({"layer_replication": [[0, 2]]}, "layer_replication is .* which archon does not support"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which archon does not support"),
    "another rank": ({"rank_pattern": {QUERIES: 3}}, "has rank 2, but adapter_config.json says 3"),
    "a rank that is no number": ({"rank_pattern": {"q_proj": 2.0}}, r"\['q_proj'\] is 2.0; expected a positive whole"),
    "an endless alpha": ({"alpha_pattern": {"q_proj": float("inf")}}, r"\['q_proj'\] is inf; expected a positive num"),
    "a regular expression that takes forever": (
        {"rank_pattern": {"(.+)+x": 1}},
        "rank_pattern has .* it repeats a group, which is refused, since such an expression can take",
    ),
    "one in target_modules": (
        {"target_modules": "(.+)+x"},
        "target_modules is .* no valid regular expression of names",
    ),
    "one in exclude_modules": (
        {"exclude_modules": "(.+)+x"},
        "exclude_modules is .* no valid regular expression of names",
    ),
    "many of them": ({"alpha_pattern": {f".*{i}": 1 for i in range(999)}}, "of more than 1000 characters together"),
    "targets without one": (
        {"target_modules": ["k_proj"]},
        r"'model.layers.0.self_attn.q_proj', but target_modules does",
    ),
    "another regular expression": ({"target_modules": r".*\.k_proj"}, "target_modules does not name it"),
    "excluded": ({"exclude_modules": ["self_attn.o_proj"]}, r"o_proj', but exclude_modules names it"),
    "other layers": (
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "layers_to_transform": [0]},
        r"'model\.layers\.1\..* layers_to_transform, \[0\], does not have its layer",
    ),
    "no layers": ({"layers_to_transform": "0"}, "layers_to_transform is '0'; expected numbers of layers"),
    "stacks not named": (
        {"target_parameters": None},
        "target_parameters of adapter_config.json lacks all of .*gate_up",
    ),
    "one stack of two": ({"target_parameters": ["down_proj"]}, r"base_layer\.lora_A.* is no LoRA of this model's"),
    "a parameter of no model": (
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.experts.nothing"]},
        "mlp.experts.nothing, which the model does not have; expected its stacked experts, mlp.experts.down_proj, mlp",
    ),
    "a parameter of one layer too many": (
        {"target_parameters": ["gate_up_proj", "down_proj", "layers.9.self_attn.q_proj.weight"]},
        "target_parameters names layers.9.self_attn.q_proj.weight, which",
    ),
    "a further stack": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "is no LoRA of this model's"),
    "parameters in one text": ({"target_parameters": "down_proj"}, "target_parameters is .*; expected a list of names"),
    "a version of nobody": ({"peft_version": "new"}, "peft_version is 'new'; expected for example '0.21.2'"),
    "a base that no file system holds": (
        {"base_model_name_or_path": "x" * 10**6},
        "base_model_name_or_path is 'x+; expected null or a text of at most 1024 printable characters",
    ),
    "a base with NUL": ({"base_model_name_or_path": "a\0b"}, "expected null or a text of at most 1024 printable"),
    "a base of an object": ({"base_model_name_or_path": {"a": 1}}, r"base_model_name_or_path is \{'a': 1\}; expected"),
    "a revision of a list": ({"base_model_name_or_path": "a/b", "revision": [1]}, r"revision is \[1\]; expected null"),
    "another version": ({"peft_version": "0.18.0"}, "expected .* as PEFT 0.18.0 stacks experts"),
}


@pytest.mark.parametrize("mistake", REFUSED_FIELDS)
def test_fields_that_contradict_the_tensors_or_archon(folders: dict[str, Folder], tmp_path: Path, mistake: str) -> None:
    fields, complaint = REFUSED_FIELDS[mistake]
    begun = time.process_time()
    with pytest.raises(CheckpointError, match=complaint) as error:
        folders["stacked"].change(tmp_path, fields)
    assert "\n" not in str(error.value)
    assert time.process_time() - begun < 2


def test_modules_named_in_full_are_of_any_layer(folders: dict[str, Folder], tmp_path: Path) -> None:
    """As in PEFT, which compares `layers_to_transform` only with modules that are named by their ends."""
    config = json.loads((folders["stacked"].path / "adapter_config.json").read_text())
    assert QUERIES in config["target_modules"]
    folders["stacked"].change(tmp_path / "full", {"layers_to_transform": [0]})
    ends = sorted({name.rpartition(".")[2] for name in config["target_modules"]})
    with pytest.raises(CheckpointError, match=r"layers_to_transform, \[0\], does not have its layer"):
        folders["stacked"].change(tmp_path / "ends", {"target_modules": ends, "layers_to_transform": [0]})


def test_all_linear_of_a_folder_is_every_linear_layer_as_in_peft(folders: dict[str, Folder], tmp_path: Path) -> None:
    """PEFT writes the modules that it found; a folder with the word itself must hold all of them too."""
    fields: dict[str, Any] = {"target_modules": "all-linear", "layers_to_transform": [0]}
    folders["stacked"].change(tmp_path / "whole", fields)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        module = QUERIES.replace("q_proj", name)
        with pytest.raises(CheckpointError, match=f"it has no LoRA of '{module}', which target_modules"):
            folders["stacked"].change(tmp_path / name, fields, drop(module))
    fields["exclude_modules"] = ["q_proj"]
    with pytest.raises(CheckpointError, match="q_proj', but exclude_modules names it"):
        folders["stacked"].change(tmp_path / "excluded", fields)
    folders["stacked"].change(tmp_path / "rest", fields, drop("q_proj"))


def drop(part: str) -> Callable[[Tensors], Any]:
    return lambda x: [x.pop(key) for key in [*x] if part in key]


REFUSED_TENSORS: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "a module that the config names": (
        "stacked",
        drop(QUERIES),
        f"it has no LoRA of '{QUERIES}', which target_modules",
    ),
    "a layer that the config names": (
        "per_expert",
        drop("layers.1.self_attn"),
        "has no LoRA of 'model.layers.1.self_at",
    ),
    "half of a stack": ("stacked", lambda x: x.pop(f"{EXPERTS}.lora_B.weight"), r"experts\.lora_B\.weight' is missing"),
    "no stack": ("stacked", lambda x: [x.pop(key) for key in [*x] if key.startswith(f"{EXPERTS}.lora")], "is missing"),
    "an expert less": (
        "stacked",
        lambda x: x.update({f"{EXPERTS}.lora_A.weight": x[f"{EXPERTS}.lora_A.weight"][2:].clone()}),
        r"has shapes \(6, 8\) and \(60, 8\), expected \(8, 8\) and \(60, 8\), as PEFT 0.21.2 stacks experts",
    ),
    "no rank": (
        "per_expert",
        lambda x: x.update({f"{EXPERTS}.0.up_proj.lora_A.weight": x[f"{EXPERTS}.0.up_proj.lora_A.weight"][:0].clone()}),
        r"has shapes \(0, 60\)",
    ),
    "a missing expert": ("per_expert", rename(".experts.3.", ".experts.9."), r"experts\.9\..* is no LoRA"),
    "some experts": (
        "per_expert",
        lambda x: [x.pop(key) for key in [*x] if ".0.mlp.experts.2.up_proj" in key],
        r"no LoRA of 'model\.layers\.0\.mlp\.experts\.2\.up_proj', but LoRAs of other experts of the layer",
    ),
    "an expert of another rank": (
        "per_expert",
        lambda x: x.update({f"{EXPERTS}.1.up_proj.lora_A.weight": torch.ones(3, 60)}),
        r"has shapes \(3, 60\) and \(8, 2\)",
    ),
    "a router": ("stacked", rename("self_attn.q_proj", "mlp.gate"), r"mlp\.gate\..* is no LoRA of this model's"),
    "a bias": (
        "stacked",
        lambda x: x.update({f"base_model.model.{QUERIES}.lora_B.bias": torch.zeros(60)}),
        r"q_proj\.lora_B\.bias' is no LoRA of this model's linear layers",
    ),
    "magnitudes without DoRA": (
        "stacked",
        lambda x: x.update({f"base_model.model.{QUERIES}.lora_magnitude_vector": torch.ones(60)}),
        r"q_proj\.lora_magnitude_vector' is no LoRA .*: use_dora of adapter_config.json is not true",
    ),
    "a vector": (
        "stacked",
        lambda x: x.update({f"base_model.model.{QUERIES}.lora_A.weight": torch.zeros(120)}),
        r"expected a matrix of floating-point numbers",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED_TENSORS)
def test_tensors_that_are_not_all_of_a_models_adapters(
    folders: dict[str, Folder], tmp_path: Path, mistake: str
) -> None:
    experts, change, complaint = REFUSED_TENSORS[mistake]
    with pytest.raises(CheckpointError, match=complaint) as error:
        folders[experts].change(tmp_path, {}, change)
    assert "\n" not in str(error.value)


def test_experts_of_different_alphas_and_weights_with_two_adapters(folders: dict[str, Folder], tmp_path: Path) -> None:
    folder = folders["per_expert"]
    with pytest.raises(CheckpointError, match=r"has rank 2 and alpha 9, .* 2 and 4; expected the same for all experts"):
        folder.change(tmp_path, {"alpha_pattern": {r"experts\.1\.up_proj": 9}})
    fields = json.loads((folders["stacked"].path / "adapter_config.json").read_text())
    both = load_file(folders["stacked"].path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="which hold the same weights"):
        folder.change(
            tmp_path,
            {"target_parameters": fields["target_parameters"], "rank_pattern": fields["rank_pattern"]},
            lambda x: x.update(both),
        )


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ("[", "is not JSON"),
        ("[1]", "holds a list; expected the parts of tensors by name"),
        ('{"model.layers.7.mlp": [[2, 4]]}', "has 'model.layers.7.mlp', which has no LoRA in the file"),
        ('{"%s": [[2, 4]]}', "of each of its 2 matrices"),
        ('{"%s": [[1, 2], [1, 2]]}', "ranks that add up to 4"),
        ('{"%s": [[2, 4], [2, 5]]}', "and the scale 2"),
        ('{"%s": [[2, 4], [true, 4]]}', r"expected \[rank, alpha\]"),
        ('{"%s": [[4, 8], null]}', None),
        ('{"%s": [[1, 2], [3, 6]]}', None),
    ],
)
def test_metadata_of_other_parts(folders: dict[str, Folder], tmp_path: Path, parts: str, complaint: str | None) -> None:
    """What is possible but not what the tensors hold is seen when they are read."""
    folder = folders["stacked"]
    shutil.copytree(folder.path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_model.safetensors"
    text = parts.replace("%s", "model.layers.0.mlp.experts.gate_up_proj")
    save_file(load_file(file), file, {"archon.parts": text})
    if complaint is not None:
        with pytest.raises(CheckpointError, match=complaint):
            read_sizes(tmp_path, folder.adapter)
        return
    with pytest.raises(CheckpointError, match=r"metadata 'archon.parts' does not fit .*base_layer.lora_B"):
        engine_of(Path(folder.adapter.hf_assets_path or ""), lora={"path": str(tmp_path)})


def test_huge_headers_and_other_files(folders: dict[str, Folder], tmp_path: Path) -> None:
    folder = folders["stacked"]
    shutil.copytree(folder.path, tmp_path, dirs_exist_ok=True)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    file.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=f"its header claims {2**40} bytes"):
        read_sizes(tmp_path, folder.adapter)
    config.write_text(json.dumps({"peft_type": "LORA", "revision": " " * 2**24}))
    with pytest.raises(CheckpointError, match=r"adapter_config.json has .* bytes; expected at most 16,777,216$"):
        read_sizes(tmp_path, folder.adapter)
    config.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="it is not JSON"):
        read_sizes(tmp_path, folder.adapter)


def test_an_adapter_of_another_family_is_refused(folders: dict[str, Folder], tmp_path: Path) -> None:
    hf_config = json.loads((base_of("llama", tmp_path / "base") / "config.json").read_text())
    other = get_model_spec("llama").state_dict_adapter_class(hf_config)
    for folder in folders.values():
        with pytest.raises(CheckpointError, match="is no LoRA of this model's linear layers; of another model"):
            read_sizes(folder.path, other)


def test_a_value_that_is_not_finite_is_named_with_its_key(folders: dict[str, Folder], tmp_path: Path) -> None:
    folder = folders["stacked"]
    folder.change(tmp_path, {}, lambda x: x[f"{EXPERTS}.lora_B.weight"].fill_(torch.inf))
    with pytest.raises(CheckpointError) as error:
        read_lora_tensors(tmp_path, folder.adapter, read_sizes(tmp_path, folder.adapter))
    expected = f"{tmp_path}/adapter_model.safetensors: key '{EXPERTS}.lora_B.weight' has values that are not finite"
    assert str(error.value) == expected
