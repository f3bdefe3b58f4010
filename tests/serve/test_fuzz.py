"""Whatever is sent to the server is answered as `/openapi.json` says: nothing breaks it, nothing wrong is accepted."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters
from archon.rl.bootstrap import make_tokenizer
from archon.serve import AgentServer, Limits
from archon.serve.lora_folders import LoRAFolders
from archon.serve.routes import app
from archon.training.config import TokenizerRecipe
from tests.lora.random_lora import random_lora
from tests.small_qwen3 import small_model

TOKEN = "secret"
OWN = {"Authorization": f"Bearer {TOKEN}"}
USER = [{"role": "user", "content": "1+1="}]
# What the description cannot say enough of: a conversation that fits into the context, tokens of the vocabulary.
FITTING: dict[str, Any] = {
    "chat": {"model": "", "messages": USER, "tools": None},
    "completion": {"model": "", "prompt": "1+1="},
    "response": {"model": "", "input": USER, "instructions": "", "tools": None},
    "message": {"model": "", "messages": USER, "system": "", "tools": None},
    "count_tokens": {"model": "archon", "messages": USER, "system": "", "tools": None},
    "load_lora_adapter": {"lora_name": "spare", "lora_path": "one", "load_inplace": True},
    "unload_lora_adapter": {"lora_name": "spare"},
}
OURS = st.sampled_from([True, True, True, False])
load_all_checks()


@dataclass(frozen=True)
class Operation:
    """What `/openapi.json` says of a path and a method."""

    name: str
    method: str
    path: str
    success: int
    refusals: frozenset[int]


def described() -> list[Operation]:
    operations = []
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            statuses = sorted(map(int, operation["responses"]))
            operations.append(Operation(operation["operationId"], method, path, statuses[0], frozenset(statuses[1:])))
    return operations


OPERATIONS = described()


def test_the_description_names_every_endpoint() -> None:
    assert {operation.name for operation in OPERATIONS} == {
        *FITTING, "models", "model", "adapters", "open_session", "reward", "export", "close_session", "health"
    }  # fmt: skip
    for operation in OPERATIONS:
        assert operation.success in (200, 201)
        assert {401, 403} <= operation.refusals or operation.name == "health"
        assert 422 not in operation.refusals
        assert (
            operation.method != "post" or operation.name == "open_session" or {400, 408, 413, 415} <= operation.refusals
        )


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the real generator, whose tokenizer takes any text, in a thread with a loop of its own; its URL."""
    tokenizer = make_tokenizer(TokenizerRecipe(kind="bpe"))
    model, root = small_model(len(tokenizer), max_seq_len=256), tmp_path_factory.mktemp("adapters")
    (root / "one").mkdir()
    (root / "one" / "adapter_config.json").touch()
    folders = LoRAFolders(root, lambda folder: random_lora(model, 0))
    engine = InProcessEngine.from_model(model, tokenizer, max_slots=32)
    limits = Limits(sessions=10_000)
    server = AgentServer(
        tokenizer,
        engine,
        GenerationHyperparameters(max_new_tokens=4),
        token=TOKEN,
        limits=limits,
        lora_folders=folders,
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="served")
    thread.start()
    yield asyncio.run_coroutine_threadsafe(server.start(), loop).result().removesuffix("/v1")
    asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def own_session(url: str) -> str:
    """The id of a session with one rewarded answer."""
    session = requests.post(f"{url}/v1/sessions", headers=OWN).json()
    key = {"Authorization": f"Bearer {session['api_key']}"}
    asked = requests.post(f"{url}/v1/completions", json={"prompt": "1", "max_tokens": 2}, headers=key)
    rewarded = requests.post(f"{url}/v1/sessions/{session['id']}/reward", json={"reward": 1}, headers=key)
    assert (asked.status_code, rewarded.status_code) == (200, 200)
    return str(session["id"])


def fuzz(url: str, operation: Operation, examples: int) -> Counter[int]:
    """Ask for `operation` in many ways, right and wrong ones; returns how often each status came."""
    description = schemathesis.openapi.from_dict(requests.get(f"{url}/openapi.json").json())
    asked = description[operation.path][operation.method]
    seen: Counter[int] = Counter()

    def ask(case: schemathesis.Case, of_ours: bool) -> None:
        assert case.meta is not None
        if any(isinstance(value, list) and len(value) == 1 for value in (case.query or {}).values()):
            return  # a query has no types: a list of one is sent as its item, which may be right
        if of_ours and "session" in case.path_parameters and not case.meta.is_negative_at(ParameterLocation.PATH):
            case.path_parameters["session"] = own_session(url)
        if of_ours and "model" in case.path_parameters and not case.meta.is_negative_at(ParameterLocation.PATH):
            case.path_parameters["model"] = "archon"
        if of_ours and operation.name in FITTING and not case.meta.is_negative_at(ParameterLocation.BODY):
            case.body |= FITTING[operation.name]
        if operation.name == "unload_lora_adapter":
            requests.post(f"{url}/v1/load_lora_adapter", json=FITTING["load_lora_adapter"], headers=OWN)
        response = case.call(base_url=url, headers=OWN, timeout=120)
        seen[response.status_code] += 1
        # What the description allows may still be more than the context holds.
        case.validate_response(response, headers=OWN, excluded_checks=[positive_data_acceptance])

    alike = settings(  # the same requests in every run; how long one takes is the machine's business
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for mode in GenerationMode:
        if mode is GenerationMode.POSITIVE or operation.refusals:  # else there is nothing to do wrong
            alike(given(asked.as_strategy(generation_mode=mode), OURS)(ask))()
    return seen


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("examples", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_what_is_sent_is_answered_as_described(live: str, operation: Operation, examples: int) -> None:
    seen = fuzz(live, operation, examples)
    assert seen[operation.success] > 0, seen  # so that more than refusals was looked at
    assert 400 not in operation.refusals or seen[400] > 0, seen
