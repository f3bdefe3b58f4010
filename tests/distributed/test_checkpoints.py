"""A checkpoint of any layout is the same state, bit for bit, in any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.checkpoint.native import load_state
from archon.checkpoint.state_tree import Shard, select_region
from archon.engine.engine import ArchonEngine
from archon.parallel.layout import parse_layout
from archon.schema.errors import CheckpointError
from archon.tools.check.rank_pool import Pool, RankError
from tests.checkpoint.killing import digest
from tests.distributed import checkpoints
from tests.distributed.cases import Case, engine_config, write_config
from tests.tolerances import STEPS_FP64

pytestmark = pytest.mark.xdist_group("ranks")

ONE, ONE_MOE = Case("d1", "tied"), Case("d1", "moe")
D2, T2, C2, R2 = (Case(layout, "tied") for layout in ("d2", "t2", "c2", "r2"))
D2T2, T4, D4, R2D2 = (Case(layout, "tied") for layout in ("d2t2", "t4", "d4", "r2d2"))
P2, D2P2 = (Case(layout, "tied", config={"pipeline": {"schedule": "1f1b"}}) for layout in ("p2", "d2p2"))
ZBV = Case("p2", "tied", config={"pipeline": {"schedule": "zbv"}})
E2, T2_MOE, E4 = (Case(layout, "moe") for layout in ("d2e2", "t2", "d2t2e4"))
ETP = Case("(attn:d2t2|ffn:d1t2e2)", "moe")
STAGED_E2 = Case("d2p2e2", "moe", config={"pipeline": {"schedule": "zbv"}})
NARROW: dict[str, dict[str, Any]] = {
    moments: {"optimizer": {"lr": 1e-2, "max_grad_norm": 0.5, "moments": moments}} for moments in ("bfloat16", "int8")
}
D2_CODES, P2_CODES = (Case(layout, "fp8", config=NARROW["int8"]) for layout in ("d2", "p2"))
D2_NARROW, T2_NARROW = (Case(layout, "fp8", config=NARROW["bfloat16"]) for layout in ("d2", "t2"))
QUICK = [
    (ONE, D2),
    (D2, T2),
    (T2, P2),
    (P2, ZBV),
    (ZBV, ONE),
    (ONE_MOE, E2),
    (E2, T2_MOE),
    (D2_CODES, P2_CODES),
    (D2_NARROW, T2_NARROW),
]
FURTHER = [
    (D2P2, D2T2),
    *[(D2, C2), (C2, R2), (R2, ZBV), (ONE, T4), (T4, D2P2), (D2T2, R2D2), (R2D2, D4), (D4, P2), (D2P2, ONE)],
    *[(E2, ONE_MOE), (E2, ETP), (ETP, E4), (E4, STAGED_E2), (STAGED_E2, E2), (T2_MOE, ETP), (ETP, ONE_MOE)],
]


def name_of(pair: Any) -> str:
    moments = pair.config.get("optimizer", {}).get("moments", "")
    return pair.layout + moments + ("-zbv" if pair.config.get("pipeline") == {"schedule": "zbv"} else "")


class Layouts:
    """Runs cases on their ranks, and keeps what each of them has saved."""

    def __init__(self, pools: Callable[[int], Pool], folder: Path) -> None:
        self.pools, self.folder = pools, folder
        self.saved: dict[str, tuple[Path, dict[str, str]]] = {}
        self.further: dict[str, dict[str, Tensor]] = {}

    def run(self, function: Callable[..., Any], case: Case, *args: Any) -> list[Any]:
        size = parse_layout(case.layout).world_size
        return [function(case, *args)] if size == 1 else self.pools(size).run(function, case, *args)

    def model(self, name: str) -> str:
        folder = self.folder / name
        if not folder.exists():
            path = write_config(folder / "config", name)
            engine = ArchonEngine(engine_config(Case("d1", name), path, "d1", init_from_scratch=True, seed=3))
            engine.initialize()
            engine.save(folder / "weights")
        return str(folder / "weights")

    def save(self, case: Case, asynchronous: bool = False) -> tuple[Path, dict[str, str]]:
        """Where the state after two steps is, and the digest of every tensor of it."""
        key = f"{case.name}-{asynchronous}"
        if key not in self.saved:
            out = self.folder / f"saved-{len(self.saved)}"
            found = self.run(checkpoints.save_trained, case, self.model(case.model), str(out), asynchronous)
            self.saved[key] = out, merged(found, case)
        return self.saved[key]

    def train_on(self, case: Case) -> dict[str, Tensor]:
        """The weights after a third step, of one process that continues from what `case` saved."""
        if case.name not in self.further:
            options = {key: value for key, value in case.config.items() if key == "optimizer"}
            one = Case("d1", case.model, config=options)
            saved, _ = self.save(case)
            self.further[case.name] = checkpoints.load_into(one, self.model(case.model), str(saved))[1]
        return self.further[case.name]


def merged(found: list[dict[str, str]], case: Case) -> dict[str, str]:
    """The ranks' digests, which must agree; a tied head of a pipeline must be the embedding, moments included."""
    state: dict[str, str] = {}
    for rank, digests in enumerate(found):
        for name, value in digests.items():
            assert state.setdefault(name, value) == value, f"rank {rank} holds another {name}"
    for name in [name for name in state if case.model == "tied" and name.startswith("output.weight")]:
        assert state.pop(name) == state[name.replace("output", "tok_embeddings")]
    return state


@pytest.fixture(scope="module")
def layouts(ranks: Callable[[int], Pool], tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    return Layouts(ranks, tmp_path_factory.mktemp("layouts"))


def check_round_trip(layouts: Layouts, source: Case, target: Case) -> None:
    saved, state = layouts.save(source)
    found = layouts.run(checkpoints.load_into, target, layouts.model(target.model), str(saved))
    assert merged([digests for digests, _ in found], target) == state
    expected = layouts.train_on(source)
    for _, weights in found:
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            difference = float((tensor - expected[name]).abs().max() / expected[name].abs().max())
            assert difference <= STEPS_FP64, f"{name} after a further step: {difference:.1e}"


@pytest.mark.parametrize(("source", "target"), QUICK, ids=name_of)
def test_round_trip_between_layouts_is_bitwise(layouts: Layouts, source: Case, target: Case) -> None:
    check_round_trip(layouts, source, target)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), FURTHER, ids=name_of)
def test_further_round_trip_is_bitwise(layouts: Layouts, source: Case, target: Case) -> None:
    check_round_trip(layouts, source, target)


def test_there_are_as_many_pairs_as_claimed() -> None:
    assert len({(name_of(a), name_of(b), a.model) for a, b in QUICK + FURTHER}) >= 12


@pytest.mark.parametrize("case", [D2P2, E2], ids=name_of)
def test_checkpoint_holds_every_tensor_once_and_reads_as_one_process_would(layouts: Layouts, case: Case) -> None:
    out, state = layouts.save(case)
    (folder,) = out.glob("step-*")
    step, found = load_state(folder)
    engine = found["engine"]
    tensors = engine["model"] | {
        f"{name}.{key}": value for name, values in engine["optimizer"].items() for key, value in values.items()
    }
    assert step == checkpoints.TRAINED
    assert {name: digest(tensor) for name, tensor in tensors.items()} == state
    index = json.loads((folder / "index.json").read_text())
    regions = [(name, region["file"], *region["start"]) for name, item in index.items() for region in item["boxes"]]
    assert len(regions) == len(set(regions))
    written = sum(file.stat().st_size for file in folder.glob("tensors-*"))
    whole = sum(tensor.nbytes for tensor in tensors.values()) + sum(x["torch"].nbytes for x in engine["rng"].values)
    assert whole <= written <= whole + 200_000  # and headers


@pytest.mark.slow
def test_asynchronous_save_is_that_of_its_moment(layouts: Layouts) -> None:
    saved, state = layouts.save(D2T2, asynchronous=True)
    assert state == layouts.save(D2T2)[1]
    found = layouts.run(checkpoints.load_into, D2, layouts.model("tied"), str(saved))
    assert merged([digests for digests, _ in found], D2) == state


def test_random_generators_go_on_in_the_same_layout_and_from_rank_0_in_another(
    layouts: Layouts, tmp_path: Path
) -> None:
    model = layouts.model("tied")
    drawn = layouts.run(checkpoints.random_numbers, D2, model, str(tmp_path), 5, True)
    assert drawn[0] != drawn[1]
    assert layouts.run(checkpoints.random_numbers, D2, model, str(tmp_path), 6, False) == drawn
    assert layouts.run(checkpoints.random_numbers, T2, model, str(tmp_path), 7, False) == [drawn[0]] * 2


@pytest.mark.parametrize("case", [D2T2, ZBV, E2], ids=name_of)
def test_export_of_any_layout_is_that_of_one_process(layouts: Layouts, case: Case, tmp_path: Path) -> None:
    saved, _ = layouts.save(case)
    model = layouts.model(case.model)
    layouts.run(checkpoints.export, case, model, str(saved), str(tmp_path / "many"))
    checkpoints.export(Case("d1", case.model), model, str(saved), str(tmp_path / "one"))
    for file in sorted((tmp_path / "one").iterdir()):
        assert (tmp_path / "many" / file.name).read_bytes() == file.read_bytes()
    assert len([*(tmp_path / "many").iterdir()]) == len([*(tmp_path / "one").iterdir()])


def test_export_holds_no_more_than_a_shard_on_rank_0_and_a_tensor_elsewhere(layouts: Layouts, tmp_path: Path) -> None:
    shard_bytes = 100_000
    found = layouts.run(checkpoints.exported_bytes, D2T2, layouts.model("tied"), str(tmp_path / "out"), shard_bytes)
    for rank, (peak, largest, whole) in enumerate(found):
        assert whole > 4 * shard_bytes
        assert peak <= 2 * largest + (shard_bytes if rank == 0 else 0)


def test_an_export_that_rank_0_cannot_write_fails_on_every_rank_and_leaves_them_in_step(
    layouts: Layouts, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("in the way")
    found = layouts.run(checkpoints.failed_export, D2, layouts.model("tied"), str(tmp_path / "out"))
    assert found[0].startswith("CheckpointError") and "it is a file" in found[0]
    assert found[1].startswith("CheckpointError: rank 0 failed: CheckpointError:")


def test_a_save_that_one_rank_cannot_write_is_raised_later_on_every_rank(layouts: Layouts, tmp_path: Path) -> None:
    found = layouts.run(checkpoints.failed_save, D2, layouts.model("tied"), str(tmp_path / "out"))
    assert "No space left on device" in found[1] and found[0].startswith("CheckpointError: rank 1 failed")
    assert not [*(tmp_path / "out").glob("step-*")] and not [*(tmp_path / "out").glob(".*")]


@pytest.mark.parametrize("file", ["tensors-00001.safetensors", "index.json"])
def test_damage_to_any_file_is_found_by_every_rank(layouts: Layouts, tmp_path: Path, file: str) -> None:
    model = layouts.model("tied")
    layouts.run(checkpoints.random_numbers, D2, model, str(tmp_path), 5, True)
    (folder,) = tmp_path.glob("step-*")
    data = bytearray((folder / file).read_bytes())
    data[-3] ^= 1
    (folder / file).write_bytes(data)
    with pytest.raises(RankError) as caught:
        layouts.run(checkpoints.random_numbers, D2, model, str(tmp_path), 5, False)
    for rank in range(2):
        assert f"--- rank {rank} ---" in str(caught.value)
    assert f"{file}: it was altered" in str(caught.value)


def test_a_state_of_another_layout_is_no_substitute_for_a_checkpoint() -> None:
    part = Shard(torch.zeros(2, 3), (4, 3), (slice(0, 2), slice(0, 3)))
    with pytest.raises(CheckpointError, match="x is a shard of another layout"):
        select_region(part, (slice(2, 4), slice(0, 3)), "x")
