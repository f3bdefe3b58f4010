"""Models and datasets by their id on the hub: from its cache, and from a stand-in of the hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file

from archon.checkpoint.hf_io import load_model
from archon.checkpoint.hub import HubId, hub_snapshot, parse_hub_id
from archon.checkpoint.tokenizer import load_tokenizer
from archon.cli.serve import make_server, parse_lora_folders
from archon.cli.serve_config import ServeConfig
from archon.data import read_rows
from archon.schema.errors import CheckpointError, DatasetError
from tests.hub_server import COMMIT, serve_hub

ROWS = [{"prompt": "1+2=", "response": "3"}, {"prompt": "2+2=", "response": "4"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
DATASET = {"README.md": b"---\nlicense: mit\n---\n", "data/train-00000-of-00001.jsonl": LINES}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub, without a connection."""
    folder = tmp_path / "home" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_snapshot.cache_clear()
    return folder


def fill(cache: Path, repository: str, files: dict[str, bytes], commit: str = COMMIT, ref: str = "main") -> Path:
    """Write a repository to the cache in the hub's layout, and return its snapshot."""
    folder = cache / repository.replace("/", "--")
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha1(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return snapshot


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("path", "hub_id"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B", None)),
        (Path("Qwen/Qwen3-0.6B@refs/pr/1"), HubId("Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("model", None),
        ("./a/b", None),
        ("../model", None),
        ("/a/b", None),
        ("a/b/c", None),
        ("~/b", None),
        ("a b/c", None),
    ],
)
def test_a_hub_id_is_an_owner_and_a_name(path: str | Path, hub_id: HubId | None) -> None:
    assert parse_hub_id(path) == hub_id


def test_commands_take_a_hub_id_of_the_cache(archon, checkpoint, cache, tmp_path) -> None:
    fill(cache, "models/Org/Tiny", contents(checkpoint))
    fill(
        cache, "datasets/org/sums", {"README.md": b"---\nlicense: mit\n---\n", "data/train-00000-of-00001.jsonl": LINES}
    )
    by_path = archon("inspect", checkpoint).out.replace(str(checkpoint), "Org/Tiny").replace(checkpoint.name, "Tiny")
    assert archon("inspect", "Org/Tiny").out == by_path
    by_path = archon("generate", checkpoint, "--prompt", "1+2=", "seed=1", "max_new_tokens=4")
    assert archon("generate", "Org/Tiny@main", "--prompt", "1+2=", "seed=1", "max_new_tokens=4").out == by_path.out
    scoring = ("--data", "org/sums", "data.split=train", "--reward", "exact_match", "max_new_tokens=2")
    assert archon("eval", "Org/Tiny", *scoring, "--out", tmp_path / "eval", "device=cpu").code == 0
    assert json.loads((tmp_path / "eval" / "results.json").read_text())["prompts"] == len(ROWS)
    options = ("train_data.path=org/sums", "tokenizer=Org/Tiny", "model.device=cpu", "batch_size=2", "total_steps=1")
    assert archon("sft", f"run_dir={tmp_path}/run", "model.path=Org/Tiny", *options).code == 0
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert exported.keys() == load_file(checkpoint / "model.safetensors").keys()
    assert (tmp_path / "run" / "export" / "tokenizer.json").is_file()


def test_a_revision_is_a_branch_a_tag_or_a_commit(checkpoint, cache) -> None:
    fill(cache, "models/org/tiny", contents(checkpoint))
    changed = contents(checkpoint)
    changed["config.json"] = changed["config.json"].replace(
        b'"max_position_embeddings": 64', b'"max_position_embeddings": 32'
    )
    fill(cache, "models/org/tiny", changed, commit="f" * 40, ref="v2")
    assert load_model("org/tiny").args.max_seq_len == 64
    for revision in ("v2", "f" * 40):
        assert load_model(f"org/tiny@{revision}").args.max_seq_len == 32
    with pytest.raises(CheckpointError, match="hf download org/tiny --revision v3 --local-dir FOLDER"):
        load_model("org/tiny@v3")


def test_a_lora_names_the_hub_id_and_the_revision_of_its_base(archon, checkpoint, cache, tmp_path) -> None:
    fill(cache, "models/org/tiny", contents(checkpoint), ref="v2")
    fill(cache, "datasets/org/sums", DATASET)
    options = ("train_data.path=org/sums", "model.device=cpu", "batch_size=2", "total_steps=1", "model.lora.rank=2")
    assert archon("sft", f"run_dir={tmp_path}/run", "model.path=org/tiny@v2", *options).code == 0
    config = json.loads((tmp_path / "run" / "export" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/tiny", "v2")
    assert archon("export", tmp_path / "run" / "export", tmp_path / "merged", "--merge").code == 0
    assert load_model(tmp_path / "merged").args == load_model(checkpoint).args


@pytest.mark.slow
def test_a_lora_is_named_by_its_hub_id_too(archon, checkpoint, cache, tmp_path) -> None:
    fill(cache, "datasets/org/sums", DATASET)
    options = ("train_data.path=org/sums", "model.device=cpu", "batch_size=2", "total_steps=1", "tokenizer=Org/Other")
    other = load_tokenizer(checkpoint)
    other.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    other.save_pretrained(tmp_path / "other")
    fill(cache, "models/Org/Other", contents(tmp_path / "other"))
    run = (*options, f"model.path={checkpoint}")
    assert archon("sft", f"run_dir={tmp_path}/first", *run, "model.lora.rank=2", "model.lora.init=random").code == 0
    lora = tmp_path / "first" / "export"
    fill(cache, "models/org/lora", contents(lora))
    ask = (checkpoint, "--prompt", "1+2=", "max_new_tokens=4", "--lora")
    assert archon("generate", *ask, "org/lora").out == archon("generate", *ask, lora).out
    shown = archon("inspect", checkpoint, "--lora", "org/lora@main").out
    assert shown == archon("inspect", checkpoint, "--lora", lora).out.replace(str(lora), "org/lora@main")
    assert archon("sft", f"run_dir={tmp_path}/next", *run, "model.lora.path=org/lora").code == 0
    merged = [tmp_path / "by_id", tmp_path / "by_folder"]
    for target, source in zip(merged, ("org/lora", lora), strict=True):
        assert archon("export", source, target, "--merge").code == 0
    assert contents(merged[0]) == contents(merged[1])
    server = make_server(checkpoint, ServeConfig(device="cpu"), None, parse_lora_folders(["red=org/lora"]))
    assert [*server.loras] == ["red"] and server.tokenizer.chat_template == other.chat_template
    assert "hf download org/nowhere" in archon("generate", *ask, "org/nowhere").complaint


def test_a_folder_wins_over_a_hub_id(checkpoint, cache, tmp_path, monkeypatch) -> None:
    fill(cache, "models/org/tiny", {"config.json": b"{}"})
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    assert load_model("org/tiny").args.max_seq_len == 64


def test_an_id_that_is_not_available_names_the_download(archon, cache, tmp_path) -> None:
    for command in ("inspect", "serve"):
        complaint = archon(command, "org/tiny").complaint
        assert str(cache) in complaint and "hf download org/tiny --local-dir FOLDER" in complaint
    assert "hf download org/tiny" in archon("generate", "org/tiny", "--prompt", "x").complaint
    with pytest.raises(CheckpointError, match="hf download org/tiny"):
        load_tokenizer("org/tiny")
    with pytest.raises(DatasetError, match="hf download org/rows --repo-type dataset --local-dir FOLDER"):
        read_rows("org/rows")


def test_only_the_files_that_a_command_reads_are_downloaded(checkpoint, cache, monkeypatch) -> None:
    others = {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"copy", "onnx/model.safetensors": b"copy"}
    with serve_hub({"models/org/tiny": contents(checkpoint) | others}) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        url_template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url_template)
        load_tokenizer("org/tiny")
        snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
        assert "tokenizer.json" in contents(snapshot) and "model.safetensors" not in contents(snapshot)
        load_model("org/tiny@main")
        assert contents(snapshot) == contents(checkpoint)
        assert not any(name in request for name in others for request in hub.requests)
        with pytest.raises(CheckpointError, match=rf"no such model in the hub's cache .* or at {hub.url} \(404"):
            load_model("org/absent")


@pytest.mark.slow
def test_a_dataset_is_downloaded_once(tmp_path) -> None:
    files = DATASET | {"data/test-00000-of-00001.jsonl": LINES * 2}
    program = "from archon.data import read_rows; print([row.data for row in read_rows('org/sums@v1')])"
    paths = {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with serve_hub({"datasets/org/sums": files}) as hub:
        for offline in ("0", "1"):
            environment = os.environ | paths | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": offline}
            done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
            assert done.stdout.strip() == str(ROWS), done.stderr
