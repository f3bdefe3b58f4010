"""The engine over servers: what it sends, what it refuses, and how it chooses, loses and regains servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from archon.checkpoint.hf_io import load_model
from archon.generation.inprocess import InProcessEngine
from archon.generation.types import Constraint, GenerationHyperparameters, InferenceEngine, ModelRequest
from archon.remote import engine as remote_engine
from archon.remote import weight_stream
from archon.remote.config import PushConfig
from archon.remote.connect import connect
from archon.remote.engine import NoServerError, RemoteEngine
from archon.remote.http import Http
from archon.schema.errors import ConfigError, ContextOverflowError, RolloutError
from tests.remote.twin import VLLMTwin
from tests.tolerances import FIRST_RATIO_FP32

MakeTwin = Callable[..., VLLMTwin]
PROMPT = [1, 2, 10, 3, 4, 11]


class Weights:
    """What a trainer pushes: the checkpoint that the twins serve."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint, self._engine = checkpoint, InProcessEngine.from_model(load_model(checkpoint))

    def write(self, transport: str, folder: Path, dtype: str | None) -> None:
        assert dtype == "float32"
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to(self._checkpoint)

    def tensors(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from load_file(self._checkpoint / "model.safetensors").items()

    def score(self, tokens: list[int]) -> list[float]:
        return self._engine.prompt_logprobs(tokens)


class AwayFromServer:
    """Weights whose scores differ from those of the server by `offsets`."""

    def __init__(self, weights: Weights, offsets: list[float]) -> None:
        self._weights, self._offsets = weights, offsets

    def write(self, transport: str, folder: Path, dtype: str | None) -> None:
        self._weights.write(transport, folder, "float32")

    def tensors(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        return self._weights.tensors(dtype)

    def score(self, tokens: list[int]) -> list[float]:
        return [score + away for score, away in zip(self._weights.score(tokens), self._offsets, strict=True)]


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> Weights:
    return Weights(checkpoint)


@pytest.fixture(scope="module")
def connected(tokenizer: Any, weights: Weights) -> Callable[..., RemoteEngine]:
    """Connect twins and pushes version 0."""

    def make(*servers: VLLMTwin, **settings: Any) -> RemoteEngine:
        urls = [server.url for server in servers]
        engine = connect(urls, PushConfig(**settings), vocab_size=len(tokenizer), tokenizer=tokenizer, log=print)
        engine.update_weights(weights, version=0)
        return engine

    return make


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[VLLMTwin]:
    """A twin for tests that leave it as it is."""
    shared = VLLMTwin(checkpoint)
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def engine(connected: Callable[..., RemoteEngine], server: VLLMTwin) -> RemoteEngine:
    return connected(server)


def ask(engine: RemoteEngine, *requests: ModelRequest) -> list[Any]:
    async def run() -> list[Any]:
        return await asyncio.gather(*(engine.agenerate(request) for request in requests), return_exceptions=True)

    return asyncio.run(run())


def request(seed: int | None = 0, rid: str = "r", group: object = None, **gconfig: Any) -> ModelRequest:
    metadata = {} if group is None else {"group": group}
    settings = GenerationHyperparameters(**{"max_new_tokens": 8, "seed": seed, **gconfig})
    return ModelRequest(list(PROMPT), settings, rid=rid, metadata=metadata)


@pytest.mark.parametrize("scale_out", [True, False], ids=["generate", "completions"])
def test_answers_are_those_of_the_generator_in_process(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, checkpoint: Path, tokenizer: Any, scale_out: bool
) -> None:
    own = InProcessEngine.from_model(load_model(checkpoint), tokenizer)
    engine = connected(twin(scale_out=scale_out))
    assert isinstance(engine, InferenceEngine)
    wanted = [
        request(1),
        request(2, greedy=True),
        request(3, top_p=0.5, top_k=3),
        request(4, stop=["3"], max_new_tokens=30),
        request(5, min_new_tokens=5, stop_token_ids=[1, 2, 3]),
        request(6, max_tokens=8),
        request(7, ignore_eos=True, max_new_tokens=40),
    ]
    answers = ask(engine, *wanted)
    for asked, answer, expected in zip(wanted, answers, own.generate(wanted), strict=True):
        assert answer.output_tokens == expected.output_tokens and answer.stop_reason == expected.stop_reason
        assert answer.output_logprobs == pytest.approx(expected.output_logprobs, abs=FIRST_RATIO_FP32)
        assert answer.output_versions == [0] * len(expected.output_tokens)
        assert answer.input_tokens == asked.input_ids and answer.latency > 0
    assert engine.prompt_logprobs(PROMPT) == pytest.approx(own.prompt_logprobs(PROMPT), abs=FIRST_RATIO_FP32)


def test_defaults_of_the_server_decide_nothing(engine: RemoteEngine, server: VLLMTwin) -> None:
    """vLLM takes what a request leaves out from the model's generation_config.json, also the ids that end an answer."""
    ask(engine, request())
    params = server.generated()[-1]["sampling_params"]
    assert params["ignore_eos"] and params["stop_token_ids"] == list(engine.eos_token_ids)
    assert (params["min_p"], params["repetition_penalty"], params["top_k"], params["top_p"]) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    "gconfig", [{"min_p": 0.1}, {"presence_penalty": 1}, {"logit_bias": {5: 1}}, {"top_logprobs": 2}]
)
def test_values_that_are_not_sent_to_servers_are_refused(engine: RemoteEngine, gconfig: dict[str, Any]) -> None:
    (error,) = ask(engine, request(**gconfig))
    with pytest.raises(RolloutError, match="need the in-process generator"):
        raise error


def test_constraints_of_an_answer_are_refused(engine: RemoteEngine) -> None:
    constrained = request()
    constrained.constraint = Mock(spec=Constraint)
    (error,) = ask(engine, constrained)
    with pytest.raises(RolloutError, match=r"constrains its answer, .* needs the in-process generator"):
        raise error


def test_values_whose_logprobs_the_server_cannot_give_are_refused(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, engine: RemoteEngine
) -> None:
    processed = connected(twin(logprobs_mode="processed_logprobs"))
    cases: list[tuple[RemoteEngine, dict[str, Any], str]] = [
        (engine, {"temperature": 0.7}, "temperature is 0.7.* --logprobs-mode processed_logprobs"),
        (engine, {"temperature": 0.005}, "temperature is 0.005, .* raises it to 0.01"),
        (processed, {"temperature": 0.7, "greedy": True}, "temperature is 0.7.* set temperature to 1"),
        (processed, {"top_p": 0.9}, "top_p is 0.9, .* start it with --logprobs-mode raw_logprobs"),
        (processed, {"top_k": 5}, "top_k is 5, .* start it with --logprobs-mode raw_logprobs"),
        (processed, {"min_new_tokens": 2}, "min_new_tokens is 2, .* start it with --logprobs-mode raw_logprobs"),
    ]
    for asked, gconfig, message in cases:
        (error,) = ask(asked, request(**gconfig))
        with pytest.raises(ConfigError, match=message):
            raise error


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"input_ids": []}, RolloutError, "the prompt is empty"),
        ({"input_ids": [99]}, RolloutError, "token id 99 is not below the vocabulary size"),
        ({"input_ids": [1] * 64}, ContextOverflowError, "prompt of 64 tokens leaves no room"),
        ({"image_data": [b"x"]}, RolloutError, "servers accept only tokens"),
        ({"gconfig": GenerationHyperparameters(n_samples=2)}, RolloutError, "n_samples is 2; expected 1"),
    ],
)
def test_requests_that_no_server_could_answer_are_refused(
    engine: RemoteEngine, changed: dict[str, Any], kind: type[Exception], message: str
) -> None:
    asked = request()
    for name, value in changed.items():
        setattr(asked, name, value)
    (error,) = ask(engine, asked)
    with pytest.raises(kind, match=message):
        raise error


@pytest.mark.parametrize(
    ("offsets", "is_verified"),
    [
        ([1.5] + [0.07] * 9, False),  # 0.21 on average, as of a stale head
        ([0.38] * 10, False),
        ([1.5] + [0.0] * 61, True),  # one improbable token, rounded
        ([2.1] + [0.0] * 61, False),
        ([float("nan")] + [0.0] * 9, False),
    ],
)
def test_in_bfloat16_the_mean_tells_a_stale_head_from_rounding(
    twin: MakeTwin, tokenizer: Any, weights: Weights, offsets: list[float], is_verified: bool
) -> None:
    probe = [place % len(tokenizer) for place in range(len(offsets) + 1)]
    engine = connect([twin(dtype="bfloat16").url], vocab_size=len(tokenizer), tokenizer=tokenizer, probe=probe)
    refused = pytest.raises(NoServerError, match=r"away from the trainer .* \(limit 2.0e\+00\), and .* on average")
    with nullcontext() if is_verified else refused:
        engine.update_weights(AwayFromServer(weights, offsets), version=0)


@pytest.mark.parametrize(
    ("limit", "offset", "is_verified"),
    [(None, 5e-3, False), (None, 5e-5, True), (0.5, 0.3, True), (2e-5, 5e-5, False)],
)
def test_limit_of_a_push_is_the_configured_one_or_that_of_float32(
    server: VLLMTwin, tokenizer: Any, weights: Weights, limit: float | None, offset: float, is_verified: bool
) -> None:
    """Float32 allows 1e-4 on average."""
    probe = [place % len(tokenizer) for place in range(11)]
    config = PushConfig(max_difference=limit)
    engine = connect([server.url], config, vocab_size=len(tokenizer), tokenizer=tokenizer, probe=probe)
    with nullcontext() if is_verified else pytest.raises(NoServerError, match="away from the trainer"):
        engine.update_weights(AwayFromServer(weights, [offset] * 10), version=0)


def test_a_group_goes_to_one_server_and_groups_to_the_least_loaded(
    connected: Callable[..., RemoteEngine], twin: MakeTwin
) -> None:
    servers = [twin(), twin()]
    engine = connected(*servers)
    before = [len(server.generated()) for server in servers]
    ask(engine, *(request(seed, rid=str(group), group=group) for group in range(4) for seed in range(3)))
    asked = [server.generated()[n:] for server, n in zip(servers, before, strict=True)]
    groups = [{body["request_id"].split(".")[0] for body in bodies} for bodies in asked]
    assert [len(bodies) for bodies in asked] == [6, 6]
    assert not groups[0] & groups[1]


def test_answers_fit_the_shortest_server(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = twin()
    facts = long._on_server_info

    async def longer(body: Any, query: Any) -> Any:
        found = await facts(body, query)
        found["vllm_config"]["model_config"]["max_model_len"] = 4096
        return found

    monkeypatch.setattr(long, "_on_server_info", longer)
    engine = connected(long, twin())
    assert engine.servers[0].dialect.facts.max_seq_len == 4096 and engine.max_seq_len == 64
    (answer,) = ask(engine, request(max_new_tokens=4000, ignore_eos=True))
    assert len(PROMPT) + len(answer.output_tokens) == 64


def test_the_oldest_groups_are_forgotten_first(
    connected: Callable[..., RemoteEngine], server: VLLMTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "REMEMBERED_GROUPS", 2)
    engine = connected(server)
    for group in ("a", "b", "a", "c"):
        ask(engine, request(group=group))
    assert list(engine._groups) == ["a", "c"]


@pytest.mark.parametrize("tokens", [[14, 3] * 4, [15] * 8, [-1] * 8, [3.0] * 8, [3] * 9])
def test_impossible_tokens_are_refused(
    connected: Callable[..., RemoteEngine],
    twin: MakeTwin,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    tokens: list[Any],
) -> None:
    """The vocabulary has 15 tokens and the request asks for at most 8; the last two servers answer as they should."""
    servers = [twin(), twin()]
    answer = servers[0]._answer

    async def answered(*arguments: Any) -> Any:
        response = await answer(*arguments)
        response.output_tokens, response.output_logprobs = tokens, [-1.0] * len(tokens)
        return response

    monkeypatch.setattr(servers[0], "_answer", answered)
    engine = connected(*servers)
    assert len(tokenizer) == 15
    answers = ask(engine, *(request(seed, group=seed) for seed in range(2)))
    possible = tokens == [14, 3] * 4
    assert (engine.servers[0].failure is None) == possible
    assert (tokens in [found.output_tokens for found in answers]) == possible


def test_a_server_that_fails_is_left_out_and_its_requests_are_asked_elsewhere(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    servers = [twin(), twin()]
    engine = connected(*servers, answer_seconds=1.0)
    expected = ask(engine, *(request(seed) for seed in range(4)))
    for count, fault in enumerate(("down", "garbage", "hang", "restarted", "stopped"), start=1):
        if fault == "stopped":
            servers[0].stop()
        elif fault == "restarted":
            servers[0].weight_version = "default"
        else:
            servers[0].faults.add(fault)
        answers = ask(engine, *(request(seed) for seed in range(4)))
        assert [answer.output_tokens for answer in answers] == [answer.output_tokens for answer in expected], fault
        assert [server.failure is None for server in engine.servers] == [False, True], fault
        assert (engine.stats.lost, engine.stats.retried) == (count, 2 * count), fault
        if fault != "stopped":
            servers[0].faults.clear()
            engine.update_weights(weights)
            assert engine.servers[0].failure is None, "a push that is verified brings it back"
    servers[1].stop()
    (error,) = ask(engine, request())
    assert isinstance(error, NoServerError) and servers[1].url in str(error) and servers[0].url in str(error)


def test_answers_of_weights_older_than_the_last_push_are_refused(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    """Version 0 was verified, but a server that returns to it after version 1 was restarted from an old checkpoint."""
    servers = [twin(), twin()]
    engine = connected(*servers)
    engine.update_weights(weights, version=1)
    servers[0].weight_version = str(engine.servers[0].versions.encode(0))
    answers = ask(engine, *(request(seed, group=seed) for seed in range(4)))
    assert all(set(answer.output_versions) == {1} for answer in answers)
    assert "answered with weights of version 0, but the last push was version 1" in str(engine.servers[0].failure)
    assert engine.servers[1].failure is None and engine.stats.lost == 1


def test_a_server_without_versions_in_its_answers_is_asked_for_the_version_of_its_weights(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    server = twin(scale_out=False)
    first, second = connected(server), connected(server)
    (error,) = ask(first, request())
    assert isinstance(error, NoServerError) and "weights of version 0 of another trainer" in str(error)
    (answer,) = ask(second, request())
    assert set(answer.output_versions) == {0}
    server.weight_version = "default"  # as after a restart
    (error,) = ask(second, request())
    assert isinstance(error, NoServerError) and "weights of version 'default'" in str(error)


def test_a_delta_is_pushed_only_to_servers_at_its_base_version(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    servers = [twin() for _ in range(3)]
    engine = connected(*servers, transport="delta")
    _, older, failed = engine.servers
    older.version = -1  # missed the last push
    failed.failure = "did not answer within 10 s"  # reports version 0, but may hold anything
    engine.update_weights(weights, version=1)
    assert [server.patched for server in servers] == [[False, True], [False, False], [False, False]]
    assert [server.failure for server in engine.servers] == [None, None, None]
    engine.update_weights(weights, version=2)
    assert [server.patched[-1] for server in servers] == [True, True, True]


def test_a_server_that_is_brought_back_gets_whole_weights_and_is_paused_if_they_are_wrong(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    server = twin()
    engine = connected(server, transport="delta")
    engine.update_weights(weights, version=1)
    assert server.patched == [False, True]
    engine.servers[0].failure = "restarted"
    server.faults = {"forgetful"}  # it accepts the push, and keeps its weights
    server.engine.model.norm.weight.data.mul_(2)
    with pytest.raises(RolloutError, match="scores the probe tokens"):
        engine.restore_server(engine.servers[0])
    assert server.is_paused and engine.servers[0].failure is not None
    server.faults.clear()
    assert engine.restore_server(engine.servers[0]) and not server.is_paused
    assert server.patched == [False, True, False, False]


@pytest.mark.parametrize("fault", ["update", "version", "cache_in_use"])
def test_a_server_that_serves_is_paused_by_a_push_that_fails(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights, fault: str
) -> None:
    good, bad = twin(), twin()
    engine = connected(good, bad)
    bad.faults = {fault}
    engine.update_weights(weights, version=1)
    assert engine.servers[1].failure is not None
    assert bad.is_paused and not good.is_paused


def test_an_answer_that_a_push_interrupts_goes_on_with_the_new_weights(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    server = twin()
    engine = connected(server)

    async def run() -> Any:
        answer = asyncio.create_task(engine.agenerate(request(max_new_tokens=50, ignore_eos=True)))
        while not any(len(sequence.output) >= 3 for sequence in server.engine._generator.unfinished):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.update_weights, weights, version=1)
        return await answer

    answer = asyncio.run(run())
    first = answer.output_versions.count(0)
    assert answer.output_versions == [0] * first + [1] * (50 - first) and first >= 3
    assert engine.stats.resumed == 1 and answer.stop_reason == "length"
    scores = engine.prompt_logprobs(PROMPT + answer.output_tokens)[len(PROMPT) - 1 :]
    assert answer.output_logprobs == pytest.approx(scores, abs=FIRST_RATIO_FP32), (
        "the same weights, from an answer's own tokens"
    )


def test_resumed_answer_asks_for_what_is_left_in_a_random_stream_of_its_own(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    server = twin()
    engine = connected(server)

    async def run() -> Any:
        settings = {"max_new_tokens": 50, "min_new_tokens": 30, "ignore_eos": True}
        answer = asyncio.create_task(engine.agenerate(request(seed=5, **settings)))
        while not any(len(sequence.output) >= 3 for sequence in server.engine._generator.unfinished):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.update_weights, weights, version=1)
        return await answer

    answer = asyncio.run(run())
    first, second = [body for body in server.generated() if "seed" in body["sampling_params"]][-2:]
    done = answer.output_versions.count(0)
    assert second["token_ids"] == PROMPT + answer.output_tokens[:done]
    before, after = first["sampling_params"], second["sampling_params"]
    assert (before["max_tokens"], before["min_tokens"]) == (50, 30)
    assert (after["max_tokens"], after["min_tokens"]) == (50 - done, 30 - done)
    assert before["seed"] == 5 != after["seed"]


async def answered_during_a_push(engine: RemoteEngine, weights: Weights) -> Any:
    """The answer to a request that is sent just before version 1 is pushed in a thread."""
    asked = asyncio.create_task(engine.agenerate(request()))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(engine.update_weights, weights, version=1)
    return await asked


async def test_an_answer_of_weights_that_are_being_verified_waits_for_that(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    """It is begun while the server is paused, and complete before the push is."""
    server = twin()
    engine = connected(server)
    server.faults, server.score_seconds = {"until_paused"}, 0.6
    response = await answered_during_a_push(engine, weights)
    assert set(response.output_versions) == {1} and engine.stats.lost == 0
    assert sum("seed" in body["sampling_params"] for body in server.generated()) == 1, "it is not asked again"


async def test_an_answer_without_versions_that_a_push_overtook_is_asked_again(
    connected: Callable[..., RemoteEngine], twin: MakeTwin, weights: Weights
) -> None:
    """Nobody can say of which weights it is."""
    server = twin(scale_out=False)
    engine = connected(server)
    server.line_seconds = 1.0
    response = await answered_during_a_push(engine, weights)
    assert set(response.output_versions) == {1} and engine.stats.resumed == 1
    assert len(response.output_tokens) == len(response.output_versions) <= 8


class Unscored(AwayFromServer):
    """Weights of a trainer that fails when it scores them."""

    def score(self, tokens: list[int]) -> list[float]:
        raise FloatingPointError("not finite")


class Interrupted(AwayFromServer):
    """Weights of a trainer that is interrupted when it has gathered them, and has not said so."""

    def tensors(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().tensors(dtype)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("transport", "source", "error"),
    [
        ("disk", Unscored, FloatingPointError),
        ("gloo", Unscored, FloatingPointError),
        ("gloo", Interrupted, KeyboardInterrupt),
    ],
)
def test_a_trainer_that_fails_in_a_push_ends_it_with_that_and_leaves_the_server_paused(
    connected: Callable[..., RemoteEngine],
    twin: MakeTwin,
    weights: Weights,
    transport: str,
    source: type[AwayFromServer],
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 1)  # what was gathered has been sent
    server = twin()
    engine = connected(server, transport=transport)
    with pytest.raises(error):
        engine.update_weights(source(weights, []), version=1)
    assert server.is_paused and engine.version == 0
    if transport == "disk":
        engine.servers[0].failure = "restarted"
        assert engine.restore_server(engine.servers[0]) and engine.servers[0].version == 0


def test_aborted_answers_end_with_their_tokens(connected: Callable[..., RemoteEngine], twin: MakeTwin) -> None:
    server = twin()
    engine = connected(server)

    async def run() -> tuple[Any, int]:
        answer = asyncio.create_task(engine.agenerate(request(rid="mine", max_new_tokens=50, ignore_eos=True)))
        while not server.engine._generator.unfinished:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert await asyncio.to_thread(engine.abort, "other") == 0
        return await asyncio.to_thread(engine.abort, "mine"), await answer

    aborted, answer = asyncio.run(run())
    assert aborted == 1 and answer.stop_reason == "abort" and len(answer.output_tokens) < 50


def test_a_server_that_a_dead_trainer_left_paused_is_connected(
    connected: Callable[..., RemoteEngine], server: VLLMTwin
) -> None:
    Http(server.url).command("/pause?mode=abort")
    assert ask(connected(server), request())[0].stop_reason in ("length", "stop")


def test_paused_servers_sample_nothing(connected: Callable[..., RemoteEngine], twin: MakeTwin) -> None:
    server = twin()
    engine = connected(server)
    sent = len(server.generated())

    async def run() -> Any:
        engine.pause()
        answer = asyncio.create_task(engine.agenerate(request()))
        done, _ = await asyncio.wait([answer], timeout=0.2)
        assert not done and len(server.generated()) == sent, "new requests wait in this process"
        engine.resume()
        return await answer

    assert asyncio.run(run()).output_tokens


@pytest.mark.parametrize(
    ("settings", "fault", "message"),
    [
        ({"release": "0.99.0"}, None, r"runs vLLM 0.99.0, .* install 0.32.x"),
        ({"backend": None}, None, r"does not accept pushes by disk; start it with --worker-extension-cls"),
        ({"logprobs_mode": "raw_logits"}, None, r"--logprobs-mode is raw_logits; expected raw_logprobs or"),
        ({}, "tokenizer", r"encodes a test text as \[.*; start the server with the actor's checkpoint"),
        ({}, "down", r"rollout.servers: .* answered with status 503"),
    ],
)
def test_servers_that_could_not_be_trained_on_are_refused_at_once(
    twin: MakeTwin, tokenizer: Any, settings: dict[str, Any], fault: str | None, message: str
) -> None:
    server = twin(**settings)
    if fault is not None:
        server.faults.add(fault)
    with pytest.raises(ConfigError, match=message):
        connect([server.url], vocab_size=12, tokenizer=tokenizer)


def test_urls_and_folders_that_cannot_be_used_are_refused(twin: MakeTwin) -> None:
    url = twin().url
    for urls, message in (
        ([], "expected the URL of each server once"),
        ([url, url], "expected the URL of each server once"),
        (["127.0.0.1:8000"], "expected http://HOST:PORT"),
    ):
        with pytest.raises(ConfigError, match=message):
            connect(urls, vocab_size=12)
    with pytest.raises(ConfigError, match="transport is lora, but the actor has no LoRA"):
        connect([url], PushConfig(transport="lora"), vocab_size=12)
    with pytest.raises(ConfigError, match="does not accept pushes by lora; start it with --enable-lora"):
        connect([url], vocab_size=12, has_lora=True)


def test_two_trainers_do_not_share_a_folder_of_pushes(twin: MakeTwin, tmp_path: Path) -> None:
    server, config = twin(), PushConfig(folder=str(tmp_path / "pushes"))
    first = connect([server.url], config, vocab_size=15)
    with pytest.raises(ConfigError, match="which another trainer uses; give each trainer its own folder"):
        connect([server.url], config, vocab_size=15)
    first.close()
    connect([server.url], config, vocab_size=15).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"rollout.push.folder is .*/file/pushes: Not a directory"):
        connect([server.url], PushConfig(folder=str(tmp_path / "file" / "pushes")), vocab_size=15)
