"""A rank that differs from rank 0 ends every rank before anything expensive; one line names the first difference."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

import archon
from archon.engine.agreement import CHUNK_BYTES, SAMPLED_BYTES, Facts, file_digests, find_source, require_agreement
from archon.engine.engine import ArchonEngine
from archon.parallel.control_plane import ControlPlane
from archon.rl import SFTTrainer
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.tools.check.rank_pool import Pool
from archon.training.config import SFTConfig
from tests.distributed.differing_ranks import SAVED, sft_values, start_engines, start_rl_runs, start_runs, write_modules
from tests.distributed.runs import make_inputs
from tests.distributed.test_failing import torchrun

pytestmark = pytest.mark.xdist_group("ranks")

CONFIGURATION = "start every rank with the same configuration"
OPTIONS = "start every rank with the same environment and options of torch"
FILES = "every machine needs the same files"
CODE = "every machine needs the same code"
LORA = {"rank": 2, "targets": ["q_proj"], "init": "random"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a machine has: a checkpoint, a LoRA of it, data, and modules of the user."""
    folder = tmp_path_factory.mktemp("machine")
    make_inputs(folder)
    model = {"path": str(folder / "blank"), "device": "cpu", "optimizer": None}
    blank = ArchonEngine(EngineConfig.parse(model | {"init_from_scratch": True}))
    blank.initialize()
    blank.save(folder / "checkpoint")
    adapted = ArchonEngine(EngineConfig.parse(model | {"path": str(folder / "checkpoint"), "lora": LORA}))
    adapted.initialize()
    adapted.save(folder / "adapter", format="peft")
    write_modules(folder)
    with chdir(folder):
        SFTTrainer(SFTConfig.parse(sft_values("saved", layout="d1"))).train()
    return folder


DIGEST = r"[\d,]+ bytes \(digest \w+\)"
RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": ({}, rf"rank 1 has model.optimizer.lr=0.002, rank 0 has 0.001; {CONFIGURATION}"),
    "seed": ({}, rf"rank 1 has seed=7, rank 0 has 0; {CONFIGURATION}"),
    "section": ({}, rf'rank 1 has model.optimizer=null, rank 0 has \{{"kind": "adamw", .*; {CONFIGURATION}'),
    "run_dir": ({}, "trained"),
    "package": ({}, r"rank 1 has numpy=9.9.9, rank 0 has [\d.]+; install the same packages on every machine"),
    "environment": ({}, f"rank 1 has NVIDIA_TF32_OVERRIDE=0, rank 0 has unset; {OPTIONS}"),
    "precision": ({}, rf"rank 1 has torch.get_float32_matmul_precision\(\)=high, rank 0 has highest; {OPTIONS}"),
    "weight": ({}, rf"rank 1 has checkpoint/model.safetensors={DIGEST}, rank 0 has {DIGEST}; {FILES}"),
    "tokenizer": ({}, rf"rank 1 has checkpoint/tokenizer.json={DIGEST}, rank 0 has {DIGEST}; {FILES}"),
    "missing file": ({}, rf"rank 1 has checkpoint/generation_config.json=nothing, rank 0 has {DIGEST}; {FILES}"),
    "data": ({}, rf"rank 1 has train.jsonl={DIGEST}, rank 0 has {DIGEST}; {FILES}"),
    "rows of a function": (
        {"train_data": {"path": "python:rows_of_rank.rows"}},
        rf"rank 1 has rows_of_rank.rows \(rows_of_rank.py\)={DIGEST}, rank 0 has {DIGEST}; {CODE}",
    ),
    "rows from data": (
        {"train_data": {"path": "python:rows_of_rank.from_data"}},
        rf"python:rows_of_rank.from_data: rank 1 has 19 rows \(\w+\), rank 0 has 20 rows \(\w+\); {FILES}",
    ),
    "saved state": (
        {"run_dir": "saved", "resume": True, "total_steps": 2},
        rf"rank 1 has {SAVED}/tensors.safetensors={DIGEST}, rank 0 has {DIGEST}; {FILES}",
    ),
    "adapter": (
        {"model": {"path": "checkpoint", "device": "cpu", "layout": "d2", "lora": {"path": "adapter"}}},
        rf"rank 1 has adapter/adapter_model.safetensors={DIGEST}, rank 0 has {DIGEST}; {FILES}",
    ),
}


@pytest.mark.slow
def test_a_run_is_refused_on_every_rank(ranks: Callable[[int], Pool], folder: Path, tmp_path: Path) -> None:
    starts = [(change, fields) for change, (fields, _) in RUNS.items()]
    for reports in ranks(2).run(start_runs, str(folder), str(tmp_path), starts, timeout=120.0):
        for report, (change, (_, expected)) in zip(reports, RUNS.items(), strict=True):
            assert re.fullmatch(expected, report), f"{change}: {report}"
    trained = {run.name for run in tmp_path.glob("run-*") if (run / "metrics.jsonl").stat().st_size}
    assert trained == {"run-run_dir"}, "no other run has begun, and rank 0's folder is the run's"
    assert not list(tmp_path.glob("*/elsewhere"))


def test_code_that_the_configuration_names_is_compared(
    ranks: Callable[[int], Pool], folder: Path, tmp_path: Path
) -> None:
    source = rf"={DIGEST}, rank 0 has {DIGEST}; {CODE}"
    for reports in ranks(2).run(start_rl_runs, str(folder), str(tmp_path), ["reward", "helper of the reward"]):
        for report, file in zip(reports, ("score", "helper"), strict=True):
            assert re.fullmatch(rf"rank 1 has rewards_of_rank.score.one \({file}.py\){source}", report)


def test_an_engine_of_a_script_is_refused_on_every_rank(
    ranks: Callable[[int], Pool], folder: Path, tmp_path: Path
) -> None:
    starts = [("learning rate", 10), ("run_dir", 11), ("package", 10), ("weight", 10), ("run_dir", 10)]
    expected = [
        rf"rank 1 has optimizer.lr=0.002, rank 0 has 0.001; {CONFIGURATION}",
        rf"rank 1 has total_steps=11, rank 0 has 10; {CONFIGURATION}",
        RUNS["package"][1],
        RUNS["weight"][1],
        "initialized",
    ]
    for reports in ranks(2).run(start_engines, str(folder), str(tmp_path), starts):
        for report, pattern in zip(reports, expected, strict=True):
            assert re.fullmatch(pattern, report), report


def first_difference(values: list[Any]) -> str:
    """Return what this rank is told when rank r has `values[r]`."""
    world = ControlPlane.world()
    try:
        require_agreement(world, [Facts("fix it", {"same": 1}), Facts("fix it", values[world.rank])])
    except ConfigError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([{"a": 1, "b": [1.5, None]}] * 2, "equal"),
        ([{"a": 1}, {"a": 1.0}], "rank 1 has a=1.0, rank 0 has 1; fix it"),
        ([{"a": 1}, {"a": True}], "rank 1 has a=true, rank 0 has 1; fix it"),
        ([{"a": "x"}, {"a": ""}], 'rank 1 has a="", rank 0 has x; fix it'),
        ([{"a": {}}, {"a": {"b": 1}}], "rank 1 has a.b=1, rank 0 has nothing; fix it"),
        ([{"a": {"b": 1, "c": 1}}, {"a": {"c": 2, "b": 2}}], "rank 1 has a.b=2, rank 0 has 1; fix it"),
        ([{"a": "x"}, {"a": "\ud800\n"}], 'rank 1 has a="\\ud800\\n", rank 0 has x; fix it'),
        ([{"a": "x"}, {"a": "y" * 300}], f"rank 1 has a={'y' * 200}…, rank 0 has x; fix it"),
    ],
)
def test_the_first_difference_is_named(ranks: Callable[[int], Pool], values: list[Any], expected: str) -> None:
    assert ranks(2).run(first_difference, values) == [expected] * 2


def test_the_lowest_rank_that_differs_is_named(ranks: Callable[[int], Pool]) -> None:
    values = [{"seed": 0}, {"seed": 0}, {"seed": 3}, {"seed": 1}]
    assert ranks(4).run(first_difference, values) == ["rank 2 has seed=3, rank 0 has 0; fix it"] * 4


def test_a_digest_reads_small_files_whole_and_both_ends_of_large_ones(tmp_path: Path) -> None:
    size = SAMPLED_BYTES + 10 * CHUNK_BYTES
    large, small = tmp_path / "model.safetensors", tmp_path / "config.json"
    with large.open("wb") as file:
        file.truncate(size)
    small.write_bytes(b"x" * (3 * CHUNK_BYTES))
    before = file_digests(str(tmp_path))
    for file, position in ((small, CHUNK_BYTES), (large, 0), (large, size - 1)):
        with file.open("r+b") as opened:
            opened.seek(position)
            opened.write(b"\1")
        after = file_digests(str(tmp_path))
        assert [name for name in before if before[name] != after[name]] == [str(file)], position
        before = after
    started = time.process_time()
    file_digests(str(tmp_path) + "/.")
    assert time.process_time() - started < 0.3


def test_the_source_of_a_dotted_path_is_found_without_importing_it(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "never_imported"
    package.mkdir()
    for name in ("__init__", "module"):
        (package / f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_source("never_imported.module.Class.method") == package / "module.py"
    assert find_source("never_imported.missing") == package / "__init__.py"
    assert find_source("no_such_package.module") is None


@pytest.mark.slow
def test_another_archon_on_one_rank_is_one_line(folder: Path, tmp_path: Path) -> None:
    """Through torchrun and the command; nothing is created."""
    copy = tmp_path / "site" / "archon"
    shutil.copytree(Path(archon.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "rl" / "summary.py").open("a") as file:
        file.write("# another commit\n")
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys\n"
        f"if os.environ['RANK'] == '1':\n    sys.path.insert(0, {str(copy.parent)!r})\n"
        "from archon.cli import main\nmain()\n"
    )
    run_dir = tmp_path / "run"
    fields = [f"run_dir={run_dir}", f"model.path={folder / 'checkpoint'}", f"train_data.path={folder / 'train.jsonl'}"]
    code, output, _ = torchrun(str(script), "sft", *fields, "model.layout=d2", "model.device=cpu", module=False)
    assert code == 1
    assert re.search(r"^archon: rank 1 has archon's code=digest \w+, rank 0 has digest \w+; install", output, re.M)
    assert output.count("install the same packages on every machine") == 1
    assert "exitcode  : 2" in output
    assert not run_dir.exists()
