"""Idle LoRAs move to disk and return bitwise; more models than `max_models` train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("training_service")]
tinker = pytest.importorskip("tinker")

from archon.cli.serve_training import make_server, make_trainer  # noqa: E402
from archon.cli.serve_training_config import ServeTrainingConfig  # noqa: E402
from archon.engine.lora_pool import AdamStep  # noqa: E402
from archon.schema.errors import ConfigError, UserError  # noqa: E402
from archon.serve.training.losses import LOSSES  # noqa: E402
from archon.serve.training.trainer import LoRAShape, Trainer  # noqa: E402
from archon.serve.training.wire import Datum, LossRequest  # noqa: E402
from tests.serve.training.conftest import running  # noqa: E402
from tests.serve.training.data import datum, rows  # noqa: E402
from tests.serve.training.test_numbers import adam, saved_weights  # noqa: E402

MODELS = ("a", "b", "c")


def request(seed: int) -> LossRequest:
    data = [
        Datum(torch.tensor(ids[:-1]), torch.tensor(ids[1:]), {"weights": torch.ones(len(ids) - 1)})
        for ids in rows(seed)
    ]
    return LossRequest(tuple(data), LOSSES["cross_entropy"], {}, True)


def make(base: Path, state: Path, **fields: Any) -> Trainer:
    return make_trainer(base, ServeTrainingConfig(device="cpu", **fields), state)


def train(trainer: Trainer, between: Callable[[], None] = lambda: None) -> dict[str, dict[str, torch.Tensor]]:
    """Train three LoRAs in turns, with two requests per step; return their weights and moments."""
    for seed, model in enumerate(MODELS):
        trainer.create(model, LoRAShape(2 + seed, seed=seed))
    for step in range(3):
        for part in range(2):  # between the two, every other model has its turn, so gradients move too
            for model in MODELS:
                trainer.run([(model, request(10 * step + part))])
                between()
        for model in MODELS:
            trainer.step(model, AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0))
            between()
    states = {}
    for model in MODELS:
        name = trainer._name(model)
        states[model] = {key: x.clone() for key, x in trainer._pool.state(name).items()}
    return states


def test_idle_models_return_from_disk_bitwise(base: Path, tmp_path: Path) -> None:
    expected = train(make(base, tmp_path / "all"))
    trainer, files = make(base, tmp_path / "one", max_models=1), set[int]()
    actual = train(trainer, lambda: files.add(len(list((tmp_path / "one" / "idle").iterdir()))))
    assert files == {2}  # the others
    for model in MODELS:
        assert actual[model].keys() == expected[model].keys()
        assert any(key.startswith("moment:") and x.any() for key, x in actual[model].items())
        for key, x in actual[model].items():
            assert torch.equal(x, expected[model][key]), key
    for model in MODELS:
        trainer.remove(model)
    assert not list((tmp_path / "one" / "idle").iterdir())


def test_idle_models_have_a_limit_on_disk(base: Path, tmp_path: Path) -> None:
    trainer = make(base, tmp_path, max_models=1, disk_gib=2e-5)  # 21 kB, less than one LoRA with its moments
    trainer.create("a", LoRAShape(4, seed=0))
    with pytest.raises(UserError, match=r"idle models have 0 bytes on disk, and this request .* raise max_models"):
        trainer.create("b", LoRAShape(4, seed=0))
    trainer.run([("a", request(0))])  # the first is still there
    with pytest.raises(UserError, match="model b has no weights"):
        trainer.run([("b", request(0))])


def test_a_later_server_deletes_the_files_of_a_killed_one(base: Path, tmp_path: Path) -> None:
    trainer = make(base, tmp_path, max_models=1)
    for model in MODELS:
        trainer.create(model, LoRAShape(2, seed=0))
    assert len(list((tmp_path / "idle").iterdir())) == 2
    store = make_server(base, ServeTrainingConfig(device="cpu"), [], tmp_path).store
    assert not (tmp_path / "idle").exists()
    trainer.run([("c", request(0))])
    trainer.create("d", LoRAShape(2, seed=0))
    with pytest.raises(ConfigError, match="another training service uses this folder"):
        make_server(base, ServeTrainingConfig(device="cpu"), [], tmp_path)
    assert len(list((tmp_path / "idle").iterdir())) == 1  # still there
    store.close()


def test_clients_of_a_small_server_train_more_models_than_fit(
    base: Path, train: Callable[..., Any], tmp_path: Path
) -> None:
    """Losses of three models, sent at once to a server with memory for two."""

    def run(clients: list[Any]) -> list[dict[str, torch.Tensor]]:
        for step in range(3):
            data = [datum(ids) for ids in rows(step)]
            futures = [client.forward_backward(data, "cross_entropy") for client in clients]
            futures += [client.optim_step(adam()) for client in clients]
            for future in futures:
                future.result(60)
        return [saved_weights(client) for client in clients]

    with running(base, tmp_path / "state", "max_models=2") as (url, _):
        service = tinker.ServiceClient(base_url=url, api_key="tml-one")
        small = run(
            [service.create_lora_training_client(base_model=str(base), rank=4, seed=n).result(60) for n in range(3)]
        )
        service.close("success").result(30)
    for found, wanted in zip(small, run([train(seed=n) for n in range(3)]), strict=True):
        for key, x in found.items():
            torch.testing.assert_close(x, wanted[key], atol=1e-6, rtol=0)  # batches of other models round differently
