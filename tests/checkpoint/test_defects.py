"""One defect, one line that names the file and the key; and no weight touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from archon.checkpoint.hf_reader import HFCheckpoint, load_hf_weights, match_parameters, read_hf_config
from archon.models import get_model_spec
from archon.schema.errors import CheckpointError
from tests.checkpoint.tiny_checkpoints import MOE, config_with, edit_header, make_checkpoint, write_checkpoint

pytestmark = pytest.mark.unsampled

SHARD = "model-00002-of-00003.safetensors"
KEY = "model.layers.1.self_attn.k_proj.weight"  # is in SHARD; its shape is [10, 24]
SAME_FOLDER = "expected a .safetensors file in the same folder"
Entry = dict[str, Any]


def in_header(change: Callable[[dict[str, Entry]], Any]) -> Callable[[Path], None]:
    """A defect of the shard's header; `change` edits it in place, or returns what replaces it."""

    def damage(folder: Path) -> None:
        def edit(header: dict[str, Entry]) -> Any:
            return change(header) or header

        edit_header(folder / SHARD, edit)

    return damage


def in_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        file.write_text(json.dumps(change(index) or index))

    return damage


def in_shard(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / SHARD)
        change(weights)
        save_file(weights, folder / SHARD)

    return damage


def in_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / SHARD).write_bytes(change((folder / SHARD).read_bytes()))

    return damage


def length_of(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


def renamed(header: dict[str, Entry]) -> dict[str, Entry]:
    return {(KEY.replace("k_proj", "K_proj") if k == KEY else k): v for k, v in header.items()}


def duplicated(header: dict[str, Entry]) -> str:
    text = json.dumps(header)
    return text[:-1] + ", " + json.dumps({KEY: header[KEY]})[1:]


def overlapping(header: dict[str, Entry]) -> None:
    begin, end = header[KEY]["data_offsets"]
    header[KEY]["data_offsets"] = [begin - 4, end - 4] if begin else [begin + 4, end + 4]


def add(name: str, shape: list[int]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({name: torch.zeros(shape)})


def list_in_index(name: str) -> Callable[[Path], None]:
    return in_index(lambda index: index["weight_map"].update({name: SHARD}))


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


# name: (defect, what the message must name)
DEFECTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "truncated by a byte": (in_bytes(lambda b: b[:-1]), (SHARD, "truncated")),
    "truncated in the header": (in_bytes(lambda b: b[:40]), (SHARD, "truncated")),
    "truncated to nothing": (in_bytes(lambda b: b""), (SHARD, "truncated")),
    "a byte too many": (in_bytes(lambda b: b + b"\0"), (SHARD, "overwritten")),
    "header is not JSON": (in_bytes(lambda b: b[:9] + b"\x93" + b[10:]), (SHARD, "not valid JSON")),
    "header is a list": (in_header(lambda h: "[1, 2]"), (SHARD, "not a JSON object")),
    "header length one short": (in_bytes(lambda b: (length_of(b) - 1).to_bytes(8, "little") + b[8:]), (SHARD, "JSON")),
    "header length one long": (in_bytes(lambda b: (length_of(b) + 1).to_bytes(8, "little") + b[8:]), (SHARD, "JSON")),
    "header length beyond the file": (in_bytes(lambda b: (10**6).to_bytes(8, "little") + b[8:]), (SHARD, "1000000")),
    "header length of 10 GB": (in_bytes(lambda b: (10**10).to_bytes(8, "little") + b[8:]), (SHARD, "10000000000")),
    "header of a gigabyte in a file of two": (
        lambda f: (
            (f / SHARD).write_bytes((10**9).to_bytes(8, "little")),
            os.truncate(f / SHARD, 2 * 10**9),  # sparse: takes no space
        ),
        (SHARD, "claims 1000000000 bytes, more than 100000000"),
    ),
    "header length of 2^64 - 1": (in_bytes(lambda b: b"\xff" * 8 + b[8:]), (SHARD, str(2**64 - 1))),
    "header nested too deep": (in_header(lambda h: "[" * 100_000), (SHARD, "not valid JSON")),
    "header with an endless number": (in_header(lambda h: '{"a": ' + "9" * 5000 + "}"), (SHARD, "4300 digits")),
    "header with NaN": (in_header(lambda h: '{"a": NaN}'), (SHARD, "NaN is not a JSON number")),
    "key twice in a header": (in_header(duplicated), (SHARD, KEY, "twice")),
    "metadata is not strings": (in_header(lambda h: h.update(__metadata__={"a": {}})), (SHARD, "__metadata__")),
    "wrong dtype string": (in_header(lambda h: h[KEY].update(dtype="FLOAT")), (SHARD, KEY, "FLOAT")),
    "dtype of another width": (in_header(lambda h: h[KEY].update(dtype="F64")), (SHARD, KEY, "[10, 24] of F64")),
    "integers in place of weights": (in_header(lambda h: h[KEY].update(dtype="I32")), (SHARD, KEY, "int32")),
    "shape of another size": (in_header(lambda h: h[KEY].update(shape=[10, 25])), (SHARD, KEY, "[10, 25]")),
    "shape of the same size": (
        in_header(lambda h: h[KEY].update(shape=[24, 10])),
        (SHARD, KEY, "[24, 10]", "[10, 24]"),
    ),
    "negative shape": (in_header(lambda h: h[KEY].update(shape=[-10, -24])), (SHARD, KEY, "[-10, -24]")),
    "shape of booleans": (in_header(lambda h: h[KEY].update(shape=[True, 240])), (SHARD, KEY, "shape")),
    "offsets overlap": (in_header(overlapping), (SHARD, "byte")),
    "offsets beyond the file": (
        in_header(lambda h: h[KEY].update(data_offsets=[10**9, 10**9 + 960])),
        (SHARD, "gap"),
    ),
    "offsets backwards": (in_header(lambda h: h[KEY].update(data_offsets=[960, 0])), (SHARD, KEY, "-960 bytes")),
    "offsets are not numbers": (in_header(lambda h: h[KEY].update(data_offsets=["0", "960"])), (SHARD, KEY, "'960'")),
    "offsets are missing": (in_header(lambda h: h[KEY].__delitem__("data_offsets")), (SHARD, KEY, "data_offsets")),
    "entry with a field too many": (in_header(lambda h: h[KEY].update(stride=[1, 2])), (SHARD, KEY, "exactly")),
    "entry is not an object": (in_header(lambda h: h.update({KEY: 3})), (SHARD, KEY)),
    "key renamed in a header": (in_header(renamed), (SHARD, KEY, "missing")),
    "key renamed everywhere": (
        both(
            in_header(renamed),
            in_index(lambda i: i["weight_map"].update({KEY.replace("k_proj", "K_proj"): i["weight_map"].pop(KEY)})),
        ),
        (SHARD, KEY.replace("k_proj", "K_proj"), "unknown"),
    ),
    "key missing in a shard": (in_shard(lambda w: w.__delitem__(KEY)), (SHARD, KEY, "missing")),
    "key missing everywhere": (
        both(in_shard(lambda w: w.__delitem__(KEY)), in_index(lambda i: i["weight_map"].__delitem__(KEY))),
        (KEY, "missing"),
    ),
    "extra key in a shard": (in_shard(add("model.extra.weight", [2])), (SHARD, "model.extra.weight", "not listed")),
    "extra key everywhere": (
        both(in_shard(add("model.extra.weight", [2])), list_in_index("model.extra.weight")),
        (SHARD, "model.extra.weight", "unknown"),
    ),
    "a layer too many": (
        both(
            in_shard(add("model.layers.2.mlp.up_proj.weight", [35, 24])),
            list_in_index("model.layers.2.mlp.up_proj.weight"),
        ),
        (SHARD, "model.layers.2.mlp.up_proj.weight"),
    ),
    "layer number with a leading zero": (
        both(
            in_shard(add("model.layers.01.mlp.up_proj.weight", [35, 24])),
            list_in_index("model.layers.01.mlp.up_proj.weight"),
        ),
        (SHARD, "model.layers.01.mlp.up_proj.weight"),
    ),
    "key in two shards": (in_shard(add("model.embed_tokens.weight", [61, 24])), (SHARD, "model.embed_tokens.weight")),
    "key in two shards, the second of which the index means": (
        in_shard(add("model.layers.0.self_attn.k_proj.weight", [10, 24])),
        ("model-00003-of-00003.safetensors", "model.layers.0.self_attn.k_proj.weight", SHARD),
    ),
    "a value head in an actor": (
        both(in_shard(add("score.weight", [1, 24])), list_in_index("score.weight")),
        (SHARD, "score.weight"),
    ),
    "shard missing": (lambda f: (f / SHARD).unlink(), ("index.json", SHARD, "does not exist")),
    "shard is a folder": (lambda f: ((f / SHARD).unlink(), (f / SHARD).mkdir()), (SHARD, "not a regular file")),
    "shard is a pipe": (lambda f: ((f / SHARD).unlink(), os.mkfifo(f / SHARD)), (SHARD, "not a regular file")),
    "index points nowhere": (
        in_index(lambda i: i["weight_map"].update({KEY: "model-00009-of-00003.safetensors"})),
        ("index.json", KEY, "model-00009-of-00003.safetensors"),
    ),
    "index points to another shard": (
        in_index(lambda i: i["weight_map"].update({KEY: "model-00001-of-00003.safetensors"})),
        ("model-00001-of-00003.safetensors", KEY, SHARD),
    ),
    "index forgets a key": (in_index(lambda i: i["weight_map"].__delitem__(KEY)), (SHARD, KEY, "not listed")),
    "index without weight_map": (in_index(lambda i: {"metadata": {}}), ("index.json", "weight_map")),
    "index is not JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        ("index.json", "not JSON"),
    ),
    "index leads up": (
        in_index(lambda i: i["weight_map"].update({KEY: "../model.safetensors"})),
        ("index.json", KEY, "../model.safetensors", SAME_FOLDER),
    ),
    "index is absolute": (
        in_index(lambda i: i["weight_map"].update({KEY: "/etc/model.safetensors"})),
        ("index.json", KEY, "/etc/model.safetensors", SAME_FOLDER),
    ),
    "index leads into a folder": (
        in_index(lambda i: i["weight_map"].update({KEY: "sub/model.safetensors"})),
        ("index.json", KEY, "sub/model.safetensors", SAME_FOLDER),
    ),
    "index names another kind of file": (
        in_index(lambda i: i["weight_map"].update({KEY: "config.json"})),
        ("index.json", KEY, "config.json", SAME_FOLDER),
    ),
    "index names a number": (in_index(lambda i: i["weight_map"].update({KEY: 3})), ("index.json", KEY)),
    "both a single file and an index": (
        lambda f: shutil.copy(f / SHARD, f / "model.safetensors"),
        ("index.json", "model.safetensors", "both"),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_is_an_error_that_names_file_and_key(tmp_path: Path, defect: str) -> None:
    folder, _ = make_checkpoint(tmp_path, shards=3)
    assert KEY in load_file(folder / SHARD)
    config = read_hf_config(folder)
    spec = get_model_spec("qwen3")
    model = spec.model_class(spec.model_args_class.from_hf_config(config))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    damage, names = DEFECTS[defect]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load_hf_weights(model, spec.state_dict_adapter_class(config), folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    for name in names:
        assert name in message
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_flipping_any_header_byte_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    """What a flip may leave alone is the free text of __metadata__."""
    folder, _ = make_checkpoint(tmp_path, num_hidden_layers=1)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    config = read_hf_config(folder)
    spec = get_model_spec("qwen3")
    adapter = spec.state_dict_adapter_class(config)
    with torch.device("meta"):
        model = spec.model_class(spec.model_args_class.from_hf_config(config))
    with HFCheckpoint(folder) as checkpoint:
        entries = checkpoint.entries
    refused = 0
    for position in range(8 + length_of(content)):
        flipped = bytearray(content)
        flipped[position] ^= (0x01, 0x02, 0x10, 0x20, 0x80)[position % 5]
        file.write_bytes(flipped)
        refusal = None
        try:
            with HFCheckpoint(folder) as checkpoint:
                match_parameters(checkpoint, model, adapter)
        except CheckpointError as error:
            refusal = str(error)
        assert str(folder) in refusal if refusal else checkpoint.entries == entries, position
        refused += refusal is not None
    assert refused > 0.95 * length_of(content)


# The model


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 3}, "no key fills the model's parameter 'layers.2."),
        ({"num_hidden_layers": 1}, "key 'model.layers.1..*' is parameter 'layers.1..*', which the model does not have"),
        ({"vocab_size": 60}, r"of shape \[61, 24\], but the model's parameter '.*' has \[60, 24\]"),
    ],
    ids=["more layers", "fewer layers", "another vocabulary"],
)
def test_model_of_another_config_than_the_adapters(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    folder, _ = make_checkpoint(tmp_path)
    spec = get_model_spec("qwen3")
    model = spec.model_class(spec.model_args_class.from_hf_config(config_with(**changes)))
    with pytest.raises(CheckpointError, match=match):
        load_hf_weights(model, spec.state_dict_adapter_class(config_with()), folder)


def test_two_keys_for_one_parameter(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path)
    write_checkpoint(folder, config_with(), weights | {"model.final_norm.weight": weights["model.norm.weight"].clone()})
    spec = get_model_spec("qwen3")
    model = spec.model_class(spec.model_args_class.from_hf_config(config_with()))
    adapter = spec.state_dict_adapter_class(config_with())
    adapter.from_hf_map = {"model.final_norm.weight": "norm.weight", **adapter.from_hf_map}
    with pytest.raises(CheckpointError, match=r"unknown key 'model.final_norm.weight'"):
        load_hf_weights(model, adapter, folder)


def of_expert(expert: int) -> str:
    return f"model.layers.1.mlp.experts.{expert}.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda weights: weights.pop(of_expert(3)), rf"'{of_expert(3)}' missing"),
        (lambda weights: weights.update({of_expert(5): torch.zeros(7, 24)}), rf"unknown key '{of_expert(5)}'"),
        (lambda weights: weights.update({of_expert(3): torch.zeros(24, 7)}), rf"'{of_expert(3)}' .*\[24, 7\]"),
    ],
    ids=["missing", "one too many", "misshapen"],
)
def test_every_expert_of_a_file_is_accounted_for(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], match: str
) -> None:
    folder, weights = make_checkpoint(tmp_path, **MOE)
    change(weights)
    write_checkpoint(folder, config_with(**MOE), weights)
    spec = get_model_spec("qwen3_moe")
    model = spec.model_class(spec.model_args_class.from_hf_config(config_with(**MOE)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    with pytest.raises(CheckpointError, match=match):
        load_hf_weights(model, spec.state_dict_adapter_class(config_with(**MOE)), folder)
    assert all((parameter == 7.0).all() for parameter in model.parameters())
