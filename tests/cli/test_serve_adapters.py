"""`archon serve` with adapters: clients name one as the model, and load and unload them while the server runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from archon.checkpoint.tokenizer import load_tokenizer
from archon.cli.serve import make_server
from archon.cli.serve_config import ServeConfig
from archon.schema.errors import ConfigError
from tests.tolerances import GENERATED_LOGPROB_FP32

ROOT = Path(__file__).parents[2]
TOKEN = {"Authorization": "Bearer secret"}
USER = [{"role": "user", "content": "1+1="}]
ASKS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": USER, "max_tokens": 3, "temperature": 0},
    "/completions": {"prompt": "1+1=", "max_tokens": 3, "temperature": 0},
    "/responses": {"input": USER, "max_output_tokens": 3, "temperature": 0},
    "/messages": {"messages": USER, "max_tokens": 3, "temperature": 0},
}


def wrapped(base: Path, seed: int, rank: int) -> Any:
    """transformers' model of the checkpoint with random adapters, as the real peft makes it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=40, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()


@pytest.fixture(scope="module")
def base(_tiny_checkpoint: Path) -> Path:
    return _tiny_checkpoint


@pytest.fixture(scope="module")
def root(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate({"red": 2, "green": 5, "blue": 8}.items()):
        wrapped(base, seed, rank).save_pretrained(folder / name)
    return folder


@pytest.fixture
async def client(base: Path, root: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the token of a server of the checkpoint as `tiny`, and of two adapters."""
    config = ServeConfig(device="cpu", model_name="tiny", max_loras=4)
    server = make_server(base, config, "secret", {name: root / name for name in ("red", "green")}, root)
    url = await server.start()
    async with httpx.AsyncClient(base_url=url, headers=TOKEN, trust_env=False, timeout=60) as made:
        yield made
    await server.close()


def complaint(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


async def load(client: httpx.AsyncClient, name: str, path: Any, **more: Any) -> httpx.Response:
    return await client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


async def unload(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/unload_lora_adapter", json={"lora_name": name})


async def tokens_of(client: httpx.AsyncClient, model: str, prompt: Any, count: int = 8) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    response = await client.post("/completions", json=body | {"return_token_ids": True})
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


@torch.no_grad()
def pefts_greedy(model: Any, prompt: list[int], count: int = 8) -> list[int]:
    ids = torch.tensor([prompt])
    whole = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        eos_token_id=None,
    )
    return [int(token) for token in whole[0, len(prompt) :]]


async def test_greedy_tokens_are_those_of_pefts_own_generate_for_each_adapter(
    client: httpx.AsyncClient, base: Path
) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 1], [2]]
    reference = {"red": wrapped(base, 0, 2), "green": wrapped(base, 1, 5)}
    asked = [(name, prompt) for prompt in prompts for name in ("red", "tiny", "green")]
    answers = await asyncio.gather(*(tokens_of(client, name, prompt) for name, prompt in asked))
    for (name, prompt), tokens in zip(asked, answers, strict=True):
        if name == "tiny":
            with reference["red"].disable_adapter():
                assert tokens == pefts_greedy(reference["red"], prompt)
        else:
            assert tokens == pefts_greedy(reference[name], prompt), name
    assert len({tuple(tokens) for tokens in answers}) > len(prompts), "adapters change answers"


async def test_the_model_and_its_adapters_are_listed(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/models")).json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [
        ("tiny", None),
        ("red", "tiny"),
        ("green", "tiny"),
    ]
    assert (await client.get("/models/green")).json() == listed[2]
    assert "the models here are 'tiny', 'red', 'green'" in complaint(await client.get("/models/blue"), 404)


@pytest.mark.parametrize("path", ASKS)
async def test_every_protocol_answers_with_the_model_that_is_named(client: httpx.AsyncClient, path: str) -> None:
    for model, said in (("red", "red"), ("tiny", "tiny"), ("", "tiny")):
        response = await client.post(path, json=ASKS[path] | {"model": model})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == said
        stream = await client.post(path, json=ASKS[path] | {"model": model, "stream": True})
        assert f'"model": "{said}"' in stream.text
    refusal = complaint(await client.post(path, json=ASKS[path] | {"model": "blue"}), 404)
    assert refusal == "no model 'blue'; the models here are 'tiny', 'red', 'green'"


async def test_tokens_are_counted_for_a_model_that_there_is(client: httpx.AsyncClient) -> None:
    assert (await client.post("/messages/count_tokens", json={"model": "red", "messages": USER})).status_code == 200
    refusal = await client.post("/messages/count_tokens", json={"model": "blue", "messages": USER})
    assert refusal.json()["type"] == "error"
    assert "no model 'blue'" in complaint(refusal, 404)


async def test_a_prompt_is_scored_with_its_adapter(client: httpx.AsyncClient, base: Path) -> None:
    prompt = [4, 5, 6, 7, 8, 1]
    model = wrapped(base, 0, 2)
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    body = {"model": "red", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = (await client.post("/completions", json=body)).json()["choices"][0]["logprobs"]["token_logprobs"]
    torch.testing.assert_close(torch.tensor(answer[1:]), expected, rtol=0, atol=10 * GENERATED_LOGPROB_FP32)


def with_template(lora: Path, base: Path, folder: Path, template: str) -> Path:
    """A copy of a LoRA with the checkpoint's tokenizer and another chat template."""
    shutil.copytree(lora, folder)
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


async def test_prompts_are_those_that_the_lora_was_trained_with(base: Path, root: Path, tmp_path: Path) -> None:
    config = ServeConfig(device="cpu", model_name="tiny")
    twice = "{% for message in messages %}{{ message['content'] * 2 }}{% endfor %}"
    red = with_template(root / "red", base, tmp_path / "red", twice)
    green = with_template(root / "green", base, tmp_path / "green", twice + "=")
    server = make_server(base, config, "secret", {"red": red}, tmp_path)
    url = await server.start()
    async with httpx.AsyncClient(base_url=url, headers=TOKEN, trust_env=False, timeout=60) as client:
        answer = await client.post("/chat/completions", json={"model": "red", "messages": USER, "max_tokens": 1})
        assert answer.json()["usage"]["prompt_tokens"] == 2 * len("1+1=")
        assert "another chat template" in complaint(await load(client, "green", green), 400)
        assert (await load(client, "again", red)).status_code == 200
    await server.close()
    with pytest.raises(ConfigError, match=f"the LoRA {red} was trained with another chat template"):
        make_server(base, config, None, {"red": red, "blue": root / "blue"})
    make_server(base, config.model_copy(update={"tokenizer": str(red)}), None, {"red": red, "blue": root / "blue"})


async def test_each_lora_ends_its_answers_at_its_own_stop_ids(base: Path, root: Path, tmp_path: Path) -> None:
    tokens = pefts_greedy(wrapped(base, 0, 2), [1, 2, 3])
    unsampled = next(token for token in range(4, 20) if token not in tokens)
    for name, end in (("stops", tokens[0]), ("other", unsampled)):
        shutil.copytree(root / "red", tmp_path / name)
        load_tokenizer(base).save_pretrained(tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    shutil.copytree(root / "red", tmp_path / "plain")
    config = ServeConfig(device="cpu", model_name="tiny")
    server = make_server(base, config, "secret", {"plain": tmp_path / "plain", "stops": tmp_path / "stops"}, tmp_path)
    url = await server.start()
    async with httpx.AsyncClient(base_url=url, headers=TOKEN, trust_env=False, timeout=60) as client:

        async def answer(model: str) -> tuple[int, str]:
            body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            choice = (await client.post("/completions", json=body)).json()["choices"][0]
            return len(choice["token_ids"]), choice["finish_reason"]

        assert (await load(client, "other", tmp_path / "other")).status_code == 200
        answers = await asyncio.gather(*map(answer, ("plain", "stops", "other")))
        assert answers == [(8, "length"), (1, "stop"), (8, "length")]
        assert (await load(client, "stops", tmp_path / "plain", load_inplace=True)).status_code == 200
        assert await answer("stops") == (8, "length")
    await server.close()


async def test_adapters_are_loaded_replaced_and_unloaded_while_others_answer(
    client: httpx.AsyncClient, base: Path, root: Path, tmp_path: Path
) -> None:
    reference = pefts_greedy(wrapped(base, 2, 8), [1, 2, 3])
    steady = [asyncio.create_task(tokens_of(client, name, [3, 2, 1], 24)) for name in ("red", "green", "tiny") * 4]
    assert (await load(client, "blue", "blue")).json() == (await client.get("/models/blue")).json()
    assert await tokens_of(client, "blue", [1, 2, 3]) == reference
    assert "is already loaded" in complaint(await load(client, "blue", root / "red"), 400)
    assert (await load(client, "blue", root / "red", load_inplace=True)).status_code == 200
    assert await tokens_of(client, "blue", [1, 2, 3]) == await tokens_of(client, "red", [1, 2, 3])
    running = asyncio.create_task(tokens_of(client, "blue", [3, 2, 1], 24))
    while (await client.get("/adapters")).json()["data"][2]["unfinished"] == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (await unload(client, "blue")).json() == {"id": "blue", "object": "model", "deleted": True}
    answers = await asyncio.gather(*steady)
    assert answers[:3] * 4 == answers
    assert await running == answers[0], "an answer in progress ends with the adapter that it began with"
    lost = await asyncio.gather(
        *(client.post("/completions", json=ASKS["/completions"] | {"model": "blue"}) for _ in range(40))
    )
    assert {complaint(answer, 404) for answer in lost} == {
        "no model 'blue'; the models here are 'tiny', 'red', 'green'"
    }
    assert "unknown LoRA 'blue'" in complaint(await unload(client, "blue"), 404)
    assert (await load(client, "blue", "blue")).status_code == 200
    assert await tokens_of(client, "blue", [1, 2, 3]) == reference, "pages of the earlier one are not used"


async def test_uses_are_counted_by_adapter(client: httpx.AsyncClient) -> None:
    await asyncio.gather(*(tokens_of(client, name, [1, 2, 3], 5) for name in ("red", "red", "tiny")))
    red, green = (await client.get("/adapters")).json()["data"]
    assert red == {
        "name": "red",
        "version": 0,
        "unfinished": 0,
        "requests": 2,
        "prompt_tokens": 6,
        "answer_tokens": 10,
    }
    assert green["requests"] == 0


async def test_only_the_servers_token_loads_and_unloads(client: httpx.AsyncClient) -> None:
    session = (await client.post("/sessions")).json()
    for key, status in ((session["api_key"], 403), ("guess", 401)):
        bearer = {"Authorization": f"Bearer {key}"}
        body = {"lora_name": "blue", "lora_path": "blue"}
        assert complaint(await client.post("/load_lora_adapter", json=body, headers=bearer), status)
        body = {"lora_name": "red"}
        assert complaint(await client.post("/unload_lora_adapter", json=body, headers=bearer), status)
    asked = ASKS["/chat/completions"] | {"model": "red"}
    own = {"Authorization": f"Bearer {session['api_key']}"}
    answer = await client.post("/chat/completions", json=asked, headers=own)
    assert answer.json()["model"] == "red", "a session's requests name models as others do"
    await client.post("/chat/completions", json=asked | {"model": "tiny"}, headers=own)
    for reward in ({"completion_id": answer.json()["id"]}, {}):
        await client.post(f"/sessions/{session['id']}/reward", json={"reward": 1.0} | reward, headers=own)
    for style in ("individual", "concat"):
        exported = await client.get(f"/sessions/{session['id']}/export", params={"style": style}, headers=own)
        assert [row["adapter"] for row in exported.json()["trajectories"]] == ["red", None]


def _copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def _outside(root: Path, tmp_path: Path) -> tuple[Any, str]:
    return _copy(root / "red", tmp_path / "red"), "is outside of"


def _above(root: Path, tmp_path: Path) -> tuple[Any, str]:
    _copy(root / "red", root.parent / "stray") if not (root.parent / "stray").exists() else None
    return "../stray", "is outside of"


def _link_to_folder(root: Path, tmp_path: Path) -> tuple[Any, str]:
    (root / "linked").unlink(missing_ok=True)
    (root / "linked").symlink_to(_copy(root / "red", tmp_path / "red"))
    return "linked", "is outside of"


def _link_to_file(root: Path, tmp_path: Path) -> tuple[Any, str]:
    shutil.copy(root / "red" / "adapter_model.safetensors", tmp_path)
    folder = _copy(root / "red", root / tmp_path.name)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "adapter_model.safetensors")
    return folder, "is outside of"


def _link_to_stop_ids(root: Path, tmp_path: Path) -> tuple[Any, str]:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    folder = _copy(root / "red", root / tmp_path.name)
    (folder / "generation_config.json").symlink_to(tmp_path / "generation_config.json")
    return folder, "is outside of"


def _pipe(root: Path, tmp_path: Path) -> tuple[Any, str]:
    folder = _copy(root / "red", root / tmp_path.name)
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    return folder, "no regular file"


def _pickle(root: Path, tmp_path: Path) -> tuple[Any, str]:
    folder = _copy(root / "red", root / tmp_path.name)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    return folder, "is a pickle, which is never read"


def _not_finite(root: Path, tmp_path: Path) -> tuple[Any, str]:
    folder = _copy(root / "red", root / tmp_path.name)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[min(tensors)].view(-1)[0] = torch.nan
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder, "not finite"


def _other_rank(root: Path, tmp_path: Path) -> tuple[Any, str]:
    folder = _copy(root / "red", root / tmp_path.name)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    return folder, "says 3"


def _other_base(root: Path, tmp_path: Path) -> tuple[Any, str]:
    folder = _copy(root / "red", root / tmp_path.name)
    tensors = load_file(folder / "adapter_model.safetensors")
    named = {key: torch.cat([x, x], dim=1).contiguous() if "q_proj.lora_A" in key else x for key, x in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder, "of another model?"


def _nothing(root: Path, tmp_path: Path) -> tuple[Any, str]:
    return "nothing", "is no folder in"


def _nul(root: Path, tmp_path: Path) -> tuple[Any, str]:
    return "red\0", "is outside of"


def _empty(root: Path, tmp_path: Path) -> tuple[Any, str]:
    return ".", "has no adapter_config.json"


HOSTILE = (
    _outside,
    _above,
    _link_to_folder,
    _link_to_file,
    _link_to_stop_ids,
    _pipe,
    _pickle,
    _not_finite,
    _other_rank,
    _other_base,
    _nothing,
    _nul,
    _empty,
)


async def test_a_hostile_load_is_one_line_and_changes_nothing(
    client: httpx.AsyncClient, root: Path, tmp_path: Path
) -> None:
    before = await tokens_of(client, "red", [1, 2, 3])
    for make in HOSTILE:
        place = tmp_path / f"{make.__name__}-{tmp_path.parent.name}-{tmp_path.name}"
        place.mkdir()
        path, expected = make(root, place)
        for name, more in (("new", {}), ("red", {"load_inplace": True})):
            assert expected in complaint(await load(client, name, path, **more), 400), make.__name__
    for name, expected in (("tiny", "the base model's name"), ("a\nb", "unprintable characters"), ("", "lora_name")):
        assert expected in complaint(await load(client, name, "red"), 400)
    assert (await load(client, "three", "blue")).status_code == 200
    assert (await load(client, "four", "blue")).status_code == 200
    assert "4 LoRAs are loaded, the maximum" in complaint(await load(client, "five", "blue"), 400)
    assert [model["id"] for model in (await client.get("/models")).json()["data"]][3:] == ["three", "four"]
    assert await tokens_of(client, "red", [1, 2, 3]) == before


async def test_a_server_without_a_root_keeps_the_adapters_that_it_began_with(base: Path, root: Path) -> None:
    server = make_server(base, ServeConfig(device="cpu", model_name="tiny"), None, {"red": root / "red"})
    url = await server.start()
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        assert "start it with --lora-root and --token" in complaint(await load(client, "blue", root / "blue"), 403)
        assert "start it with --lora-root and --token" in complaint(await unload(client, "red"), 403)
        assert len(await tokens_of(client, "red", [1, 2, 3])) == 8
    await server.close()


@pytest.mark.slow
def test_the_lines_of_the_guide_run(base: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "adapters").symlink_to(root)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    guide = (ROOT / "docs" / "tasks" / "serve.md").read_text()
    lines = re.findall(r"<!-- test: serve-adapters -->\n```bash\n(.*?)```", guide, re.DOTALL)[0]
    serve, *asks = lines.replace("8123", port).replace("\\\n", " ").strip().splitlines()
    command = [sys.executable, "-m", *shlex.split(serve)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving base at")
        answers = [subprocess.run(shlex.split(ask), capture_output=True, text=True).stdout for ask in asks]
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
    models, completion, loaded, unloaded, uses = answers
    assert [model["id"] for model in json.loads(models)["data"]] == ["base", "red"]
    assert json.loads(completion)["model"] == "red"
    assert json.loads(loaded)["id"] == json.loads(unloaded)["id"] == "blue"
    assert json.loads(uses)["data"][0]["requests"] == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--lora", "red"], "--lora 'red'; expected NAME=FOLDER"),
        (["--lora", "x=a", "--lora", "x=b"], "has the name 'x' twice"),
        (["--lora-root", "."], "requires a token; set one with --token"),
        (["--lora-root", "no/where", "--token", "t"], "'no/where' is not a folder"),
        (["--lora", "x=a", "--train", "run.yaml"], "remove one of them"),
        (["--lora", "x=no/where"], "no/where"),
        (["--lora", "checkpoint=a"], "has the name of the base model, 'checkpoint'"),
    ],
)
def test_what_cannot_be_served_is_one_line(archon: Any, checkpoint: Path, options: list[str], expected: str) -> None:
    assert expected in archon("serve", checkpoint, *options).complaint
