"""Servers that answer with anything: each is left out with one line, and the others answer its prompts."""

from __future__ import annotations

import asyncio
import base64
import re
import resource
from collections.abc import Callable, Iterator
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.remote.answer_checks import Answer, Expected, Fields, check_answer
from archon.remote.dialects.archon import Archon
from archon.remote.dialects.base import Dialect, Sampling, ServerFacts
from archon.remote.dialects.sglang import SGLang
from archon.remote.dialects.vllm import VLLM
from archon.remote.engine import NoServerError
from archon.remote.http import RefusedError, ServerError
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError
from tests.remote.hostile import CHANGES, LIMIT, RESPONSES, STOP, HostileTwin, answer, dripping, respond
from tests.remote.twin import VLLMTwin

MakeConfig = Callable[..., RLConfig]
URL = "http://127.0.0.1:9"


@pytest.fixture
def hostile(checkpoint: Path) -> Iterator[HostileTwin]:
    server = HostileTwin(checkpoint)
    yield server
    server.stop()


def small(config: RLConfig, **rollout: Any) -> RLConfig:
    """Two prompts a step, one for each server, with two answers."""
    run = config.model_dump()
    run["rollout"] |= {"prompts_per_step": 2, **rollout}
    run["gconfig"]["n_samples"] = 2
    return RLConfig.parse(run)


@pytest.mark.slow
def test_a_hostile_server_is_left_out_and_no_prompt_is_lost(
    rl_config: MakeConfig, twin: Callable[..., VLLMTwin], hostile: HostileTwin
) -> None:
    """Every answer is one line that names server, field and value; each prompt is trained once."""
    good = twin()
    trainer = RLTrainer(small(rl_config([hostile.url, good.url])))
    cases = [(name, change, None, message) for name, (change, message) in CHANGES.items()]
    cases += [(name, None, send, message) for name, (send, message) in RESPONSES.items()]
    with trainer.opened():
        engine, before = trainer.generator, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name, change, send, message in cases:
            hostile.change, hostile.send = change, send
            asked = len(hostile.generated())
            batch = trainer.rollout_batch()
            assert len(hostile.generated()) > asked, name
            assert len(batch.prompts) == len({prompt.index for prompt in batch.prompts}) == 2, name
            assert len(batch.trajectories["rewards"]) == 4, name
            assert not [key for key in batch.counts if key.startswith(("dropped", "failed"))], name
            failure = str(engine.servers[0].failure)
            assert failure.startswith(hostile.url) and "\n" not in failure and len(failure) < 700, name
            assert re.search(message, failure), (name, failure)
            assert engine.servers[1].failure is None, name
            hostile.change = hostile.send = None
            assert engine.restore_server(engine.servers[0]), name
        assert engine.stats.lost == engine.stats.returned == len(cases)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 200_000, f"{grown} KiB: no hostile response is held"
        # The last server that fails ends the run, with the reasons of all.
        hostile.send = respond("no", 500)
        good.faults = {"down"}
        with pytest.raises(NoServerError, match=rf"{hostile.url}.* status 500.*; {good.url}.* status 503"):
            trainer.train_step()


def test_a_hostile_server_in_training(
    rl_config: MakeConfig, twin: Callable[..., VLLMTwin], hostile: HostileTwin
) -> None:
    """It returns with each push and fails again, in three steps that train on every prompt."""
    good = twin()
    trainer = RLTrainer(small(rl_config([hostile.url, good.url])))
    hostile.change = answer([3] * (LIMIT + 1))
    with trainer.opened():
        for _ in range(3):
            metrics = trainer.train_step()
            assert metrics["samples"] == 4 and metrics["push/servers"] == 2 and metrics["servers/lost"] == 1


def test_a_server_that_drips_is_late(
    rl_config: MakeConfig, twin: Callable[..., VLLMTwin], hostile: HostileTwin
) -> None:
    trainer = RLTrainer(small(rl_config([hostile.url, twin().url]), push={"answer_seconds": 2.0}))
    hostile.send = dripping
    with trainer.opened():
        assert len(trainer.rollout_batch().prompts) == 2
        assert "did not answer within 2 s" in str(trainer.generator.servers[0].failure)


def test_a_request_that_every_server_refuses_is_at_fault(
    rl_config: MakeConfig, twin: Callable[..., VLLMTwin], hostile: HostileTwin, checkpoint: Path
) -> None:
    """Servers that agree stay in the fleet; one that refuses what another answers leaves it."""
    second = HostileTwin(checkpoint)
    try:
        trainer = RLTrainer(small(rl_config([hostile.url, second.url])))
        hostile.send = second.send = respond("no", 400)
        with trainer.opened():
            engine = trainer.generator
            with pytest.raises(RefusedError, match="status 400: no"):
                asyncio.run(engine.agenerate(ModelRequest([3, 4])))
            assert all(server.failure is None for server in engine.servers)
            second.send = None
            assert asyncio.run(engine.agenerate(ModelRequest([3, 4]))).output_tokens
            assert "status 400" in str(engine.servers[0].failure) and engine.servers[1].failure is None
    finally:
        second.stop()


def test_sglang_cannot_ignore_only_its_own_ends() -> None:
    """Its ignore_eos also disables stop_token_ids."""
    dialect, _ = BODIES["sglang"]
    with pytest.raises(ConfigError, match=r"stop_token_ids \[3\], but SGLang ignores both ends"):
        dialect.check(GenerationHyperparameters(ignore_eos=True, stop_token_ids=[3]))
    for ids in ([], [3]):
        sampling = Sampling([1], GenerationHyperparameters(), 4, ids, 0, "r", "tiny")
        assert dialect.request(sampling)[1]["sampling_params"]["ignore_eos"] is not bool(ids)


FACTS = ServerFacts("kind", "1", "tiny", 64, "processed", "float32", frozenset())
TOKENS, LOGPROBS = [3, 4, 5, STOP], [-0.5, -1.0, 0.0, -2.0]
CONTENT = [{"token_id": token, "logprob": logprob} for token, logprob in zip(TOKENS, LOGPROBS, strict=True)]
CHOICE = {"token_ids": TOKENS, "finish_reason": "stop"}
SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}]
BODIES: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "vllm": (
        VLLM(FACTS, URL, generates=True),
        {"choices": [CHOICE | {"logprobs": {"content": CONTENT}, "weight_versions": SPANS}]},
    ),
    "completions": (
        VLLM(FACTS, URL, generates=False),
        {"choices": [CHOICE | {"logprobs": {"token_logprobs": LOGPROBS}}]},
    ),
    "sglang": (
        SGLang(FACTS, URL),
        {
            "output_ids": TOKENS,
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "weight_version": "3",
                "output_token_logprobs": [[item["logprob"], item["token_id"], None] for item in CONTENT],
            },
        },
    ),
    "archon": (
        Archon(FACTS, URL),
        {"output_ids": TOKENS, "logprobs": LOGPROBS, "versions": [3, 4, 4, 4], "stop_reason": "stop"},
    ),
}
HOSTILE_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -2,
        10**12,
        10**400,
        1.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "x" * 10**6,
        "\x1b[2J",
    ),
    *([], {}, [[]], {"type": "stop"}, [None] * 4, [True] * 4, [{}] * 4, [["stop"]] * 4),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all parts of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def checked(dialect: Dialect, body: Any, limit: int = 8) -> Answer:
    expected = Expected(15, limit, limit, [STOP], GenerationHyperparameters())
    return check_answer(dialect.answer(Fields(URL, body)), expected)


@pytest.mark.parametrize("name", BODIES)
def test_every_field_of_every_dialect_is_checked(name: str) -> None:
    """Each part of an answer in turn is missing, or another value: an error in one line, or the same answer."""
    dialect, body = BODIES[name]
    good = checked(dialect, body)
    assert (good.tokens, good.logprobs, good.stop_reason) == (TOKENS, LOGPROBS, "stop")
    refused = 0
    for path in places(body):
        for value in (*HOSTILE_VALUES, KeyError):
            changed: Any = deepcopy(body)
            if not path:
                changed = None if value is KeyError else value
            else:
                parent = changed
                for key in path[:-1]:
                    parent = parent[key]
                if value is KeyError:
                    del parent[path[-1]]
                else:
                    parent[path[-1]] = value
            try:
                found = checked(dialect, changed)
            except ServerError as error:
                refused += 1
                message = str(error)
                assert message.startswith(URL) and message.isprintable() and len(message) < 500, (path, value)
            else:
                # The value is possible, or stands in a field that is not read.
                assert (found.tokens, found.stop_reason) == (TOKENS, "stop"), (path, value)
                assert all(type(x) is float and -1e3 < x < 1e-2 for x in found.logprobs), (path, value)
                covered = [i for name, start, end in found.versions for i in range(start, end) if type(name) is str]
                assert covered in ([], [0, 1, 2, 3]), (path, value)
    assert refused > len(HOSTILE_VALUES) * 10


@pytest.mark.parametrize(
    ("tokens", "reason", "stop", "message"),
    [
        ([3, STOP], "stop", [], None),
        ([3, 4], "stop", ["x"], None),  # a stop string may end with any token
        ([], "stop", ["x"], "stop only after a token"),
        ([3, 4], "stop", [], r"stop only after a stop token, but the 2 tokens end with \[4\]"),
        ([3] * 8, "length", [], None),
        ([3] * 7 + [STOP], "length", [], None),  # vLLM and SGLang check the length first
        ([3, 4], "abort", [], None),
        ([], "abort", [], None),
        ([3] * 8, "abort", [], "stop or length"),
        ([3, STOP, STOP], "stop", [], "no token after this stop token, got 1"),
        ([STOP, 3], "stop", ["x"], "no token after this stop token"),
        ([3] * 7, "length", [], "length only after 8 tokens, got 7"),
    ],
)
def test_answers_that_contradict_themselves_are_refused(
    tokens: list[int], reason: str, stop: list[str], message: str | None
) -> None:
    dialect, _ = BODIES["archon"]
    logprobs, n = [-1.0] * len(tokens), len(tokens)
    body = {"output_ids": tokens, "logprobs": logprobs, "versions": [0] * n, "stop_reason": reason}
    expected = Expected(15, 8, 8, [STOP], GenerationHyperparameters(stop=stop))
    raw = dialect.answer(Fields(URL, body))
    if message is None:
        assert check_answer(raw, expected).tokens == tokens
    else:
        with pytest.raises(ServerError, match=message):
            check_answer(raw, expected)


def npy(array: np.ndarray) -> bytes:
    with BytesIO() as file:
        np.save(file, array)
        return file.getvalue()


EXPERTS = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)


@pytest.mark.parametrize("array", [EXPERTS, EXPERTS.astype(np.int32), np.asfortranarray(EXPERTS.astype(np.int16))])
def test_experts_are_read_as_numpy_reads_them(array: np.ndarray) -> None:
    dialect, body = BODIES["vllm"]
    choice = body["choices"][0] | {"routed_experts": base64.b64encode(npy(array)).decode()}
    found = checked(dialect, {"choices": [choice]}).experts
    assert found is not None and found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    "data",
    [
        npy(EXPERTS).replace(b"(4, 3, 2)", b"(900000000, 3, 2)"),  # numpy would allocate 5 GB
        npy(EXPERTS)[:-1],
        npy(EXPERTS) + b"0",
        npy(EXPERTS[0]),
        npy(EXPERTS.astype(np.float64)),
        npy(EXPERTS).replace(b"'|u1'", b"'|O'  "),
        npy(EXPERTS).replace(b"(4, 3, 2)", b"(4, 3, 2" + b"(" * 90),
        b"",
    ],
    ids=["huge", "short", "long", "two dimensions", "floats", "objects", "brackets", "empty"],
)
def test_experts_that_are_no_array_are_refused(data: bytes) -> None:
    dialect, body = BODIES["vllm"]
    for text in (base64.b64encode(data).decode(), data.decode("latin-1"), 7, ["x"]):
        choice = body["choices"][0] | {"routed_experts": text}
        with pytest.raises(ServerError, match="expected base64 of a NumPy file"):
            checked(dialect, {"choices": [choice]})
