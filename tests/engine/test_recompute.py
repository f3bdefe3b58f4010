"""`activation_checkpoint: auto` recomputes as many first blocks as a rank's memory requires."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.memory.memory_model import MemoryModel
from archon.engine.memory.recompute import (
    FRAGMENTATION,
    GIB,
    choose_recompute,
    free_memory,
    memory_budget,
    memory_model,
)
from archon.models import get_model_spec
from archon.schema.config import ActivationCheckpointConfig, EngineConfig
from archon.schema.errors import ConfigError
from tests.engine.tiny import engine_gradients, make_engine, sft_batch
from tests.tools.planner.models import MODELS

LAYOUTS = ("d1", "d4", "t4", "c2", "p2", "d2p2", "d4e4", "d2t2e4")
BLOCKS = 12


def model_of(name: str = "dense") -> MemoryModel:
    hf_config = MODELS[name] | {"num_hidden_layers": BLOCKS}
    spec = get_model_spec(hf_config["model_type"])
    return memory_model(config(), spec, spec.model_args_class.from_hf_config(hf_config), {}, torch.device("cpu"))


def config(layout: str = "d1", **fields: Any) -> EngineConfig:
    auto = {"activation_checkpoint": {"mode": "auto"}}
    return EngineConfig.model_validate({"path": "m", "layout": layout, "max_tokens_per_mb": 2048} | auto | fields)


def first(policy: ActivationCheckpointConfig, blocks: int) -> int:
    return sum(policy.recomputes(position) for position in range(1, blocks + 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_less_memory_recomputes_more_blocks_and_no_more_than_needed(layout: str) -> None:
    model = model_of("moe" if "e" in layout else "dense")
    asked = config(layout)
    kept, recomputed = (choose_recompute(model, asked, budget) for budget in (1 << 60, 0))
    assert (kept.policy.mode, recomputed.policy.mode) == ("none", "full")
    assert kept.fits and not recomputed.fits and "does not fit" in str(recomputed)
    counts, blocks = [], kept.blocks
    for share in (0.8, 0.6, 0.4, 0.2):
        budget = int(recomputed.bytes + share * (kept.bytes - recomputed.bytes))
        choice = choose_recompute(model, asked, budget)
        counts.append(first(choice.policy, blocks))
        assert choice.fits and choice.bytes == choice.memory.total + math.floor(FRAGMENTATION * choice.memory.step)
        assert f"recompute the first {counts[-1]} of {blocks} blocks" in str(choice)
        tighter = choose_recompute(model, asked, choice.bytes - 1)
        assert first(tighter.policy, blocks) > counts[-1], "one block less would not fit"
        assert first(choose_recompute(model, asked, choice.bytes).policy, blocks) == counts[-1]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1] < blocks


def test_a_model_without_an_optimizer_keeps_nothing_and_recomputes_nothing() -> None:
    assert choose_recompute(model_of(), config(optimizer=None), 0).policy.mode == "none"


def test_the_budget_is_configured_or_the_memory_without_a_margin() -> None:
    cpu = torch.device("cpu")
    given = config(activation_checkpoint={"mode": "auto", "memory_budget": 1.5})
    assert memory_budget(given, cpu, free=8 * GIB) == 1.5 * GIB
    assert memory_budget(config(), cpu, free=8 * GIB) == 7.5 * GIB
    assert memory_budget(config(), torch.device("cuda"), free=8 * GIB) == 6 * GIB
    assert free_memory(cpu) > 0


def test_narrow_moments_and_steps_in_the_backward_take_less() -> None:
    """Bytes per parameter: 4 for masters, 4 for gradients, and 8, 4 or 2.03 for moments."""
    model = model_of()
    parameters = choose_recompute(model, config(), 1 << 60).memory.parameters // 4
    for moments, each in (("float32", 8.0), ("bfloat16", 4.0), ("int8", 2 + 8 / 256)):
        memory = choose_recompute(model, config(optimizer={"moments": moments}), 1 << 60).memory
        assert memory.moments == int(each * parameters)
    few: dict[str, Any] = {"optimizer": {"max_grad_norm": None}, "dtype": "bfloat16", "max_tokens_per_mb": 64}
    freed, kept = config(gradient_reduction="step_in_backward", **few), config(**few)
    less, more = (choose_recompute(model, choice, 0, micro_batches=1).memory for choice in (freed, kept))
    assert less.total < more.total and less.gradients < more.gradients == 4 * parameters


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = free_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(torch.device("cpu")) == alone // 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="the variable LOCAL_WORLD_SIZE is 'four'; expected an integer"):
        free_memory(torch.device("cpu"))


def test_the_gradients_are_those_without_recomputation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bitwise, with half of the blocks recomputed."""
    sizes = {"hf": {"num_hidden_layers": 4}, "max_tokens_per_mb": 256}
    plain = make_engine(tmp_path, **sizes)
    spec = get_model_spec(plain.spec.name)
    model = memory_model(plain.config, spec, plain.args, {}, torch.device("cpu"))
    kept, recomputed = (choose_recompute(model, plain.config, budget).bytes for budget in (1 << 60, 0))
    budget = (kept + recomputed) / 2 / GIB
    with caplog.at_level(logging.INFO, logger="archon.engine.memory.recompute"):
        engine = make_engine(tmp_path, **sizes, activation_checkpoint={"mode": "auto", "memory_budget": budget})
    recomputing = [type(block).__name__.startswith("Checkpointed") for block in engine.model.layers.values()]
    assert 0 < sum(recomputing) < 4 and recomputing == sorted(recomputing, reverse=True)
    assert f"auto: recompute the first {sum(recomputing)} of 4 blocks, predicted" in caplog.text
    expected, grads = engine_gradients(plain, sft_batch(), CrossEntropyLoss(), loss_token_count)
    loss, actual = engine_gradients(engine, sft_batch(), CrossEntropyLoss(), loss_token_count)
    assert loss == expected
    assert all(torch.equal(actual[name], grads[name]) for name in grads)


def test_what_auto_cannot_decide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot predict the activations of a trained vision encoder"):
        memory_model(config(vision="trained"), *([None] * 2), {}, torch.device("cpu"))  # type: ignore[arg-type]
    zbv: dict[str, Any] = {"layout": "p2", "pipeline": {"schedule": "zbv"}, "hf": {"num_hidden_layers": 4}}
    for mode in ("auto", "offload"):
        with pytest.raises(ConfigError, match="splits the backward pass, which recomputed and compiled blocks do not"):
            make_engine(tmp_path, **zbv, activation_checkpoint={"mode": mode})


@pytest.mark.parametrize("selective", ["first 0", "first", "second 2", 0])
def test_a_wrong_number_of_blocks_is_refused(selective: object) -> None:
    with pytest.raises(ConfigError, match="selective"):
        ActivationCheckpointConfig.parse({"mode": "selective", "selective": selective}, source="policy")


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_budget must be a share from 0 to 1"):
        ActivationCheckpointConfig.parse({"mode": "memory_budget", "memory_budget": 2}, source="policy")
