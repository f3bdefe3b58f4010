"""`archon serve` as a rollout server: its answers are the generator's, its pushes verified, its routes closed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from archon.checkpoint.hf_io import load_model
from archon.data.encoding import encode_prompt
from archon.generation.inprocess import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.remote.config import PushConfig
from archon.remote.connect import SHARED_MEMORY, connect
from archon.remote.engine import NoServerError, RemoteEngine
from archon.remote.http import KEY
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError
from tests.remote.served import TOKEN, ServeProcess, serving
from tests.remote.test_engine import PROMPT, Weights, ask, request
from tests.tolerances import FIRST_RATIO_FP32

MakeConfig = Callable[..., RLConfig]
OWN = {"Authorization": f"Bearer {TOKEN}"}
FOREIGN = "answered with weights of version 0 of another trainer"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, TOKEN)


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[tuple[Any, str]]:
    with serving(checkpoint, SHARED_MEMORY) as found:
        yield found


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> Weights:
    return Weights(checkpoint)


def connected(url: str, tokenizer: Any, **settings: Any) -> RemoteEngine:
    return connect([url], PushConfig(**settings), vocab_size=len(tokenizer), tokenizer=tokenizer, log=print)


def test_answers_are_those_of_the_generator_in_process(
    served: tuple[Any, str], checkpoint: Path, tokenizer: Any
) -> None:
    own = InProcessEngine.from_model(load_model(checkpoint), tokenizer)
    engine = connected(served[1], tokenizer)
    engine.update_weights(CopiedWeights(checkpoint), version=3)
    wanted = [
        request(1),
        request(2, greedy=True),
        request(3, temperature=0.7, top_p=0.5, top_k=3),
        request(4, stop=["3"], max_new_tokens=30),
        request(5, min_new_tokens=5, stop_token_ids=[1, 2, 3]),
        request(6, max_tokens=8),
        request(7, ignore_eos=True, max_new_tokens=40),
    ]
    for answer, expected in zip(ask(engine, *wanted), own.generate(wanted), strict=True):
        assert answer.output_tokens == expected.output_tokens and answer.stop_reason == expected.stop_reason
        assert answer.output_logprobs == pytest.approx(expected.output_logprobs, abs=FIRST_RATIO_FP32)
        assert answer.output_versions == [3] * len(expected.output_tokens)
    assert engine.prompt_logprobs(PROMPT) == pytest.approx(own.prompt_logprobs(PROMPT), abs=FIRST_RATIO_FP32)
    engine.close()


class CopiedWeights(Weights):
    """The same in a folder of its own: a server follows no link out of its root."""

    def write(self, transport: str, folder: Path, dtype: str | None) -> None:
        folder.mkdir(parents=True)
        for path in self._checkpoint.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())


# The adapters first: they are of the base that the server begins with, which pushed weights replace.
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "disk"])
def test_a_run_on_a_server_is_the_run_in_process(
    rl_config: MakeConfig, served: tuple[Any, str], checkpoint: Path, lora: bool
) -> None:
    runs = []
    for servers in (None, [served[1]]):
        actor = {"path": str(checkpoint), "optimizer": {"lr": 1e-3}} | ({"lora": {"rank": 2}} if lora else {})
        config = rl_config(servers, actor=actor)
        trainer = RLTrainer(config)
        with trainer.opened():
            batch = trainer.rollout_batch().trajectories
            steps = [trainer.train_step() for _ in range(2)]
            prompt = encode_prompt(trainer.tokenizer, trainer.prompts.rows[0])
            settings = GenerationHyperparameters(max_new_tokens=8, greedy=True, ignore_eos=True)
            greedy = asyncio.run(trainer.generator.agenerate(ModelRequest(prompt, settings)))
        runs.append((batch["input_ids"].tolist(), [step["reward"] for step in steps], greedy.output_tokens))
        assert all(step["first_logprob_diff"] < FIRST_RATIO_FP32 for step in steps)
        assert greedy.output_versions == [2] * 8
    assert runs[0] == runs[1]
    assert steps[-1]["push/difference"] < FIRST_RATIO_FP32 and steps[-1]["push/servers"] == 1


def test_weights_that_a_server_was_not_given_leave_it_out(
    served: tuple[Any, str], checkpoint: Path, tokenizer: Any
) -> None:
    server, url = served
    engine = connected(url, tokenizer)
    engine.update_weights(CopiedWeights(checkpoint), version=0)
    server._engine._generator.version = -1  # as after a restart
    (error,) = ask(engine, request())
    assert isinstance(error, NoServerError) and "weights of version '-1', but the last push was version 0" in str(error)
    engine.update_weights(CopiedWeights(checkpoint))
    (answer,) = ask(engine, request())
    assert answer.output_versions == [1] * len(answer.output_tokens), "a push that is verified brings it back"
    head = server._engine.model.tok_embeddings.weight.data
    head.add_(0.1)
    wrong = CopiedWeights(checkpoint)
    wrong.score = lambda tokens: [score + 0.01 for score in engine.prompt_logprobs(tokens)]  # type: ignore[method-assign]
    with pytest.raises(NoServerError, match="scores the probe tokens"):
        engine.update_weights(wrong)
    engine.close()


def test_a_trainer_notices_the_push_of_another_with_the_same_version(
    served: tuple[Any, str], checkpoint: Path, tokenizer: Any
) -> None:
    first, second = (connected(served[1], tokenizer) for _ in range(2))
    first.update_weights(CopiedWeights(checkpoint), version=0)
    second.update_weights(CopiedWeights(checkpoint), version=0)
    (error,) = ask(first, request())
    assert isinstance(error, NoServerError) and FOREIGN in str(error)
    with pytest.raises(NoServerError, match=FOREIGN):
        first.prompt_logprobs(PROMPT)
    (answer,) = ask(second, request())
    assert answer.output_versions == [0] * len(answer.output_tokens)
    first.update_weights(CopiedWeights(checkpoint))  # it pushes again, and this time before the other looks
    with pytest.raises(NoServerError, match="weights of version 1 of another trainer since the last push, version 0"):
        second.update_weights(CopiedWeights(checkpoint))
    (answer,) = ask(first, request())
    assert answer.output_versions == [1] * len(answer.output_tokens)
    first.close()
    second.close()


@pytest.mark.slow
def test_two_runs_on_one_server_process_never_train_tokens_of_each_other(
    rl_config: MakeConfig, checkpoint: Path, tmp_path: Path
) -> None:
    """The LoRA of the first run belongs to weights that the second run replaces."""

    def trainer(name: str, **actor: Any) -> RLTrainer:
        actor = {"path": str(checkpoint), "optimizer": {"lr": 1e-3}} | actor
        return RLTrainer(rl_config([url], actor=actor, run_dir=str(tmp_path / name)))

    server = ServeProcess(checkpoint, SHARED_MEMORY, tmp_path / "log")
    try:
        url = server.wait()
        lora, first, second = trainer("lora", lora={"rank": 2}), trainer("first"), trainer("second")
        with lora.opened():
            lora.train_step()
            with first.opened():
                with pytest.raises(NoServerError, match=r"no LoRA was pushed|of another trainer"):
                    lora.train_step()
                first.train_step()
                with second.opened():
                    second.train_step()
                    assert first.engine.version == second.engine.version == 1
                    with pytest.raises(NoServerError, match=FOREIGN.replace("0", "1")):
                        first.train_step()
                    assert second.train_step()["push/servers"] == 1
    finally:
        server.stop()


def test_what_a_push_may_not_do_is_refused_and_changes_nothing(
    served: tuple[Any, str], checkpoint: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = served
    version = server.pushed.version
    link = SHARED_MEMORY / f"archon-link-{tmp_path.name}"
    link.symlink_to(checkpoint)
    try:
        for folder in (str(checkpoint), "..", str(link), "nowhere", "a\0b"):
            body = {"transport": "disk", "folder": folder, "version": 9}
            answer = httpx.post(f"{url}/v1/rollout/weights", json=body, headers=OWN)
            assert answer.status_code == 400 and "the only place to load weights from" in answer.text, folder
    finally:
        link.unlink()
    assert server.pushed.version == version
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as diverged:
        shutil.copytree(checkpoint, diverged, dirs_exist_ok=True)
        tensors = load_file(checkpoint / "model.safetensors")
        tensors["model.norm.weight"][3] = float("nan")
        save_file(tensors, Path(diverged, "model.safetensors"))
        before = {name: tensor.clone() for name, tensor in server._engine.model.state_dict().items()}
        body = {"transport": "disk", "folder": diverged, "version": 9}
        answer = httpx.post(f"{url}/v1/rollout/weights", json=body, headers=OWN)
        assert answer.status_code == 400 and "norm.weight holds numbers that are not finite" in answer.text
        Path(diverged, "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:-100])
        answer = httpx.post(f"{url}/v1/rollout/weights", json=body, headers=OWN)
        assert answer.status_code == 400 and "model.safetensors" in answer.text
        body = {"transport": "disk", "folder": str(diverged), "version": 10**30}
        assert httpx.post(f"{url}/v1/rollout/weights", json=body, headers=OWN).status_code == 400
    assert all(tensor.equal(before[name]) for name, tensor in server._engine.model.state_dict().items())
    assert server.pushed.version == version
    for path, body in (("weights", {}), ("generate", {}), ("pause", {"mode": "now"}), ("score", {"input_ids": [1]})):
        assert httpx.post(f"{url}/v1/rollout/{path}", json=body, headers=OWN).status_code == 400
    opened = httpx.post(f"{url}/v1/sessions", headers=OWN).json()
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {opened['api_key']}"}, 403)):
        assert httpx.get(f"{url}/v1/rollout", headers=headers).status_code == status
        assert httpx.post(f"{url}/v1/rollout/resume", headers=headers).status_code in (401, 403)
        assert httpx.get(f"{url}/metrics", headers=headers).status_code == status
    monkeypatch.delenv(KEY)
    with pytest.raises(ConfigError, match=f"set {KEY} to the server's token"):
        connected(url, tokenizer)


def test_metrics_are_prometheus_text(served: tuple[Any, str], checkpoint: Path, tokenizer: Any) -> None:
    engine = connected(served[1], tokenizer)
    engine.update_weights(CopiedWeights(checkpoint), version=3)
    ask(engine, request(1))
    engine.close()
    answer = httpx.get(f"{served[1]}/metrics", headers=OWN)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    values = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
    assert {"archon_requests_active", "archon_answer_tokens_total", "archon_weights_version"} <= names
    assert values["archon_answer_tokens_total"] > 0 and values["archon_answers_unfinished"] == 0


@pytest.mark.slow
def test_a_run_on_two_processes(rl_config: MakeConfig, checkpoint: Path, tokenizer: Any, tmp_path: Path) -> None:
    servers = [ServeProcess(checkpoint, SHARED_MEMORY, tmp_path / f"{i}.log") for i in range(2)]
    try:
        urls = [server.wait() for server in servers]
        trainer = RLTrainer(rl_config(urls))
        with trainer.opened():
            steps = [trainer.train_step() for _ in range(4)]
            own = InProcessEngine.from_model(trainer.engine.full_model, tokenizer)
            wanted = [request(i, group=i, greedy=True, ignore_eos=True, max_new_tokens=24) for i in range(4)]
            for answer, expected in zip(ask(trainer.generator, *wanted), own.generate(wanted), strict=True):
                assert answer.output_tokens == expected.output_tokens
                assert answer.output_logprobs == pytest.approx(expected.output_logprobs, abs=FIRST_RATIO_FP32)
        assert [step["push/servers"] for step in steps] == [2] * 4
        assert all(step["first_logprob_diff"] < FIRST_RATIO_FP32 for step in steps)
        assert all(step["push/difference"] < FIRST_RATIO_FP32 for step in steps)
    finally:
        for server in servers:
            server.stop()
