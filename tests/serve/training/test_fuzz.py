"""Hostile requests to the training service: each gets one clear error, and no other client notices."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.training.conftest import running
from tests.serve.training.data import datum, rows

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("training_service")]
tinker = pytest.importorskip("tinker")
zstandard = pytest.importorskip("zstandard")

from tinker.proto import tinker_public_pb2 as pb  # noqa: E402

from tests.serve.training.test_numbers import adam, largest_difference, saved_weights  # noqa: E402
from tests.serve.training.test_service import loss_body  # noqa: E402

ZSTD = {"Content-Encoding": "zstd"}
MEMORY_MIB = 900
"""Allowed growth of the server's peak: two bodies at once are decompressed to at most 256 MiB each, and copied."""
HUGE = (10**9, 2**31, 2**53 + 1, 2**63, 10**30)

Case = tuple[str, str, str, bytes, dict[str, str]]
"""Name, method, path, body and headers."""


class Sender:
    """Sends requests over one connection."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)

    def __call__(self, method: str, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server answers before a long body ends
            self.connection.request(method, path, body, {"X-API-Key": "tml-two", **headers})
        response = self.connection.getresponse()
        try:
            return response.status, response.read()
        finally:
            if len(body) > 1 << 20:
                self.connection.close()


def post(name: str, path: str, body: bytes | dict[str, Any], **headers: str) -> Case:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return name, "POST", f"/api/v1/{path}", data, headers


def json_bodies(model: str, session: str) -> dict[str, dict[str, Any]]:
    """A valid body of each JSON path; the model, session and checkpoint are those of another client."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    path = f"tinker://{model}/weights/secret"
    return {
        "create_session": {"tags": [], "sdk_version": "0.38.0"},
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 0, "base_model": "x", "lora_config": {"rank": 2}},
        "get_info": {"model_id": model},
        "optim_step": {"model_id": model, "seq_id": 5, "optim_params": {"learning_rate": 0.1}},
        "load_weights": {"model_id": model, "seq_id": 5, "path": path, "optimizer": False},
        "save_weights": {"model_id": model, "seq_id": 5, "path": "x"},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 5, "path": "x"},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
        "asample": {"prompt": prompt, "sampling_params": {"max_tokens": 1}, "model_path": path},
        "retrieve_future": {"request_id": f"{model}:1"},
        "weights_info": {"tinker_path": path},
    }


def broken_json(valid: dict[str, Any]) -> dict[str, bytes]:
    """Bodies that are not the message."""
    text = json.dumps(valid).encode()
    key = next(iter(valid))
    return {
        "empty": b"",
        "null": b"null",
        "array": b"[]",
        "number": b"1e999",
        "text": b'"x"',
        "truncated": text[:-1],
        "not utf-8": b"\xff\xfe" + text,
        "trailing": text + b"{}",
        "nested": b"[" * 100_000,
        "nested in a field": json.dumps({key: 0}).encode()[:-2] + b"[" * 100_000,
        "extra field": json.dumps(valid | {"__class__": "x"}).encode(),
        "missing field": json.dumps({name: x for name, x in valid.items() if name != key}).encode()
        if key != "tags"
        else b"{}",
        "object as text": json.dumps(valid | {key: {"a": 1}}).encode(),
        "not a number": json.dumps(valid | {key: float("nan")}).encode(),
        "huge number": json.dumps(valid | {key: 10**300}).encode(),
        "zstd of nothing": b"",
    }


def loss_cases(model: str) -> Iterator[Case]:
    """Bodies of forward_backward that are refused at once."""
    valid = loss_body(model, 1, [datum(rows()[0], weights=[1.0] * 7)])
    body = valid.SerializeToString()
    chance = random.Random(0)
    for length in (1, 2, 5, len(body) // 2, len(body) - 1):
        yield post(f"truncated to {length}", "forward_backward", body[:length])
    for number in range(20):
        yield post(f"noise {number}", "forward_backward", chance.randbytes(1 + 7 * number))
    for number in (0x0A, 0x12, 0x1A, 0x22):  # a field whose length is larger than the body
        yield post(f"length of 10^9 in field {number}", "forward_backward", bytes([number]) + b"\x80\x94\xeb\xdc\x03")
    for seq in (-1, -(2**31), 2**31 - 1, 10**9):
        message = loss_body(model, 1, [datum(rows()[0])])
        message.seq_id = seq
        yield post(f"seq_id {seq}", "forward_backward", message.SerializeToString())
    for name in ("", "x", "../../etc/passwd", "a" * 10_000, model + "\0", f"{model}'; DROP TABLE models; --"):
        message = loss_body(name, 1, [datum(rows()[0])])
        yield post(f"model {name[:20]!r}", "forward_backward", message.SerializeToString())
    for encoding in ("gzip", "br", "zstd, zstd", "x" * 1000):
        yield post(f"encoding {encoding[:9]}", "forward_backward", body, **{"Content-Encoding": encoding})
    compress = zstandard.ZstdCompressor().compress
    packed = compress(body)
    bomb = zstd_bomb(4 << 30)
    for path in ("forward_backward", "optim_step", "telemetry"):
        yield post("bomb", path, bomb, **ZSTD)
        if path != "telemetry":  # which is not read
            yield post("bomb in a bomb", path, compress(bomb), **ZSTD)
            yield post("truncated zstd", path, packed[: len(packed) // 2], **ZSTD)
            yield post("zstd and noise", path, packed[:12] + chance.randbytes(50), **ZSTD)
        yield post("a window of 2 GiB", path, b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00", **ZSTD)
    yield post("65 MiB", "forward_backward", bytes(65 << 20))
    yield post("9 MiB", "optim_step", bytes(9 << 20))


def own_cases(model: str, session: str, base: str) -> Iterator[Case]:
    """Bodies with the sender's own ids and values that are refused at once."""
    for seq in (-1, 10**9, *HUGE[1:]):
        yield post(
            f"own seq_id {seq}", "optim_step", {"model_id": model, "seq_id": seq, "optim_params": {"learning_rate": 1}}
        )
    lora = {"session_id": session, "model_seq_id": 7, "base_model": base}
    for rank in (-1, 0, 257, *HUGE):
        yield post(f"rank {rank}", "create_model", {**lora, "lora_config": {"rank": rank}})
    yield post(
        "no matrix", "create_model", {**lora, "lora_config": {"rank": 2, "train_attn": False, "train_mlp": False}}
    )
    yield post("metadata", "create_model", {**lora, "lora_config": {"rank": 2}, "user_metadata": {"a": "x" * 70_000}})
    yield post("another base", "create_model", {**lora, "base_model": "../x", "lora_config": {"rank": 2}})
    sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "base_model": base}
    params = {"sampling_params": {"max_tokens": 1}}
    for tokens in ([], [-1], [10**6], [2**31], [2**63], [1] * 300, [1.5], ["a"], [None]):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        yield post(f"prompt {tokens!s:.30}", "asample", {**sample, **params, "prompt": prompt})
    for count in (-1, 0, 1025, *HUGE):
        yield post(f"num_samples {count}", "asample", {**sample, **params, "num_samples": count})
    for name, values in {
        "max_tokens": (-1, 0, *HUGE[3:]),  # others end at the limit of the model
        "temperature": (-1.0, "x", 1e400),
        "top_p": (-1.0, 2.0, 0.0),
        "top_k": (-5, 0, *HUGE[3:]),
        "stop": (["x"] * 65, [-1], [10**9], [[1]], {"a": 1}),
        "seed": ("x", 1.5),
    }.items():
        for value in values:
            yield post(
                f"{name} {value!s:.20}", "asample", {**sample, "sampling_params": {"max_tokens": 1, name: value}}
            )
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_logprobs_last_n"):
        for value in (-1, *HUGE):
            yield post(f"{name} {value}", "asample", {**sample, **params, "prompt_logprobs": True, name: value})
    for path in ("tinker://", "tinker://../../etc/passwd", "/etc/passwd", "x" * 10_000, "tinker://a/weights/\0"):
        for name, body in (
            ("asample", {**sample, **params, "model_path": path}),
            ("weights_info", {"tinker_path": path}),
            ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9, "model_path": path}),
        ):
            yield post(f"{name} of {path[:20]!r}", name, body)


def path_cases(model: str) -> Iterator[Case]:
    """Paths that lead elsewhere, and other clients' ids in paths."""
    for name in ("..%2f..%2fstate.sqlite", "..", "%2e%2e", "secret%00", "x" * 5000, "secret", "..%5c..", "%ff"):
        for method, end in (("DELETE", ""), ("PUT", "/ttl"), ("GET", "/external_weights_urls")):
            path = f"/api/v1/training_runs/{model}/checkpoints/weights/{name}{end}"
            yield f"{method} {name[:20]}", method, path, b'{"ttl_seconds": 3600}' if method == "PUT" else b"", {}
        yield f"file {name[:20]}", "GET", f"/api/v1/files/{name}?expires=99999999999&signature=00", b"", {}
    for query in ("", "?expires=x&signature=x", f"?expires={10**30}&signature=", "?expires=1&signature=%ff"):
        yield f"query {query}", "GET", f"/api/v1/files/state.sqlite{query}", b"", {}
    for path in (f"training_runs/{model}", f"training_runs/{model}/checkpoints", "sessions/x", "samplers/x"):
        yield f"GET {path[:30]}", "GET", f"/api/v1/{path}", b"", {}
    for page in ("offset=-1", "limit=x", f"limit={10**12}", "offset=%00"):
        yield page, "GET", f"/api/v1/checkpoints?{page}", b"", {}
    for method in ("PUT", "DELETE", "GET"):
        yield f"{method} a post", method, "/api/v1/optim_step", b"", {}


def future_cases(model: str, first: int) -> Iterator[tuple[str, bytes]]:
    """Documents whose request takes its place in the queue and fails there."""

    def message() -> Any:
        return loss_body(model, 0, [datum(rows()[0], weights=[1.0] * 7)])

    def tensor(**values: Any) -> Any:
        made = message()
        made.data[0].loss_fn_inputs["weights"].CopyFrom(pb.Tensor(**{"dtype": pb.DTYPE_FLOAT32, **values}))
        return made

    ones = torch.ones(7)
    cases: dict[str, Any] = {}
    for value in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 6):
            values = ones.clone()
            values[place] = value
            cases[f"{value} at {place}"] = tensor(dense=values.numpy().tobytes(), shape=[7])
    for shape in ([10**9], [7, 10**9], [2**62, 2], [0], [7, 0], [7, 65], [-7], [7, -1], [7, 1, 1], [1] * 100):
        cases[f"shape {shape!s:.20}"] = tensor(dense=ones.numpy().tobytes(), shape=shape)
    for dtype in (0, 2, 3, 99):
        cases[f"dtype {dtype}"] = tensor(dense=ones.numpy().tobytes(), dtype=dtype, shape=[7])
    for size in (0, 1, 27, 29, 10_000):
        cases[f"{size} bytes"] = tensor(dense=bytes(size), shape=[7])
    for rows_, columns in (([0] * 8, [1]), ([0, 10**9], [0]), ([0, 2, 1, 2, 2, 2, 2, 2], [0, 1]), ([], [])):
        sparse = pb.SparseCsr(
            values=bytes(4 * len(columns)),
            crow_indices=torch.tensor(rows_, dtype=torch.int64).numpy().tobytes(),
            col_indices=torch.tensor(columns, dtype=torch.int64).numpy().tobytes(),
        )
        cases[f"sparse {rows_!s:.20}"] = tensor(sparse_csr=sparse, shape=[7, 2])
    for tokens in ([95], [-1], [2**31 - 1], [], [1] * 257):
        made = message()
        data = torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()
        made.data[0].model_input[0].encoded_text.tokens = data
        cases[f"tokens {tokens!s:.20}"] = made
    for loss in ("", "mse", "x" * 10_000, "ppo"):
        made = message()
        made.loss_fn = loss
        cases[f"loss {loss[:20]}"] = made
    for number, (name, made) in enumerate(cases.items()):
        made.seq_id = first + number
        yield name, made.SerializeToString()


def wrong(status: int, answer: bytes) -> str:
    """Return the difference of an answer from one clear error, or an empty string."""
    if not 400 <= status < 500:
        return f"status {status}: {answer[:200]!r}"
    detail = json.loads(answer)["detail"]
    if not isinstance(detail, str) or not 5 < len(detail) <= 2000:
        return f"not one text: {detail!s:.200}"
    return f"not one clear line: {detail:.200}" if "\n" in detail or "internal error" in detail else ""


def train_honestly(client: Any, steps: int, ended: threading.Event | None) -> int:
    """Take at least some steps, and go on until the event."""
    step = 0
    while step < steps or (ended is not None and not ended.is_set()):
        client.forward_backward([datum(ids) for ids in rows(step)], "cross_entropy")
        client.optim_step(adam()).result(60)
        step += 1
    return step


def zstd_bomb(size: int) -> bytes:
    """A small zstd body of `size` zeros, a multiple of 16 MiB."""
    compressor, zeros = zstandard.ZstdCompressor().compressobj(), bytes(16 << 20)
    return b"".join(compressor.compress(zeros) for _ in range(size // len(zeros))) + compressor.flush()


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def test_hostile_requests_fail_alone(base: Path, tmp_path: Path) -> None:
    tokens = ("--token", "tml-one", "--token", "tml-two")
    with running(base, tmp_path / "state", *tokens) as (url, process):
        honest, hostile = (tinker.ServiceClient(base_url=url, api_key=f"tml-{name}") for name in ("one", "two"))
        client, alone = (honest.create_lora_training_client(str(base), rank=2, seed=1).result(30) for _ in range(2))
        own = hostile.create_lora_training_client(str(base), rank=2).result(30)
        session = own.model_id.split(":")[0]
        victim = client.model_id.split(":")[0]
        client.save_state("secret").result(30)
        send, ended, counts = Sender(url), threading.Event(), [0]
        training = threading.Thread(target=lambda: counts.append(train_honestly(client, 3, ended)))
        training.start()
        before, cases, faults = peak_mib(process.pid), 0, dict[str, str]()
        try:
            # 1. Requests that are refused at once.
            for path, valid in json_bodies(client.model_id, victim).items():
                bodies = broken_json(valid)
                if path != "create_session":
                    bodies["another client's ids"] = json.dumps(valid).encode()
                for name, body in bodies.items():
                    faults[f"{path}: {name}"] = wrong(*send("POST", f"/api/v1/{path}", body))
                    cases += 1
            for case in (
                *loss_cases(own.model_id),
                *own_cases(own.model_id, session, str(base)),
                *path_cases(client.model_id),
            ):
                name, method, path, body, headers = case
                faults[f"{path:.60}: {name}"] = wrong(*send(method, path, body, **headers))
                cases += 1
            for key in ("", "tml-", "tml-three", "x" * 1000, "tml-one\t", "tml-ön\xe9"):
                status, answer = send("POST", "/api/v1/get_server_capabilities", b"", **{"X-API-Key": key})
                faults[f"key {key[:20]!r}"] = wrong(status, answer) if status == 401 else f"status {status}"
                cases += 1
            # 2. Requests that fail in their queue, since later ones wait for them.
            for name, body in future_cases(own.model_id, 1):
                status, answer = send("POST", "/api/v1/forward_backward", body)
                assert status == 200, (name, answer)
                request = json.dumps({"request_id": json.loads(answer)["request_id"]}).encode()
                failed = json.loads(send("POST", "/api/v1/retrieve_future", request)[1])
                faults[name] = "" if failed.get("category") == "user" and "\n" not in failed["error"] else str(failed)
                cases += 1
        finally:
            ended.set()
            training.join()
        # 3. The service is alive, small, and its other client was not disturbed.
        wrong_answers = [f"{name}: {fault}" for name, fault in faults.items() if fault]
        assert not wrong_answers, "\n".join(wrong_answers)
        assert cases >= 300, cases
        assert peak_mib(process.pid) - before < MEMORY_MIB
        assert counts[-1] >= 3
        train_honestly(alone, counts[-1], None)
        assert largest_difference(saved_weights(client), saved_weights(alone)) < 1e-6
        own._request_id_counter = own._turn_counter = 10_000
        assert hostile.create_lora_training_client(str(base), rank=2).result(30).get_info().lora_rank == 2
        print(f"{cases} cases, {counts[-1]} steps of the other client")
