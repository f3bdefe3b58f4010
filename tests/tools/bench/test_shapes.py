"""The documents of a step: lengths, and the same tokens in every layout."""

from __future__ import annotations

import pytest

from archon.schema.config import ActivationCheckpointConfig
from archon.schema.errors import ConfigError
from archon.tools.bench.config import SweepConfig
from archon.tools.bench.shapes import even_shape, parse_shape, shard_documents
from archon.tools.bench.sweep import run_point
from archon.tools.planner.search import POLICIES


def test_random_lengths_are_always_the_same_and_fill_the_step() -> None:
    for text in ("uniform:64", "lognormal:64"):
        shape = parse_shape(text, 1000)
        assert shape == parse_shape(text, 1000)
        assert 999 <= shape.tokens <= 1000 and max(shape.lengths) <= 64 and len(set(shape.lengths)) > 5
    assert parse_shape("7,3,9", 8192).lengths == [7, 3, 9]


def test_the_ranks_together_have_every_document_once() -> None:
    shape = parse_shape("5,9,2,7,3", 0)
    whole = shard_documents(shape, 100, 0, 1)
    parts = [shard_documents(shape, 100, rank, 2) for rank in range(2)]
    assert sorted(length for part in parts for length in part.lengths) == sorted(shape.lengths)
    documents = {tuple(document.tolist()) for part in parts for document in part.tokens.split(part.lengths)}
    assert documents == {tuple(document.tolist()) for document in whole.tokens.split(whole.lengths)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "no document lengths"),
        ({"seq": [100]}, "--tokens 8192 is not a multiple of --seq 100"),
        ({"lengths": ["ragged"]}, "--lengths is 'ragged'"),
        ({"lengths": ["uniform:9000"]}, "must have 2 to 8192"),
        ({"lengths": ["5,1"]}, "expected at least 2"),
        ({"lengths": ["9" * 5000]}, r"a document of --lengths is '9{20}'… \(5000 characters\); expected an integer of"),
        ({"lengths": ["uniform:" + "9" * 5000]}, "expected an integer of at most 18 digits"),
        ({"seq": [1024], "micro_batch": [512]}, "do not fit micro-batches of 512; raise --micro-batch"),
        ({"seq": [1024], "engine": {"layout": "d2"}}, "engine.layout is set by the sweep"),
        ({"seq": [1024], "engine": {"lora": {"loras": {"a": {}}}}}, r"engine\.lora\.loras has several LoRAs"),
        ({"seq": [1024], "layouts": ["d2q4"]}, "q"),
        ({"seq": [1024], "recompute": ["some"]}, "recompute"),
    ],
)
def test_what_no_point_could_honour_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SweepConfig.parse({"model": "m"} | changes).points()


def test_what_one_point_alone_cannot_honour_is_its_row() -> None:
    config = SweepConfig.parse({"model": "m", "seq": [64, 32], "tokens": 64, "micro_batch": [32, 64]})
    rows = {point.name: run_point(config, point) for point in config.points() if config.error(point)}
    assert {name: (row.status, row.reason) for name, row in rows.items()} == {
        "d1 1×64 mb 32 float32": (
            "refused",
            "documents of 64 tokens (1×64) do not fit micro-batches of 32; raise --micro-batch",
        )
    }
    assert len(config.points()) == 4


def test_too_few_documents_for_the_ranks_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="there are 2 documents for 4 data-parallel ranks; expected at least one each"
    ):
        shard_documents(even_shape(8, 16), 100, 0, 4)


@pytest.mark.parametrize("policy", [*POLICIES, {"mode": "memory_budget", "memory_budget": 0.3}], ids=str)
def test_a_policy_is_measured_by_the_name_that_a_plan_gives_it(policy: dict[str, object]) -> None:
    asked = ActivationCheckpointConfig.model_validate(policy)
    config = SweepConfig.parse({"model": "m", "seq": [64], "recompute": [asked.name]})
    (point,) = config.points()
    assert point.recompute == asked.name and config.engine_config(point).activation_checkpoint == asked


def test_points_that_must_agree_follow_one_another() -> None:
    config = SweepConfig(
        model="m", layouts=["d1", "t2"], tokens=64, seq=[32], dtype=["float32", "float64"], recompute=["none", "full"]
    )
    keys = [point.loss_key for point in config.points()]
    assert len(keys) == 8 and len(set(keys)) == 2 and keys == sorted(keys)
