"""Order, fairness, batches and ends of the training service's queues, without HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.training.data import datum, rows

pytestmark = pytest.mark.xdist_group("training_service")
tinker = pytest.importorskip("tinker")

from fastapi import HTTPException  # noqa: E402
from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402

from archon.cli.serve_training import make_server  # noqa: E402
from archon.cli.serve_training_config import ServeTrainingConfig  # noqa: E402
from archon.engine.lora_pool import AdamStep  # noqa: E402
from archon.serve.training import queues, service  # noqa: E402
from archon.serve.training.queues import Queues, Task  # noqa: E402
from archon.serve.training.trainer import LoRAShape  # noqa: E402
from archon.serve.training.wire import loss_request  # noqa: E402


def test_clients_take_turns_and_models_keep_their_order() -> None:
    order: list[str] = []

    async def run() -> None:
        done = asyncio.Event()

        def work(name: str) -> Callable[[], dict[str, Any]]:
            def record() -> dict[str, Any]:
                order.append(name)
                return {}

            return record

        def finish(future: str, body: bytes, proto: bool) -> None:
            if len(order) == 8:
                done.set()

        made = Queues(None, finish)  # type: ignore[arg-type]  # no request here needs the trainer
        for model in ("a1", "a2", "a3", "b1"):
            made.open(model, owner=model[0])
        for model in ("a1", "a2", "a3", "b1"):
            for sequence_id in (1, 0):  # in any order
                made.submit(model, sequence_id, Task(model, work(f"{model}.{sequence_id}")))
        await asyncio.wait_for(done.wait(), 10)
        await made.stop()

    asyncio.run(run())
    assert order[:4] in (["a1.0", "b1.0", "a2.0", "b1.1"], ["b1.0", "a1.0", "b1.1", "a2.0"])
    for model in ("a1", "a2", "a3", "b1"):
        assert [name for name in order if name.startswith(model)] == [f"{model}.0", f"{model}.1"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_of_several_models_become_one_batch(dtype: Any, base: Path, tmp_path: Path) -> None:
    """Waiting requests of three models run together, and each keeps its own result."""

    async def run() -> tuple[list[int], dict[str, bytes]]:
        server = make_server(base, ServeTrainingConfig(device="cpu", dtype=dtype), [], tmp_path / "state")
        server.start()
        done: dict[str, bytes] = {}
        all_done = asyncio.Event()

        def finish(future: str, body: bytes, proto: bool) -> None:
            done[future] = body
            if len(done) == 9:
                all_done.set()

        server.queues._finish = finish
        models = ["a", "b", "c"]
        for number, model in enumerate(models):
            server.trainer.create(model, LoRAShape(2, seed=number))
            server.queues.open(model, owner=model)
        for sequence_id, forward_only in enumerate((False, False, True)):
            for model in models:
                data = types.ForwardBackwardInput(data=[datum(ids) for ids in rows()], loss_fn="cross_entropy")
                message = forward_backward_request_to_proto(
                    types.ForwardBackwardRequest(forward_backward_input=data, model_id=model, seq_id=1)
                )
                message.forward_only = forward_only
                work = loss_request(message, 95, 256)
                server.queues.submit(model, sequence_id, Task(f"{model}{sequence_id}", work))
        await asyncio.wait_for(all_done.wait(), 60)
        await server.close()
        return server.queues.batches, done

    batches, done = asyncio.run(run())
    assert batches == [3, 3]  # two of forward_backward with three models are one batch; then the forwards
    losses = {name: pb.ForwardBackwardOutput.FromString(body).metrics["loss:sum"] for name, body in done.items()}
    # Fresh LoRAs are the base; batches of other sizes round differently, in bfloat16 by 2⁻⁸ per product.
    assert list(losses.values()) == pytest.approx([losses["a0"]] * 9, rel={"float32": 1e-6, "bfloat16": 1e-3}[dtype])


async def alternate(base: Path, state: Path, steps: dict[str, int], delay: float = 0.005) -> list[int]:
    """Let models take steps, the second from the middle of the first's batch; return the models of each batch."""
    server = make_server(base, ServeTrainingConfig(device="cpu"), [], state)
    server.start()
    events: dict[str, asyncio.Event] = {}
    server.queues._finish = lambda future, body, proto: events.pop(future).set()

    adam = AdamStep(1e-3, 0.9, 0.95, 1e-8)

    async def train(model: str) -> None:
        for step in range(steps[model]):
            data = types.ForwardBackwardInput(data=[datum(ids) for ids in rows()], loss_fn="cross_entropy")
            message = forward_backward_request_to_proto(
                types.ForwardBackwardRequest(forward_backward_input=data, model_id=model, seq_id=1)
            )
            done = events[f"{model} step {step}"] = asyncio.Event()
            events[f"{model} loss {step}"] = asyncio.Event()
            work = loss_request(message, 95, 256)
            server.queues.submit(model, 2 * step, Task(f"{model} loss {step}", work))
            update = Task(f"{model} step {step}", lambda: {"norm": server.trainer.step(model, adam)}, short=True)
            server.queues.submit(model, 2 * step + 1, update)
            await asyncio.wait_for(done.wait(), 30)
            await asyncio.sleep(delay)

    training = []
    for number, model in enumerate(steps):
        server.trainer.create(model, LoRAShape(2, seed=number))
        server.queues.open(model, owner=model)
    for model in steps:
        training.append(asyncio.create_task(train(model)))
        await asyncio.sleep(0.002)  # the next loss arrives while this one runs
    await asyncio.gather(*training)
    await server.close()
    return server.queues.batches


def test_clients_that_train_at_the_same_time_share_batches(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "WINDOW_SHARE", 1e6)  # a busy machine may delay a client
    monkeypatch.setattr(queues, "WINDOW_SECONDS", 1.0)
    batches = asyncio.run(alternate(base, tmp_path / "state", {"a": 8, "b": 8}))
    assert batches == [1, *[2] * 7, 1]  # b is one step behind


def test_a_batch_waits_only_once_for_a_client_that_has_left(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "WINDOW_SHARE", 1e6)
    monkeypatch.setattr(queues, "WINDOW_SECONDS", 1.0)
    begun = time.monotonic()
    batches = asyncio.run(alternate(base, tmp_path / "state", {"a": 2, "b": 12}))
    waits = time.monotonic() - begun
    assert sum(batches) == 14
    assert waits < 6, batches  # 10 steps of b alone would wait for 10 s


def test_silent_sessions_end_and_requests_do_not_wait_for_ever(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOUSEKEEPING_SECONDS", 0.05)
    monkeypatch.setattr(service, "SESSION_SECONDS", 1.0)
    monkeypatch.setattr(queues, "GAP_SECONDS", 0.2)

    async def run() -> None:
        server = make_server(base, ServeTrainingConfig(device="cpu"), [], tmp_path / "state")
        server.start()
        request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version=service.SDK_VERSION)
        session = server.create_session("me", request)["session_id"]
        create = types.CreateModelRequest(
            session_id=session, model_seq_id=0, base_model=str(base), lora_config=types.LoraConfig(rank=2)
        )
        future = server.create_model("me", create)
        assert server.create_model("me", create) == future  # a retry
        model = json.loads((await server.retrieve("me", future["request_id"]))[0])["model_id"]  # type: ignore[index]
        step = types.OptimStepRequest(optim_params=types.AdamParams(), model_id=model, seq_id=5)
        waiting = server.optim_step("me", step)["request_id"]
        failed = json.loads((await server.retrieve("me", waiting))[0])  # type: ignore[index]
        assert "request 1 before this one did not arrive" in failed["error"]
        while model in server.queues:  # noqa: ASYNC110 — nothing tells of the end of a session
            await asyncio.sleep(0.02)
        with pytest.raises(HTTPException, match="the session has ended"):
            server.touch("me", session)
        with pytest.raises(HTTPException, match="it has no saved state"):
            server.optim_step("me", types.OptimStepRequest(optim_params=types.AdamParams(), model_id=model, seq_id=6))
        await server.close()  # the engine thread has ended
        assert model not in server.trainer._names

    asyncio.run(run())
