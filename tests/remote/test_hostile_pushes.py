"""Pushes that are malformed, of another model, concurrent or interrupted: the server keeps its last good weights."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.schema.config import EngineConfig
from tests.remote.served import TOKEN, serving

KEY = {"Authorization": f"Bearer {TOKEN}"}
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
Change = Callable[[Path], Any]


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        found = load_file(file)
        edit(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, file)

    return change


def cast(dtype: torch.dtype) -> Change:
    return tensors(lambda x: x.update({NORM: x[NORM].to(dtype)}))


def smaller(folder: Path) -> None:
    """A consistent checkpoint with another vocabulary."""
    config(vocab_size=11)(folder)
    tensors(lambda x: x.update({name: x[name][:11] for name in (EMBEDDING, "lm_head.weight") if name in x}))(folder)


def deeper(folder: Path) -> None:
    """A consistent checkpoint with a layer less."""
    file = folder / "config.json"
    layers = json.loads(file.read_text())["num_hidden_layers"]
    config(num_hidden_layers=layers - 1, layer_types=None)(folder)
    tensors(lambda x: [x.pop(name) for name in [*x] if f".layers.{layers - 1}." in name])(folder)


OTHER_MODEL = "expected the served model"
HOSTILE: dict[str, tuple[Change, str]] = {
    "another vocabulary": (smaller, f"vocab_size=11, {OTHER_MODEL}"),
    "fewer layers": (deeper, "n_layers="),
    "another base of RoPE": (
        config(rope_parameters={"rope_type": "default", "rope_theta": 77.0}, rope_theta=77.0),
        "rope_theta=77.0",
    ),
    "another epsilon": (config(rms_norm_eps=0.5), f"norm_eps=0.5, {OTHER_MODEL}"),
    "a terabyte announced": (config(vocab_size=2**33, hidden_size=2**20), OTHER_MODEL),
    "another family": (config(model_type="llama"), "layer_types"),
    "no family": (config(model_type="nothing"), "nothing"),
    "config of a list": (lambda folder: (folder / "config.json").write_text("[]"), "expected a JSON object"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    "a tensor less": (tensors(lambda x: x.pop(NORM)), f"key '{NORM}' missing"),
    "a tensor more": (tensors(lambda x: x.update({"model.more.weight": torch.zeros(2)})), "model.more.weight"),
    "another name": (tensors(lambda x: x.update({"model.Norm.weight": x.pop(NORM)})), "model.Norm.weight"),
    "another shape": (tensors(lambda x: x.update({NORM: torch.ones(3)})), f"key '{NORM}' has shape [3]"),
    "integers": (cast(torch.int8), f"key '{NORM}' is torch.int8"),
    "fp8 without scales": (cast(torch.float8_e4m3fn), f"key '{NORM}' is torch.float8_e4m3fn"),
    "infinity": (tensors(lambda x: x[NORM].fill_(torch.inf)), "holds numbers that are not finite"),
    "cut": (lambda folder: os.truncate(folder / "model.safetensors", 4000), "model.safetensors"),
    "half a write": (lambda folder: os.truncate(folder / "model.safetensors", 4), "too few for a safetensors file"),
    "a terabyte of a file": (lambda folder: os.truncate(folder / "model.safetensors", 2**40), "model.safetensors"),
    "a pipe": (
        lambda folder: ((folder / "model.safetensors").unlink(), os.mkfifo(folder / "model.safetensors")),
        "not a regular file",
    ),
    "a link out of the root": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").symlink_to("/etc/hostname")),
        "config.json",
    ),
}


@pytest.fixture(scope="module")
def pushes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushes]:
    root = tmp_path_factory.mktemp("pushes")
    with serving(checkpoint, root) as (server, url):
        yield Pushes(checkpoint, root, server, url)


class Pushes:
    """A server, and folders of pushes to it."""

    def __init__(self, checkpoint: Path, root: Path, server: Any, url: str) -> None:
        self.checkpoint, self.root, self.server, self.url = checkpoint, root, server, url
        self.client = httpx.Client(base_url=f"{url}/v1/rollout", headers=KEY, timeout=60)

    def folder(self, name: str, change: Change = lambda folder: None) -> str:
        target = self.root / name
        shutil.copytree(self.checkpoint, target, dirs_exist_ok=True)
        change(target)
        return name

    def push(self, folder: str, version: int, **fields: Any) -> httpx.Response:
        return self.client.post("/weights", json={"transport": "disk", "folder": folder, "version": version} | fields)

    def version(self) -> int:
        return int(self.client.get(f"{self.url}/v1/rollout").json()["version"])

    def scores(self) -> list[float]:
        found = self.client.post("/score", json={"input_ids": [3, 4, 5, 6, 7]})
        assert found.status_code == 200, found.text
        return list(found.json()["logprobs"])

    def answer(self) -> dict[str, Any]:
        body = {"rid": "a", "input_ids": [3, 4, 5], "sampling": {"greedy": True, "max_new_tokens": 4}}
        found = self.client.post("/generate", json=body)
        assert found.status_code == 200, found.text
        return {name: found.json()[name] for name in ("output_ids", "logprobs", "versions")}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_push_changes_nothing(name: str, pushes: Pushes) -> None:
    change, expected = HOSTILE[name]
    assert pushes.push(pushes.folder("good"), 5).status_code == 200
    before = pushes.answer()
    refused = pushes.push(pushes.folder("hostile", change), 6)
    shutil.rmtree(pushes.root / "hostile")
    assert refused.status_code == 400, refused.text
    message = refused.json()["error"]["message"]
    assert expected in message and "\n" not in message and len(message) <= 2000, message
    assert pushes.version() == 5
    assert pushes.answer() == before


def shifted(by: float) -> Change:
    return tensors(lambda x: x.update({NORM: x[NORM] + by}))


@pytest.fixture(scope="module")
def versions(pushes: Pushes) -> dict[int, tuple[str, list[float]]]:
    """Folders of four versions, and the server's scores with each."""
    found = {}
    for version in range(10, 14):
        folder = pushes.folder(f"version-{version}", shifted(version / 10))
        assert pushes.push(folder, version).status_code == 200
        found[version] = folder, pushes.scores()
    assert len({tuple(scores) for _, scores in found.values()}) == 4
    return found


def test_two_trainers_at_once_leave_one_whole_version(
    pushes: Pushes, versions: dict[int, tuple[str, list[float]]]
) -> None:
    """Pushes and answers at the same time: every answer names the version that computed it, and no version is mixed."""
    order = [10, 11, 12, 13] * 3
    with ThreadPoolExecutor(6) as pool:
        pushed = [pool.submit(pushes.push, versions[version][0], version) for version in order]
        answered = [pool.submit(pushes.answer) for _ in range(12)]
        assert {each.result().status_code for each in pushed} == {200}
        for answer in (each.result() for each in answered):
            assert len(answer["versions"]) == len(answer["output_ids"]) == len(answer["logprobs"])
            assert set(answer["versions"]) <= {5, *versions}
    last = pushes.version()
    assert pushes.scores() == versions[last][1] and set(pushes.answer()["versions"]) == {last}


@pytest.mark.parametrize("sent", [0.5, 1.0], ids=["half of its request", "its request"])
def test_a_trainer_that_dies_after(sent: float, pushes: Pushes, versions: dict[int, tuple[str, list[float]]]) -> None:
    assert pushes.push(versions[10][0], 10).status_code == 200
    body = json.dumps({"transport": "disk", "folder": versions[11][0], "version": 11}).encode()
    head = f"POST /v1/rollout/weights HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = pushes.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as trainer:
        trainer.sendall(head.encode() + body[: int(len(body) * sent)])
    assert pushes.push(versions[12][0], 12).status_code == 200, "the next push comes after that of the dead trainer"
    assert pushes.version() == 12 and pushes.scores() == versions[12][1]


def test_a_rewritten_folder_is_read_once(pushes: Pushes, versions: dict[int, tuple[str, list[float]]]) -> None:
    """A trainer that is killed while it writes leaves half of a folder, which another one completes."""
    assert pushes.push(versions[10][0], 10).status_code == 200
    folder = pushes.folder("partial", lambda folder: os.truncate(folder / "model.safetensors", 5000))
    assert pushes.push(folder, 14).status_code == 400
    assert pushes.version() == 10 and pushes.scores() == versions[10][1]
    shutil.copytree(pushes.root / versions[13][0], pushes.root / folder, dirs_exist_ok=True)
    assert pushes.push(folder, 14).status_code == 200
    assert pushes.scores() == versions[13][1]


@pytest.mark.parametrize(
    "body",
    [
        {"version": 1},
        {"version": -1, "folder": "good", "transport": "disk"},
        {"version": 2**63, "folder": "good", "transport": "disk"},
        {"version": 1.5, "folder": "good", "transport": "disk"},
        {"version": "1", "folder": "good", "transport": "disk"},
        {"version": True, "folder": "good", "transport": "disk"},
        {"version": 1, "folder": "good", "transport": "gloo"},
        {"version": 1, "folder": ["good"], "transport": "disk"},
        {"version": 1, "folder": "g" * 5000, "transport": "disk"},
        {"version": 1, "folder": "good", "transport": "disk", "dtype": "int8"},
        {"version": 1, "folder": "good", "transport": "lora"},
        [],
    ],
    ids=str,
)
def test_a_malformed_push_is_refused(body: Any, pushes: Pushes) -> None:
    assert pushes.push(pushes.folder("good"), 5).status_code == 200
    assert pushes.client.post("/weights", json=body).status_code == 400
    assert pushes.version() == 5


def test_a_lora_of_another_model_is_no_push(pushes: Pushes, tmp_path: Path) -> None:
    assert pushes.push(pushes.folder("good"), 5).status_code == 200
    engine = ArchonEngine(
        EngineConfig.parse({"path": str(pushes.checkpoint), "device": "cpu", "optimizer": None, "lora": {"rank": 2}})
    )
    engine.initialize()
    engine.save(pushes.root / "lora", format="peft")
    file = pushes.root / "lora" / "adapter_model.safetensors"
    whole = load_file(file)
    key = next(key for key in whole if "q_proj.lora_A" in key)
    for changed in (
        {key: torch.zeros(2, 7)},
        {key: whole[key].to(torch.int8)},
        {key: whole[key] * torch.nan},
        {key.replace("q_proj", "x_proj"): whole[key].clone()},
    ):
        save_file(whole | changed, file)
        assert pushes.push("lora", 6, transport="lora").status_code == 400
        assert pushes.version() == 5
    save_file(whole, file)
    assert pushes.push("lora", 6, transport="lora").status_code == 200
    assert pushes.version() == 6
