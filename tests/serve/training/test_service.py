"""What a client of the training service meets: the SDK's calls, retries, other clients, restarts and hostile bodies."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.training.conftest import ROOT, Connect, running
from tests.serve.training.data import datum, rows
from tests.serve.training.test_numbers import adam, downloaded, largest_difference, saved_weights

pytestmark = pytest.mark.xdist_group("training_service")
tinker = pytest.importorskip("tinker")
zstandard = pytest.importorskip("zstandard")

from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402


def post(url: str, path: str, body: bytes, key: str = "tml-one", **headers: str) -> tuple[int, Any]:
    """Send a body; return the status and the JSON response."""
    request = urllib.request.Request(f"{url}/api/v1/{path}", body, {"X-API-Key": key, **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def loss_body(model: str, seq: int, data: list[Any], loss: str = "cross_entropy", **config: Any) -> Any:
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config or None),
            model_id=model,
            seq_id=seq,
        )
    )


def outcome(url: str, response: tuple[int, Any], key: str = "tml-one") -> Any:
    """The JSON result of a future."""
    status, future = response
    assert status == 200, future
    return post(url, "retrieve_future", json.dumps({"request_id": future["request_id"]}).encode(), key)[1]


def refused(call: Callable[[], Any]) -> str:
    """The message of a refused call."""
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)) as error:
        call()
    return str(error.value)


def test_the_calls_of_a_session(base: Path, connect: Connect, url: str, tmp_path: Path) -> None:
    service = connect()
    [model] = service.get_server_capabilities().supported_models
    assert (model.model_name, model.trainable, model.sampleable, model.max_context_length) == (
        str(base),
        True,
        True,
        256,
    )
    client = service.create_lora_training_client(
        base_model=str(base), rank=8, train_attn=False, user_metadata={"run": "7"}
    ).result(30)
    info = client.get_info()
    assert (info.lora_rank, info.model_data.arch, info.is_lora) == (8, "qwen3", True)
    assert client.get_tokenizer().decode(rows()[0]) == service.create_sampling_client(base_model=str(base)).result(
        30
    ).get_tokenizer().decode(rows()[0])
    state = client.save_state("first", ttl_seconds=7200, user_metadata={"step": "0"}).result(30)
    assert state.path == f"tinker://{info.model_id}/weights/first"
    assert "exists; choose another name" in refused(lambda: client.save_state("first").result(30))
    client.save_state("first", overwrite=True).result(30)
    sampler_path = client.save_weights_for_sampler("sampler").result(30).path
    external = client.save_weights_external("export").result(30).path
    rest = service.create_rest_client()
    kinds = {c.tinker_path: c.checkpoint_type for c in rest.list_checkpoints(info.model_id).result(30).checkpoints}
    assert kinds == {state.path: "training", sampler_path: "sampler", external: "external"}
    run = rest.get_training_run(info.model_id).result(30)
    assert (run.lora_rank, run.user_metadata, run.last_checkpoint.tinker_path) == (8, {"run": "7"}, state.path)
    assert info.model_id in {run.training_run_id for run in rest.list_training_runs().result(30).training_runs}
    weights = rest.get_weights_info_by_tinker_path(state.path).result(30)
    assert (weights.lora_rank, weights.train_mlp, weights.train_attn, weights.train_unembed) == (8, True, False, False)
    assert {"gate_proj", "up_proj", "down_proj"} == {
        name.split(".")[-3] for name in downloaded(client, external, tmp_path)[0]
    }
    rest.set_checkpoint_ttl_from_tinker_path(sampler_path, 3600).result(30)
    [expiring] = [c for c in rest.list_user_checkpoints().result(30).checkpoints if c.tinker_path == sampler_path]
    assert expiring.expires_at is not None
    sampler = service.create_sampling_client(model_path=sampler_path).result(30)
    prompt, params = types.ModelInput.from_ints(rows()[0]), types.SamplingParams(max_tokens=4)
    assert len(sampler.sample(prompt, 1, params).result(30).sequences[0].tokens) <= 4
    rest.delete_checkpoint_from_tinker_path(sampler_path).result(30)
    assert "has no checkpoint" in refused(lambda: sampler.sample(prompt, 1, params).result(30))
    session = rest.get_session(info.model_id.split(":")[0]).result(30)
    assert session.training_run_ids == [info.model_id] and len(session.sampler_ids) == 2
    assert "is not supported by archon's training service" in refused(
        lambda: rest.publish_checkpoint_from_tinker_path(state.path).result(30)
    )


def test_your_own_tinker_in_ten_lines(base: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "tasks" / "training-service.md"
    found = re.search(r"<!-- test: your-own-tinker -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None
    code = found[1]
    assert len([line for line in code.splitlines() if line]) <= 12
    code = code.replace("http://127.0.0.1:8000", url).replace("path/to/checkpoint", str(base))
    exec(compile(code, str(page), "exec"), {})
    assert capsys.readouterr().out.strip() == "46"


def test_stops_and_samples(base: Path, connect: Connect) -> None:
    sampler = connect().create_sampling_client(base_model=str(base)).result(30)
    prompt = types.ModelInput.from_ints(rows()[0])

    def tokens(**params: Any) -> list[int]:
        params = {"max_tokens": 30, "temperature": 0.0, "stop": []} | params
        return sampler.sample(prompt, 1, types.SamplingParams(**params)).result(30).sequences[0].tokens

    full = tokens()
    assert len(full) == 30
    first = full.index(full[7])
    assert tokens(stop=[full[7]]) == full[: first + 1]
    text = sampler.get_tokenizer().decode(full[7:9])
    assert tokens(stop=text)[-1] == full[8] and len(tokens(stop=text)) <= 9
    assert tokens(stop=[text, "never there"]) == tokens(stop=text)
    assert tokens(temperature=1.0, top_k=1) == full
    assert len(tokens(temperature=1.0, max_tokens=None)) == 256 - len(rows()[0])
    scores = sampler.compute_logprobs(prompt).result(30)
    last = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), True, prompt_logprobs_last_n=2).result(30)
    assert last.prompt_logprobs == [None] * (len(scores) - 2) + scores[-2:]


def test_a_retry_finds_the_first_request(train: Callable[..., Any], url: str) -> None:
    client = train(seed=1)
    client.forward_backward([datum(rows()[0])], "cross_entropy").result(30)
    body = types.OptimStepRequest(optim_params=adam(), model_id=client.model_id, seq_id=2).model_dump_json().encode()
    results = [outcome(url, post(url, "optim_step", body)) for _ in range(3)]
    assert results[0] == results[1] == results[2] and results[0]["metrics"]["grad_norm"] > 0
    client._request_id_counter = client._turn_counter = 2
    # A second step without a new gradient would have failed, and a repeated one would have moved the weights.
    assert "there is no gradient" in refused(lambda: client.optim_step(adam()).result(30))


def test_requests_run_in_the_order_of_their_ids(train: Callable[..., Any], url: str) -> None:
    client, data = train(seed=1), [datum(rows()[0])]
    step = types.OptimStepRequest(optim_params=adam(), model_id=client.model_id, seq_id=2).model_dump_json().encode()
    future = post(url, "optim_step", step)[1]["request_id"]  # arrives first
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(outcome(url, (200, {"request_id": future}))))
    waiting.start()
    body = loss_body(client.model_id, 1, data).SerializeToString()
    assert post(url, "forward_backward", body)[0] == 200
    waiting.join(30)
    assert answers[0]["metrics"]["grad_norm"] > 0


def test_a_failed_request_changes_nothing_and_the_next_ones_run(train: Callable[..., Any]) -> None:
    client, alone = train(seed=1), train(seed=1)
    good = [datum(ids) for ids in rows()]
    for one in (client, alone):
        one.forward_backward(good, "cross_entropy")
    bad = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [1, 999]})
    assert "target_tokens has token id 999; expected 0 to" in refused(
        lambda: client.forward_backward([good[0], bad], "cross_entropy").result(30)
    )
    for one in (client, alone):
        one.optim_step(adam()).result(30)
    assert largest_difference(saved_weights(client), saved_weights(alone)) == 0


BAD_DATA: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nan": (lambda m: _set(m, "weights", torch.tensor([float("nan")] * 7)), "weights has values that are not finite"),
    "infinite": (lambda m: _set(m, "weights", torch.tensor([float("inf")] * 7)), "not finite"),
    "wrong token": (lambda m: _tokens(m, [1, 2, 3, 4, 5, 6, 10**6]), "model_input has token id 1000000"),
    "negative token": (lambda m: _tokens(m, [1, 2, 3, 4, 5, 6, -1]), "model_input has token id -1"),
    "too long": (lambda m: _tokens(m, [1] * 300), "model_input has 300 tokens; expected 1 to 256"),
    "empty": (lambda m: m.data[0].ClearField("model_input"), "model_input has 0 tokens"),
    "no data": (lambda m: m.ClearField("data"), "has no data"),
    "length": (lambda m: _set(m, "weights", torch.ones(3)), "weights is (3,); expected (7,)"),
    "oversize": (lambda m: m.data[0].loss_fn_inputs["weights"].shape.append(2**40), "weights is (7, 1099511627776)"),
    "bytes": (lambda m: setattr(m.data[0].loss_fn_inputs["weights"], "dense", b"1234"), "weights has 4 bytes"),
    "dtype": (lambda m: setattr(m.data[0].loss_fn_inputs["weights"], "dtype", 2), "expected float32"),
    "half a token": (lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"123"), "multiple of 4"),
    "image": (lambda m: m.data[0].model_input.add().image.SetInParent(), "takes text only"),
    "unknown input": (lambda m: _set(m, "mask", torch.ones(7)), "'mask', which cross_entropy does not use"),
    "missing input": (lambda m: setattr(m, "loss_fn", "ppo"), "'weights', which ppo does not use"),
    "unknown loss": (
        lambda m: setattr(m, "loss_fn", "stable_reinforce"),
        "loss_fn 'stable_reinforce' is not supported",
    ),
    "unknown setting": (lambda m: m.loss_fn_config.update(beta=1.0), "'beta' = 1.0"),
    "sparse": (lambda m: _sparse(m, columns=[0, 9]), "sparse columns or values"),
    "sparse rows": (lambda m: _sparse(m, rows=[0, 5]), "sparse row pointers"),
}


def _set(message: Any, name: str, values: torch.Tensor) -> None:
    message.data[0].loss_fn_inputs[name].CopyFrom(
        pb.Tensor(dense=values.numpy().tobytes(), dtype=pb.DTYPE_FLOAT32, shape=values.shape)
    )


def _tokens(message: Any, ids: list[int]) -> None:
    message.data[0].model_input[0].encoded_text.tokens = torch.tensor(ids, dtype=torch.int32).numpy().tobytes()


def _sparse(message: Any, rows: list[int] | None = None, columns: list[int] | None = None) -> None:
    parts = [rows or [0, 2, 2, 2, 2, 2, 2, 2], columns or [0, 1]]
    crow, col = (torch.tensor(part).numpy().tobytes() for part in parts)
    csr = pb.SparseCsr(values=bytes(8), crow_indices=crow, col_indices=col)
    message.data[0].loss_fn_inputs["weights"].CopyFrom(pb.Tensor(sparse_csr=csr, dtype=1, shape=[7, 2]))


@pytest.fixture(scope="module")
def shared_model(base: Path, url: str) -> Any:
    """A training client for refused bodies."""
    return (
        tinker.ServiceClient(base_url=url, api_key="tml-one").create_lora_training_client(str(base), rank=2).result(30)
    )


@pytest.mark.unsampled
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_fails_its_future_with_one_clear_error(case: str, shared_model: Any, url: str) -> None:
    damage, expected = BAD_DATA[case]
    seq = shared_model._get_request_id() + 1
    shared_model._turn_counter += 1
    message = loss_body(shared_model.model_id, seq, [datum(rows()[0], weights=[1.0] * 7)])
    damage(message)
    failed = outcome(url, post(url, "forward_backward", message.SerializeToString()))
    assert expected in failed["error"] and failed["category"] == "user" and "\n" not in failed["error"]
    good = shared_model.forward([datum(rows()[0])], "cross_entropy").result(30)
    assert good.metrics["loss:sum"] > 0


def test_hostile_bodies_and_other_keys(train: Callable[..., Any], url: str, connect: Connect) -> None:
    client = train(seed=1)
    model = client.model_id
    body = loss_body(model, 1, [datum(rows()[0])]).SerializeToString()
    bomb = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    cases = {
        "no protobuf": (post(url, "forward_backward", b"\xff" * 50), 400, "no ForwardBackwardRequest"),
        "damaged zstd": (post(url, "forward_backward", b"12345", **{"Content-Encoding": "zstd"}), 400, "is not zstd"),
        "zstd bomb": (post(url, "forward_backward", bomb, **{"Content-Encoding": "zstd"}), 413, "decompresses to more"),
        "gzip": (post(url, "forward_backward", body, **{"Content-Encoding": "gzip"}), 400, "send zstd or none"),
        "too large": (post(url, "optim_step", b" " * (9 << 20)), 413, "is longer than"),
        "no JSON": (post(url, "optim_step", b"{"), 400, "invalid JSON"),
        "extra field": (post(url, "get_info", json.dumps({"model_id": model, "x": 1}).encode()), 400, "x: "),
        "another key": (post(url, "forward_backward", body, "tml-two"), 404, "has no model"),
        "unknown model": (post(url, "get_info", b'{"model_id": "../../etc"}'), 404, "has no model"),
        "unknown future": (post(url, "retrieve_future", b'{"request_id": "x"}'), 404, "has no future"),
        "another host": (post(url, "telemetry", b"{}", Host="example.com"), 403, "without a token only"),
        "another origin": (post(url, "telemetry", b"{}", Origin="http://example.com"), 403, "no page of another host"),
        "another version": (post(url, "client/config", b'{"sdk_version": "0.24.0"}'), 400, "pip install tinker=="),
    }  # fmt: skip
    for name, ((status, answer), expected, message) in cases.items():
        assert (status, message in answer["detail"]) == (expected, True), (name, status, answer)
    own = client.forward_backward([datum(rows()[0])], "cross_entropy")
    own.result(30)
    future = json.dumps({"request_id": f"{model}:1"}).encode()
    assert post(url, "retrieve_future", future, "tml-two")[0] == 404


def test_another_clients_checkpoints_are_not_there(train: Callable[..., Any], connect: Connect, url: str) -> None:
    client = train(seed=1)
    path = client.save_state("secret").result(30).path
    client.save_weights_for_sampler("sampler").result(30)
    other = connect("tml-two")
    assert "has no checkpoint" in refused(lambda: other.create_training_client_from_state(path).result(30))
    sampler_path = path.replace("/weights/secret", "/sampler_weights/sampler")
    assert "has no checkpoint" in refused(lambda: other.create_sampling_client(model_path=sampler_path).result(30))
    rest = other.create_rest_client()
    assert rest.list_user_checkpoints().result(30).checkpoints == []
    assert "has no checkpoint" in refused(lambda: rest.delete_checkpoint_from_tinker_path(path).result(30))
    assert "has no model" in refused(lambda: rest.get_training_run(client.model_id).result(30))


@pytest.mark.unsampled
@pytest.mark.parametrize("name", ["../escape", "a/b", "..", ".hidden", "", "x" * 200, "a\0b", "_step-1", "ä"])
def test_checkpoint_names_are_file_names(name: str, shared_model: Any) -> None:
    if not name:
        assert shared_model.save_state(name).result(30).path.endswith(f"/step-{shared_model._request_id_counter}")
        return
    assert "checkpoint name" in refused(lambda: shared_model.save_state(name).result(30))


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "rank": ({"rank": 0}, "LoRA rank 0; expected 1 to"),
        "large": ({"rank": 100_000}, "LoRA rank 100000; expected 1 to"),
        "matrix": ({"rank": 100}, "exceeds a matrix of this model"),
        "nothing": ({"train_attn": False, "train_mlp": False}, "has no matrix"),
        "base": ({"base_model": "Qwen/Qwen3-8B"}, "is not here; this server has"),
    }.values(),
)
def test_models_that_cannot_be(
    options: dict[str, Any], message: str, train: Callable[..., Any], connect: Connect
) -> None:
    if "base_model" in options:
        assert message in refused(lambda: connect().create_lora_training_client(**options).result(30))
    else:
        assert message in refused(lambda: train(**options))


@pytest.mark.parametrize("field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay"])
def test_optimizer_settings_are_checked(field: str, shared_model: Any) -> None:
    shared_model.forward_backward([datum(rows()[0])], "cross_entropy")
    assert f"{field} is -1.0" in refused(lambda: shared_model.optim_step(adam(**{field: -1.0})).result(30))
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        shared_model.optim_step(types.DimuonParams(learning_rate=1e-3)).result(30)


def test_a_full_queue_asks_the_client_to_come_back(train: Callable[..., Any], url: str) -> None:
    from archon.serve.training.queues import MAX_WAITING

    client = train(seed=1)

    def step(sequence_id: int) -> tuple[int, Any]:
        request = types.OptimStepRequest(optim_params=adam(), model_id=client.model_id, seq_id=sequence_id)
        return post(url, "optim_step", request.model_dump_json().encode())

    assert {step(sequence_id)[0] for sequence_id in range(2, MAX_WAITING + 2)} == {200}
    status, answer = step(MAX_WAITING + 2)
    assert (status, "try again" in answer["detail"]) == (429, True)
    body = loss_body(client.model_id, 1, [datum(rows()[0])]).SerializeToString()  # the others wait for it
    assert post(url, "forward_backward", body)[0] == 200
    deadline = time.monotonic() + 30
    while step(MAX_WAITING + 2)[0] == 429:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_closed_session_ends_its_models(train: Callable[..., Any], connect: Connect, base: Path, url: str) -> None:
    service = connect()
    client = service.create_lora_training_client(base_model=str(base), rank=2).result(30)
    sampler_session = client.save_weights_and_get_sampling_client().result(30)
    path = client.save_state("kept").result(30).path
    service.close("success").result(30)
    body = loss_body(client.model_id, 9, [datum(rows()[0])]).SerializeToString()
    status, answer = post(url, "forward_backward", body)
    assert status == 404 and f"create a training client from its last state, {path}" in answer["detail"]
    session = json.dumps({"session_id": client.model_id.split(":")[0]}).encode()
    assert post(url, "session_heartbeat", session)[0] == 410
    paths = [c.tinker_path for c in connect().create_rest_client().list_user_checkpoints().result(30).checkpoints]
    assert path in paths and not any(f"{client.model_id}/sampler_weights/_step" in path for path in paths)
    assert sampler_session is not None


@pytest.mark.slow
def test_a_killed_server_knows_checkpoints_and_results_and_fails_the_rest(base: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running(base, state, "--token", "tml-one", "--token", "tml-two") as (url, process):
        assert post(url, "telemetry", b"{}", "tml-three")[0] == 401
        client = tinker.ServiceClient(base_url=url, api_key="tml-one").create_lora_training_client(str(base), rank=2)
        client = client.result(30)
        for ids in rows():
            client.forward_backward([datum(ids)], "cross_entropy")
            client.optim_step(adam()).result(30)
        path = client.save_state("saved").result(30).path
        expected = saved_weights(client, "before")
        known = json.dumps({"request_id": f"{client.model_id}:8"}).encode()
        result = post(url, "retrieve_future", known)[1]
        gap = types.OptimStepRequest(optim_params=adam(), model_id=client.model_id, seq_id=99).model_dump_json()
        pending = post(url, "optim_step", gap.encode())[1]["request_id"]
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    with running(base, state, "--token", "tml-one") as (url, _):
        assert post(url, "retrieve_future", known)[1] == result and "grad_norm" in str(result)
        failed = post(url, "retrieve_future", json.dumps({"request_id": pending}).encode())[1]
        assert "the server restarted" in failed["error"] and failed["category"] == "server"
        retried = post(url, "optim_step", gap.encode())
        assert retried[1]["request_id"] == pending  # not run again
        status, answer = post(
            url, "forward_backward", loss_body(client.model_id, 100, [datum(rows()[0])]).SerializeToString()
        )
        assert status == 404 and f"create a training client from its last state, {path}" in answer["detail"]
        service = tinker.ServiceClient(base_url=url, api_key="tml-one")
        resumed = service.create_training_client_from_state_with_optimizer(path).result(30)
        assert largest_difference(saved_weights(resumed, "after"), expected) == 0
        resumed.forward_backward([datum(rows()[0])], "cross_entropy")
        assert resumed.optim_step(adam()).result(30).metrics["grad_norm"] > 0
