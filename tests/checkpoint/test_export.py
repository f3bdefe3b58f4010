"""What is exported: transformers loads it, nothing is left out, and what was there before is not lost."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import archon
from archon.checkpoint import atomic
from archon.checkpoint.hf_export import _ShardWriter, save_hf
from archon.checkpoint.hf_io import load_spec
from archon.checkpoint.hf_reader import read_hf_config
from archon.checkpoint.tokenizer import load_tokenizer
from archon.models.hf.state_dict import WITHOUT_HEAD
from archon.schema.errors import CheckpointError, ConfigError, TokenizerError, UnknownModelError
from tests.checkpoint.tiny_checkpoints import (
    MOE,
    QWEN2,
    assert_bitwise,
    config_with,
    hf_state,
    make_checkpoint,
    random_weights,
    write_checkpoint,
)
from tests.tolerances import PARITY_FP32

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"


def make_tokenizer(folder: Path, **special: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<unk>", "<end>", "<", ">", "user", "one", "two"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


# transformers


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [{}, QWEN2], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 6000], ids=["single", "sharded"])
def test_transformers_loads_the_export_with_the_same_weights_and_logits(
    tmp_path: Path, family: dict[str, Any], tied: bool, max_shard_bytes: int
) -> None:
    from transformers import AutoModelForCausalLM

    folder, weights = make_checkpoint(tmp_path / "in", tie_word_embeddings=tied, **family)
    model = archon.load_model(folder)
    archon.save_model(model, tmp_path / "out", like=folder, max_shard_bytes=max_shard_bytes)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    state = theirs.state_dict()
    assert {*state} - {"lm_head.weight"} == {*weights} - {"lm_head.weight"}
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    tokens = torch.randint(61, (17,))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        logits = model(tokens, torch.arange(17), torch.tensor([0, 17], dtype=torch.int32), 17)
    assert (logits - expected).abs().max() <= PARITY_FP32 * expected.abs().max()


def test_transformers_loads_an_exported_critic(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, _ = make_checkpoint(tmp_path / "in")
    critic = archon.load_model(folder, is_critic=True, init_score=True)
    archon.save_model(critic, tmp_path / "out", like=folder)
    theirs, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert_bitwise(dict(theirs.state_dict()), hf_state(critic, folder, is_critic=True))


# Config


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None], ids=str)
def test_config_says_the_dtype_of_the_weights(tmp_path: Path, name: str, dtype: torch.dtype | None) -> None:
    folder, _ = make_checkpoint(tmp_path / "in", dtype=torch.bfloat16)
    config = config_with(**{"torch_dtype": None, name: "bfloat16"})
    model = archon.load_model(folder, dtype=torch.float32)
    save_hf(tmp_path / "out", hf_state(model, folder).items(), config, dtype=dtype)
    written = str(dtype or torch.float32).removeprefix("torch.")
    assert read_hf_config(tmp_path / "out") == config | {name: written}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_tensor(key).dtype for key in file.keys()} == {dtype or torch.float32}  # noqa: SIM118


@pytest.mark.parametrize("first", [torch.float16, torch.bfloat16], ids=str)
def test_config_names_a_dtype_that_holds_every_weight_whatever_comes_first(tmp_path: Path, first: torch.dtype) -> None:
    folder, weights = make_checkpoint(tmp_path / "in")
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}[first]
    mixed = [(name, w.to(other if number else first)) for number, (name, w) in enumerate(weights.items())]
    save_hf(tmp_path / "out", mixed, like=folder)
    assert "float32" in {read_hf_config(tmp_path / "out").get(name) for name in ("dtype", "torch_dtype")}


@pytest.mark.parametrize("stacked", [False, True], ids=["per_expert", "stacked"])
def test_like_decides_the_dtype_of_every_tensor(tmp_path: Path, stacked: bool) -> None:
    """Experts too, which transformers holds stacked in memory, and in names without `model.`"""
    config = config_with(**MOE, torch_dtype="bfloat16")
    wide = {
        name: x.to(torch.float32 if ".gate." in name or "mlp.experts" in name else torch.bfloat16)
        for name, x in random_weights(config).items()
    }
    source = write_checkpoint(tmp_path / "in", config, wide)
    if stacked:
        adapter = load_spec(source).adapter
        write_checkpoint(source, config, adapter.renamed(WITHOUT_HEAD).stacked.to_hf(adapter.from_hf(wide)))
    model = archon.load_model(source, dtype=torch.float32)
    archon.save_model(model, tmp_path / "out", like=source, dtype="like")
    assert_bitwise(dict(load_file(tmp_path / "out" / "model.safetensors")), wide)
    assert read_hf_config(tmp_path / "out")["torch_dtype"] == "bfloat16"


def test_index_lists_every_key_and_the_total_size(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "in")
    archon.save_model(archon.load_model(folder), tmp_path / "out", like=folder, max_shard_bytes=6000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    files = sorted({*index["weight_map"].values()})
    assert files == sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]


def test_at_most_one_shard_is_held_in_memory(tmp_path: Path) -> None:
    alive: dict[str, int] = {}
    peak = 0

    def stream(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        nonlocal peak
        for name in [*weights]:
            tensor = weights.pop(name)
            alive[name] = tensor.nbytes
            weakref.finalize(tensor.untyped_storage(), alive.pop, name)
            peak = max(peak, sum(alive.values()))
            yield name, tensor
            del tensor

    largest, shard = 61 * 24 * 4, 12_000
    config = config_with(num_hidden_layers=6)
    weights = random_weights(config)
    total = sum(t.nbytes for t in weights.values())
    save_hf(tmp_path / "out", stream(weights), config, max_shard_bytes=shard)
    assert largest < peak <= shard + largest < total


# Exact accounting


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w[:-1], r"'lm_head.weight' is missing among the weights and \(61, 24\) in the config's model"),
        (
            lambda w: [*w, ("model.extra", torch.zeros(2))],
            r"'model.extra' is \(2,\).*missing in the config's model",
        ),
        (lambda w: [*w, w[0]], "'model.embed_tokens.weight' is repeated"),
        (lambda w: [*w[:-1], (w[-1][0], torch.zeros(61, 23))], r"'lm_head.weight' is \(61, 23\)"),
        (lambda w: [*w[:-1], (w[-1][0], w[-1][1].long())], r"'lm_head.weight' is torch.int64"),
    ],
    ids=["missing", "extra", "twice", "shape", "integers"],
)
def test_export_of_other_weights_than_the_configs_is_refused(tmp_path: Path, change: Any, match: str) -> None:
    weights = change([*random_weights(config_with()).items()])
    with pytest.raises(CheckpointError, match=match):
        save_hf(tmp_path / "out", weights, config_with())
    assert [*tmp_path.iterdir()] == []


def test_like_of_another_model_is_refused(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    other, _ = make_checkpoint(tmp_path / "other", rope_theta=5e5)
    with pytest.raises(CheckpointError, match=r"other: its config has rope_theta=500000.0, the model to save 10000.0"):
        archon.save_model(archon.load_model(folder), tmp_path / "out", like=other)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_dtype_that_would_destroy_the_weights_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    with pytest.raises(CheckpointError, match=f"dtype is {dtype}; expected"):
        archon.save_model(archon.load_model(folder), tmp_path / "out", like=folder, dtype=dtype)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=f"dtype is {dtype}"):
        archon.load_model(folder, dtype=dtype)


def test_finite_weights_whose_sum_is_not_are_exported(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    model = archon.load_model(folder)
    with torch.no_grad():
        model.norm.weight.fill_(60_000.0)
    assert not model.norm.weight.half().sum().isfinite()
    archon.save_model(model, tmp_path / "out", like=folder, dtype=torch.float16)
    assert archon.load_model(tmp_path / "out").norm.weight.eq(60_000).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e5])
def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path, value: float) -> None:
    """1e5 is finite until it is written in float16."""
    folder, _ = make_checkpoint(tmp_path / "in")
    model = archon.load_model(folder)
    with torch.no_grad():
        model.norm.weight[0] = value
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' holds NaN or infinite values as torch.float16"):
        archon.save_model(model, tmp_path / "out", like=folder, dtype=torch.float16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["nowhere", "cuda:999"])
def test_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here"):
        archon.load_model(folder, device=device)


def test_export_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither hf_config nor like is set"):
        save_hf(tmp_path / "out", [])


def test_export_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="gpt2"):
        save_hf(tmp_path / "out", random_weights(config_with()).items(), config_with(model_type="gpt2"))
    assert [*tmp_path.iterdir()] == []


# Replacing


def test_replacing_an_export_leaves_no_stale_file(tmp_path: Path) -> None:
    first, _ = make_checkpoint(tmp_path / "first", seed=1)
    second, weights = make_checkpoint(tmp_path / "second", seed=2)
    (first / "generation_config.json").write_text("{}")
    archon.save_model(archon.load_model(first), tmp_path / "out", like=first, max_shard_bytes=6000)
    archon.save_model(archon.load_model(second), tmp_path / "out", like=second)
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert_bitwise(hf_state(archon.load_model(tmp_path / "out"), second), weights)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["first", "out", "second"]


def test_export_over_its_own_source(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "model", 3)
    make_tokenizer(folder, eos_token="<end>")
    model = archon.load_model(folder)
    torch.nn.init.ones_(model.norm.weight)
    archon.save_model(model, folder, like=folder)
    assert_bitwise(hf_state(archon.load_model(folder), folder), hf_state(model, folder))
    assert load_tokenizer(folder).eos_token_id == 1


def test_export_through_a_link_replaces_what_it_points_to(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    archon.save_model(archon.load_model(folder), tmp_path / "real", like=folder)
    (tmp_path / "real" / "README.md").write_text("the card of a run")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    archon.save_model(archon.load_model(folder), tmp_path / "link", like=folder)
    assert (tmp_path / "link").is_symlink()
    archon.load_model(tmp_path / "real")


def test_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"out: it holds 'thesis.tex', which is not part of an export"):
        archon.save_model(archon.load_model(folder), tmp_path / "out", like=folder)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("where", ["file", "file/child", "/proc/archon"])
def test_target_that_cannot_be_written(tmp_path: Path, where: str) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"expected a folder|cannot write") as caught:
        archon.save_model(archon.load_model(folder), tmp_path / where, like=folder)
    assert str(tmp_path / where) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_full_disk_leaves_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, weights = make_checkpoint(tmp_path / "in")
    model = archon.load_model(folder)
    archon.save_model(model, tmp_path / "out", like=folder)
    torch.nn.init.ones_(model.norm.weight)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*out: No space left on device"):
        archon.save_model(model, tmp_path / "out", like=folder)
    assert_bitwise(hf_state(archon.load_model(tmp_path / "out"), folder), weights)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["in", "out"]


def test_file_systems_that_cannot_exchange_get_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, weights = make_checkpoint(tmp_path / "in", seed=1)
    other, new_weights = make_checkpoint(tmp_path / "other", seed=2)
    archon.save_model(archon.load_model(folder), tmp_path / "out", like=folder)
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    archon.save_model(archon.load_model(other), tmp_path / "out", like=other)
    assert_bitwise(hf_state(archon.load_model(tmp_path / "out"), other), new_weights)
    # Killed between the two renames: the earlier export is whole under another name, and comes back even if the next
    # export fails.
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    with pytest.raises(CheckpointError, match="missing among the weights"):
        save_hf(tmp_path / "out", [], like=other)
    assert_bitwise(hf_state(archon.load_model(tmp_path / "out"), other), new_weights)
    archon.save_model(archon.load_model(folder), tmp_path / "out", like=folder)
    assert_bitwise(hf_state(archon.load_model(tmp_path / "out"), folder), weights)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["in", "other", "out"]


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, syncs: list[str]) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    make_tokenizer(folder, eos_token="<end>")
    model = archon.load_model(folder)
    for _ in range(2):
        syncs.clear()
        archon.save_model(model, tmp_path / "out", like=folder, max_shard_bytes=6000)
        staged = next(name for name in syncs if ".out.partial-" in name).split(".out.partial-")[1].split("/")[0]
        hidden = tmp_path / f".out.partial-{staged}"
        written = {str(hidden), *(str(hidden / file.name) for file in (tmp_path / "out").iterdir())}
        assert written <= {*syncs}
        assert syncs[-1] == str(tmp_path)


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    (tmp_path / ".out.partial-dead").mkdir()
    (tmp_path / ".out.partial-dead" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".other.partial-dead").mkdir()
    with atomic.staged_folder(tmp_path / "out") as living:
        archon.save_model(archon.load_model(folder), tmp_path / "out", like=folder)
        assert sorted(f.name for f in tmp_path.iterdir()) == sorted([".other.partial-dead", "in", "out", living.name])


def test_kill_point_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    model = archon.load_model(folder)
    for wanted in ("export.nowhere", "export.begin:x"):
        monkeypatch.setenv("ARCHON_KILL_AT", wanted)
        with pytest.raises(ConfigError, match=f"ARCHON_KILL_AT='{wanted}': expected NAME"):
            archon.save_model(model, tmp_path / "out", like=folder)


# Tokenizer and generation config


def test_tokenizer_and_generation_config_are_copied(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder, _ = make_checkpoint(tmp_path / "in")
    make_tokenizer(folder, eos_token="<end>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "README.md").write_text("not part of an export")
    archon.save_model(archon.load_model(folder), tmp_path / "out", like=folder)
    names = {file.name for file in folder.iterdir()} - {"README.md"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("one two").input_ids == [5, 6]
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_tokenizer_object_is_saved_in_place_of_files(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tok", eos_token="<end>")
    tokenizer = load_tokenizer(tmp_path / "tok")
    weights = random_weights(config_with())
    save_hf(tmp_path / "out", weights.items(), config_with(), tokenizer=tokenizer)
    again = load_tokenizer(tmp_path / "out")
    messages = [{"role": "user", "content": "one two"}]
    assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


def test_every_chat_template_of_the_trained_tokenizer_is_exported(tmp_path: Path) -> None:
    """transformers keeps named templates in a folder; an export over an earlier one replaces it."""
    from transformers import AutoTokenizer

    folder, _ = make_checkpoint(tmp_path / "in")
    make_tokenizer(folder, eos_token="<end>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    make_tokenizer(tmp_path / "plain", eos_token="<end>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    templates = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ messages[0].content }}"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(tmp_path / "trained")
    weights = random_weights(config_with())
    for source in (tmp_path / "trained", tokenizer, tmp_path / "trained"):
        save_hf(tmp_path / "out", weights.items(), like=folder, tokenizer=source)
        assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    save_hf(tmp_path / "copy", weights.items(), like=tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").chat_template == templates
    save_hf(tmp_path / "out", weights.items(), like=folder)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE


def test_apply_chat_template_gives_a_plain_list(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, eos_token="<end>")
    tokenizer = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "one two"}]
    assert tokenizer.apply_chat_template(messages, tokenize=True) == [2, 4, 3, 5, 6]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user> one two "
    assert tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] == [2, 4, 3, 5, 6]


def test_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "in")
    with pytest.raises(TokenizerError, match="in: it holds no tokenizer"):
        load_tokenizer(folder)
    with pytest.raises(TokenizerError, match="nowhere: no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="in: its tokenizer cannot be loaded") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    assert "tokenizer.json: it is not JSON" in str(caught.value)
    make_tokenizer(tmp_path / "list")
    (tmp_path / "list" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: expected a JSON object, got list\); copy"):
        load_tokenizer(tmp_path / "list")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"tokenizer.json: it is a named pipe"):
        load_tokenizer(tmp_path / "pipe")
    make_tokenizer(tmp_path / "endless")
    with pytest.raises(TokenizerError, match="endless: its tokenizer has no end-of-text token"):
        load_tokenizer(tmp_path / "endless")


def test_shards_are_filled_up_to_their_limit(tmp_path: Path) -> None:
    """Five tensors of 40 bytes in shards of 100: two, two and one."""
    writer = _ShardWriter(tmp_path, 100)
    for index in range(5):
        writer.add(f"w{index}", torch.full((10,), float(index)))
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 1, 2, 2, 3)]
    assert index == {"metadata": {"total_size": 200}, "weight_map": {f"w{i}": name for i, name in enumerate(shards)}}
