"""Order, fairness, batches and ends of the training service's queues, without HTTP."""

from __future__ import annotations

import asyncio
import json
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
        assert model not in server.trainer._names
        await server.close()

    asyncio.run(run())
