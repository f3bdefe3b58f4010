"""What the ranks of a layout do in the tests of checkpoints: train, save, load, export, and say what they hold."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from archon.checkpoint.hf_export import save_hf
from archon.checkpoint.native import broadcast_latest_checkpoint, model_fingerprint, open_state
from archon.checkpoint.safetensors_file import write_safetensors
from archon.checkpoint.state_file import write_shards
from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError
from archon.tools.check.layouts import LENGTHS, SequenceLoss, padded_batch, rank_rows
from tests.checkpoint.killing import digest
from tests.distributed.cases import Case, batch, engine_config, loss_of
from tests.engine.tiny import full_tensor
from tests.models import fused_family

TRAINED = 2


def engine_of(case: Case, model: str, **changes: Any) -> ArchonEngine:
    engine = ArchonEngine(engine_config(case, model, case.layout, **changes))
    engine.initialize(total_steps=10)
    return engine


def train(engine: ArchonEngine, case: Case, steps: range) -> None:
    ranks = engine.ranks
    for step in steps:
        rows = rank_rows(batch(LENGTHS, seed=10 + step), ranks.dp.rank, ranks.dp.size)
        engine.train_batch(rows, loss_of(case), loss_token_count)
        engine.step_lr_scheduler()


def whole_state(engine: ArchonEngine) -> dict[str, Tensor]:
    """Every weight and moment that this rank has a part of, whole, by name; a collective. The head of a pipeline's
    last stage that is tied to the embedding is among them, by its own name."""
    found = {}
    for name, parameter in engine.model.named_parameters():
        found[name] = full_tensor(parameter.detach()).clone()
        for key, value in engine.optimizer.state[parameter].items():  # type: ignore[union-attr]
            found[f"{name}.{key}"] = full_tensor(value).clone()
    return found


def save_trained(case: Case, model: str, out: str, asynchronous: bool) -> dict[str, str]:
    """Train, save; returns the digest of each tensor."""
    engine = engine_of(case, model)
    train(engine, case, range(TRAINED))
    state = whole_state(engine)
    engine.version = 7
    trained = threading.Event()

    def write_late(*args: Any) -> Any:
        assert trained.wait(60)
        return write_shards(*args)

    if not asynchronous:
        engine.save(out, format="native")
        return digests(state)
    with mock.patch("archon.checkpoint.native.write_shards", write_late):
        engine.save(out, format="native", asynchronous=True)
        train(engine, case, range(TRAINED, TRAINED + 1))  # what is written must not see it
        trained.set()
        engine.wait_for_saves()
    return digests(state)


def digests(state: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in state.items()}


def load_into(case: Case, model: str, saved: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Load into another layout; returns the digest of each tensor, and the weights after a further step."""
    engine = engine_of(case, model)
    resume(engine, saved)
    assert engine.scheduler is not None
    assert (engine.step, engine.version, engine.scheduler.state_dict()) == (TRAINED, 7, {"position": TRAINED})
    found = digests(whole_state(engine))
    train(engine, case, range(TRAINED, TRAINED + 1))
    return found, {name: tensor.clone() for name, tensor in engine.weights()}


def resume(engine: ArchonEngine, saved: str) -> None:
    folder = broadcast_latest_checkpoint(saved)
    assert folder is not None
    with open_state(folder, model_fingerprint(engine.args)) as (_, state):
        engine.load_state_dict(state["engine"])


def export(case: Case, model: str, saved: str, out: str) -> None:
    engine = engine_of(case, model)
    engine.load(saved)
    engine.save(out)


def random_numbers(case: Case, model: str, saved: str, seed: int, save: bool) -> float:
    """What the next draw of this rank is: after a save, or after the load of what was saved."""
    engine = engine_of(case, model)
    torch.manual_seed(seed + 10 * torch.distributed.get_rank())
    if save:
        engine.save(saved, format="native")
    else:
        resume(engine, saved)
    return float(torch.rand(()))


def failed_export(case: Case, model: str, out: str) -> str:
    """The error of an export that cannot be written; the next collective must go well."""
    engine = engine_of(case, model)
    try:
        engine.save(out)
    except CheckpointError as error:
        assert len(list(engine.weights())) > 0
        return f"CheckpointError: {error}"
    return "none"


def failed_save(case: Case, model: str, out: str) -> str:
    """The error of an asynchronous save for which rank 1 has no room."""

    def no_room(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = engine_of(case, model)
    train(engine, case, range(1))
    with mock.patch(
        "archon.checkpoint.state_file.write_safetensors", no_room if engine.ranks.dp.rank == 1 else write_safetensors
    ):
        engine.save(out, format="native", asynchronous=True)
        train(engine, case, range(1, 2))
        try:
            engine.wait_for_saves()
        except CheckpointError as error:
            engine.wait_for_saves()  # it is told once
            return f"CheckpointError: {error}"
    return "none"


def exported_bytes(case: Case, model: str, out: str, shard_bytes: int) -> tuple[int, int, int]:
    """Of the weights gathered for an export: the bytes alive at once, of the largest, and of all."""
    engine = engine_of(case, model)
    gathered: list[tuple[StorageWeakRef, int]] = []
    peak = 0

    def watched() -> Iterator[tuple[str, Tensor]]:
        nonlocal peak
        for name, tensor in engine.hf_weights():
            storage = tensor.untyped_storage()
            gathered.append((StorageWeakRef(storage), storage.nbytes()))
            alive = {ref.cdata: size for ref, size in gathered if not ref.expired()}
            peak = max(peak, sum(alive.values()))
            yield name, tensor

    if torch.distributed.get_rank() == 0:
        save_hf(out, watched(), like=model, max_shard_bytes=shard_bytes)
    else:
        for _ in watched():
            pass
    sizes = {ref.cdata: size for ref, size in gathered}.values()
    return peak, max(sizes), sum(tensor.nbytes for _, tensor in engine.weights())


def reexport(case: Case, model: str, out: str) -> dict[str, str]:
    """Load a checkpoint whose tensors hold several parameters, and export it again; the digests of what was loaded."""
    fused_family.register()
    engine = engine_of(case, model)
    loaded = {name: digest(tensor) for name, tensor in engine.weights()}
    engine.save(out)
    return loaded


def train_and_export(model: str, layout: str, out: str) -> None:
    """Train the text decoder of a composite checkpoint for a step, and export it."""
    options = {"path": model, "device": "cpu", "dtype": "float32", "layout": layout, "vision": "off"}
    engine = ArchonEngine(EngineConfig.model_validate(options | {"optimizer": {"lr": 0.1}}))
    engine.initialize(total_steps=2)
    rows = rank_rows(padded_batch(LENGTHS, engine.args.vocab_size, 0), engine.ranks.dp.rank, engine.ranks.dp.size)
    engine.train_batch(rows, SequenceLoss(), loss_token_count)
    engine.save(out)
