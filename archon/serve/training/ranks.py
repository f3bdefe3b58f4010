"""Several ranks: rank 0 serves, and every rank runs the engine's operations in the order in which rank 0 sends them."""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from archon.engine import ArchonEngine
from archon.engine.lora_pool import AdamStep
from archon.parallel.control_plane import ControlPlane
from archon.schema.errors import UserError
from archon.serve.training.losses import LOSSES
from archon.serve.training.trainer import LoRAShape, Trainer
from archon.serve.training.wire import Datum, LossRequest, LossResult

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

IDLE_SECONDS = 30.0
"""Seconds between signs of life of rank 0: the other ranks wait at most `timeout_s` or 30 minutes for an operation."""


class RankTrainer(Trainer):
    """A rank's trainer. Rank 0 calls its methods; each is sent to the other ranks, if there are any, which `follow`.

    A UserError of one rank is raised on all of them, with one message. After any other error the ranks may hold
    different weights or wait for each other, so it ends the service.

    Attributes:
        lost: the error that ends the service; None while it runs.
        on_lost: called on rank 0 with that error, in the engine thread.
    """

    def __init__(self, engine: ArchonEngine, base: str, idle: Path, **limits: int) -> None:
        self._plane = ControlPlane.with_long_timeout("training service")
        super().__init__(engine, base, idle, **limits)
        self._plane.barrier()  # creates the group
        self._lock, self._closed = threading.RLock(), threading.Event()
        self.lost: BaseException | None = None
        self.on_lost: Callable[[BaseException], None] = lambda error: None
        if self._plane.is_main and self._plane.size > 1:
            threading.Thread(target=self._stay_alive, name="archon-ranks", daemon=True).start()

    @property
    def is_main(self) -> bool:
        """True on the rank that answers clients and writes files."""
        return self._plane.is_main

    def follow(self) -> None:
        """Run the operations of rank 0 until it ends the service."""
        while (data := self._plane.broadcast(lambda: b"")) != _END:
            if data == _ALIVE:
                continue
            name, arguments = decode(data)
            try:
                work = getattr(super(), name)
                self._agree(partial(work, *arguments))
            except UserError as error:
                logger.debug("%s was refused on every rank: %s", name, error)

    def close(self) -> None:
        """End the other ranks."""
        self._closed.set()
        with self._lock:
            if self.lost is None:
                self._plane.broadcast(lambda: _END)

    def create(self, model_id: str, shape: LoRAShape) -> None:
        """Add a fresh LoRA on every rank."""
        self._on_all("create", model_id, shape)

    def remove(self, model_id: str) -> None:
        """Free the memory of a LoRA on every rank."""
        self._on_all("remove", model_id)

    def run(self, requests: Sequence[tuple[str, LossRequest]]) -> list[LossResult]:
        """Run requests, with the documents of each divided among data-parallel ranks."""
        results: list[LossResult] = self._on_all("run", requests)
        return results

    def step(self, model_id: str, settings: AdamStep) -> float:
        """Take an optimizer step on every rank."""
        return float(self._on_all("step", model_id, settings))

    def save(self, model_id: str, folder: Path, optimizer: bool) -> int:
        """Write a checkpoint on rank 0."""
        return int(self._on_all("save", model_id, folder, optimizer))

    def load(self, model_id: str, folder: Path, optimizer: bool) -> None:
        """Load a checkpoint on every rank."""
        self._on_all("load", model_id, folder, optimizer)

    def _on_all(self, name: str, *arguments: Any) -> Any:
        if self._plane.size == 1:
            return getattr(super(), name)(*arguments)
        with self._lock:
            if self.lost is not None:
                raise UserError(f"the service has ended, because a rank failed: {self.lost!s:.300}")
            try:
                self._plane.broadcast(lambda: encode(name, arguments))
                return self._agree(lambda: getattr(super(RankTrainer, self), name)(*arguments))
            except UserError:
                raise
            except BaseException as error:
                self._lose(error)
                raise

    def _agree(self, work: Callable[[], Result]) -> Result:
        """Run `work` on every rank; a UserError of one rank is raised on all."""
        error: UserError | None = None
        try:
            result = work()
        except UserError as raised:
            error = raised
        texts = self._plane.all_gather(b"" if error is None else str(error).encode())
        failed = [rank for rank, text in enumerate(texts) if text]
        if not failed:
            return result
        first = texts[failed[0]].decode()
        raise UserError(first if len({*texts}) == 1 else f"rank {failed[0]}: {first}") from error

    def _stay_alive(self) -> None:
        """Send signs of life, which fail if a rank is lost."""
        while not self._closed.wait(IDLE_SECONDS):
            with self._lock:
                if self._closed.is_set() or self.lost is not None:
                    return
                try:
                    self._plane.broadcast(lambda: _ALIVE)
                except Exception as error:  # noqa: BLE001 - it ends the service, which raises it
                    self._lose(error)

    def _lose(self, error: BaseException) -> None:
        self.lost = error
        self.on_lost(error)


# Operations as bytes: a JSON header, then the tensors of losses.

_END, _ALIVE = b"end", b"alive"
_TENSORS = {"tokens": np.int64, "targets": np.int64}  # the inputs of losses are float32


def encode(name: str, arguments: Sequence[Any]) -> bytes:
    """Return an operation of `Trainer` with its arguments as bytes."""
    tensors = list[bytes]()

    def pack(key: str, x: torch.Tensor) -> list[int]:
        tensors.append(x.numpy().astype(_TENSORS.get(key, np.float32), copy=False).tobytes())
        return list(x.shape)

    values: list[Any] = list(arguments)
    if name == "run":
        values = [
            {
                "model": model,
                "loss": next(key for key, loss in LOSSES.items() if loss is request.loss),
                "settings": dict(request.settings),
                "backward": request.backward,
                "data": [
                    {key: pack(key, x) for key, x in {"tokens": d.tokens, "targets": d.targets, **d.inputs}.items()}
                    for d in request.data
                ],
            }
            for model, request in arguments[0]
        ]
    values = [asdict(value) if isinstance(value, (LoRAShape, AdamStep)) else value for value in values]
    header = json.dumps([name, values], default=str).encode()  # paths as text
    return b"".join([struct.pack("<Q", len(header)), header, *tensors])


def decode(data: bytes) -> tuple[str, list[Any]]:
    """Return the operation and the arguments of `encode`."""
    end = 8 + struct.unpack_from("<Q", data)[0]
    name, values = json.loads(data[8:end])
    if name == "create":
        values[1] = LoRAShape(**values[1])
    elif name == "step":
        values[1] = AdamStep(**values[1])
    elif name in ("save", "load"):
        values[1] = Path(values[1])
    if name != "run":
        return name, values
    place = end

    def unpack(key: str, shape: list[int]) -> torch.Tensor:
        nonlocal place
        kind = np.dtype(_TENSORS.get(key, np.float32))
        count = int(np.prod(shape))
        x = np.frombuffer(data, kind, count, place).copy().reshape(shape)
        place += count * kind.itemsize
        return torch.from_numpy(x)

    requests = []
    for value in values:
        documents = []
        for shapes in value["data"]:
            tensors = {key: unpack(key, shape) for key, shape in shapes.items()}
            documents.append(Datum(tensors.pop("tokens"), tensors.pop("targets"), tensors))
        request = LossRequest(tuple(documents), LOSSES[value["loss"]], value["settings"], value["backward"])
        requests.append((value["model"], request))
    return name, [requests]
