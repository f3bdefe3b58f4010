"""The dialect of SGLang against a twin of its documented routes; SGLang itself needs CUDA and was never asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.hf_io import load_model
from archon.generation.inprocess import InProcessEngine
from archon.remote.config import PushConfig
from archon.remote.connect import connect
from archon.remote.engine import NoServerError
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError
from tests.remote.sglang_twin import SGLangTwin
from tests.remote.test_engine import Weights, ask, request
from tests.tolerances import FIRST_RATIO_FP32


@pytest.fixture
def sglang(checkpoint: Path) -> Iterator[Callable[..., SGLangTwin]]:
    """Start twins, which end with the test."""
    started: list[SGLangTwin] = []

    def start(**settings: Any) -> SGLangTwin:
        started.append(SGLangTwin(checkpoint, **settings))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def test_answers_are_those_of_the_generator_and_pushes_are_verified(
    sglang: Callable[..., SGLangTwin], checkpoint: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    own, twin, weights = InProcessEngine.from_model(load_model(checkpoint), tokenizer), sglang(), Weights(checkpoint)
    engine = connect([twin.url], PushConfig(), vocab_size=len(tokenizer), tokenizer=tokenizer)
    assert "was never run against a real server" in capsys.readouterr().out
    engine.update_weights(weights, version=0)
    wanted = [
        request(1),
        request(2, greedy=True),
        request(3, temperature=0.7, top_p=0.5, top_k=3),
        request(4, stop=["3"], max_new_tokens=30),
        request(5, min_new_tokens=5, stop_token_ids=[1, 2, 3]),
        request(7, ignore_eos=True, max_new_tokens=40),
    ]
    for answer, expected in zip(ask(engine, *wanted), own.generate(wanted), strict=True):
        assert answer.output_tokens == expected.output_tokens and answer.stop_reason == expected.stop_reason
        assert answer.output_logprobs == pytest.approx(expected.output_logprobs, abs=FIRST_RATIO_FP32)
        assert answer.output_versions == [0] * len(expected.output_tokens)
    (error,) = ask(engine, request(greedy=True, temperature=0.7))
    assert isinstance(error, ConfigError) and "set temperature to 1" in str(error)
    for fault, message in (
        ("update", "/update_weights_from_disk answered with status 400"),
        ("half", "did not load the pushed weights: half of it"),
        ("version", "has weights of version '7' after a push of version 3"),
        ("cache_in_use", "/flush_cache answered with status 400"),
    ):
        twin.faults = {fault}
        with pytest.raises(NoServerError, match=re.escape(message)):
            engine.update_weights(weights)
    twin.faults.clear()
    engine.update_weights(weights)
    (answer,) = ask(engine, request())
    assert answer.output_versions == [5] * len(answer.output_tokens)
    twin.faults = {"garbage"}
    (error,) = ask(engine, request())
    assert isinstance(error, NoServerError) and "logprobs, got" in str(error)


def test_a_run_on_a_server_of_its_routes(rl_config: Callable[..., RLConfig], sglang: Any) -> None:
    trainer = RLTrainer(rl_config([sglang().url]))
    with trainer.opened():
        steps = [trainer.train_step() for _ in range(2)]
    assert all(step["first_logprob_diff"] < FIRST_RATIO_FP32 and step["push/servers"] == 1 for step in steps)
    assert all(step["push/difference"] < FIRST_RATIO_FP32 for step in steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"release": "0.4.9"}, r"runs SGLang 0.4.9, .* install 0.5.x"),
        ({"info": {"dtype": "auto"}}, "reports dtype auto; start SGLang with --dtype"),
        ({"info": {"dp_size": 2}}, "runs with --dp-size 2"),
        ({"info": {"context_length": None}}, "reports no context length"),
    ],
)
def test_servers_that_could_not_be_trained_on_are_refused(sglang: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connect([sglang(**settings).url], vocab_size=12)
