"""Compare the planner's ranking of layouts with measured steps, on gloo ranks of this machine.

    python -m benchmarks.plan_ranking      # make test-ranking: a small Qwen3 and MoE; records/plan_ranking.jsonl
    python -m benchmarks.plan_ranking dense --rounds 1 --record trial.jsonl

`archon plan --calibrate` calibrates the planner with matmuls, copies, collectives and a plain pass of another model,
not with steps of these layouts. Each round times all layouts of a model once. Kendall's tau counts pairs within a
model. The exit code is 1 if tau is below 0.6 or a layout was not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from archon.checkpoint.hf_reader import read_hf_config
from archon.models import get_model_spec
from archon.parallel.layout import parse_layout
from archon.tools.bench import SweepConfig, run_sweep
from archon.tools.bench.origin import origin
from archon.tools.planner.hardware import Hardware, read_hardware
from archon.tools.planner.search import Planner
from archon.tools.planner.time_model import StepTime
from benchmarks.harness import ROOT, say

RECORD = ROOT / "benchmarks" / "records" / "plan_ranking.jsonl"
AIM = 0.6
RANKS = 4
_DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "intermediate_size": 576,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}


class Ranked(NamedTuple):
    """A model and its ranked layouts; all must compute the loss of the first."""

    config: Mapping[str, Any]
    layouts: Sequence[str]


RANKED = {
    "dense": Ranked(
        _DENSE,
        ("d1", "d2", "t2", "c2", "p2", "d4", "t4", "c4", "p4", "d2t2", "d2c2", "d2p2", "c2t2", "p2t2", "p2c2"),
    ),
    "moe": Ranked(
        _DENSE | _EXPERTS,
        ("d1", "d2", "d2e2", "t2", "t2e2", "c2", "p2", "d4", "d4e2", "d4e4", "d2t2", "d2t2e4", "d2p2", "d2p2e2"),
    ),
}


class Sizes(NamedTuple):
    """Step sizes: tokens over all ranks, per document, per micro-batch at most; timed steps per point and round."""

    tokens: int = 2048
    seq: int = 128
    micro_batch: int = 256
    steps: int = 5


def kendall_tau(*groups: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau a (Kendall 1938) over pairs within a group; NaN without pairs."""
    score = count = 0
    for group in groups:
        for (a, b), (c, d) in combinations(group, 2):
            product = (a - c) * (b - d)
            score += (product > 0) - (product < 0)
            count += 1
    return score / count if count else math.nan


def calibrated(ranks: int, folder: Path) -> Hardware:
    """Return the measurements of `archon plan --calibrate` on this many ranks with one thread each."""
    file = folder / "here.yaml"
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "archon", "plan"]
    subprocess.run(
        [sys.executable, "-m", *launch, "--calibrate", str(file), "--dtype", "float32"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return read_hardware(str(file))


def sweep_config(ranked: Ranked, sizes: Sizes, folder: Path) -> SweepConfig:
    """Return the sweep of a model's layouts, one step each; writes the model's configuration to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(ranked.config)))
    return SweepConfig(
        model=str(folder),
        layouts=list(ranked.layouts),
        tokens=sizes.tokens,
        seq=[sizes.seq],
        micro_batch=[sizes.micro_batch],
        steps=sizes.steps,
        threads=1,
        device="cpu",
    )


def predicted(ranked: Ranked, sizes: Sizes, hardware: Hardware, folder: Path) -> dict[str, StepTime]:
    """Return the predicted seconds of a step by layout."""
    sweep = sweep_config(ranked, sizes, folder)
    spec = get_model_spec(str(ranked.config["model_type"]))
    planner = Planner(spec, spec.model_args_class.from_hf_config(read_hf_config(folder)), hardware)
    return {
        layout: planner.seconds(sweep.engine_config(point), sizes.seq, sizes.tokens // sizes.seq)
        for layout, point in zip(ranked.layouts, sweep.points(), strict=True)
    }


def rank_layouts(ranked: Ranked, hardware: Hardware, sizes: Sizes, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return each layout with its measured and predicted seconds; a failed one has a `reason` and no `measured_s`."""
    sweep = sweep_config(ranked, sizes, folder)
    times: dict[str, list[float]] = {layout: [] for layout in ranked.layouts}
    reasons: dict[str, str] = {}
    for _ in range(rounds):
        made = run_sweep(sweep, on_row=lambda row: say(f"{row.point.name}: {row.status} {row.reason}"))
        for layout, row in zip(ranked.layouts, made.rows, strict=True):
            if row.measured is None:
                reasons[layout] = f"{row.status}: {row.reason}"
            else:
                times[layout].append(row.measured.step_s.median)
    rows = []
    for layout, seconds in predicted(ranked, sizes, hardware, folder).items():
        row: dict[str, Any] = {"layout": layout, "ranks": parse_layout(layout).world_size, "predicted_s": seconds.total}
        row["parts_s"] = {name: part for name, part in asdict(seconds).items() if part}
        if layout in reasons:
            rows.append(row | {"reason": reasons[layout]})
        else:
            rows.append(row | {"measured_s": statistics.median(times[layout]), "rounds_s": times[layout]})
    return rows


def pairs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Measured and predicted seconds of the layouts that were measured."""
    return [(row["measured_s"], row["predicted_s"]) for row in rows if "measured_s" in row]


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the layouts of a model, fastest first."""
    lines = [f"{name}: Kendall's tau {kendall_tau(pairs(rows)):.2f} over {len(pairs(rows))} layouts"]
    lines.append(f"  {'layout':10} {'measured':>10} {'predicted':>10}   most of it")
    for row in sorted(rows, key=lambda row: row.get("measured_s", float("inf"))):
        if "measured_s" not in row:
            lines.append(f"  {row['layout']:10} {row['reason']}")
            continue
        parts = sorted(row["parts_s"].items(), key=lambda part: -part[1])[:3]
        most = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in parts)
        measured, predicted = (f"{1e3 * row[key]:.0f} ms" for key in ("measured_s", "predicted_s"))
        lines.append(f"  {row['layout']:10} {measured:>10} {predicted:>10}   {most}")
    return lines


def record_lines(head: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the calibration and the taus, then one line per layout."""
    taus = {name: kendall_tau(pairs(rows)) for name, rows in found.items()}
    first = dict(head) | {"machine": head["machine"].model_dump()}
    first |= {"tau": kendall_tau(*map(pairs, found.values())), "tau_of_models": taus}
    return [first, *({"model": name, **row} for name, rows in found.items() for row in rows)]


def main() -> int:
    """Calibrate, measure, predict, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(RANKED), help=f"default: {' '.join(RANKED)}")
    parser.add_argument("--rounds", type=int, default=2, help="sweeps over a model's layouts (default 2)")
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines, overwritten")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in RANKED]:
        parser.error(f"no such model here: {', '.join(unknown)}; expected some of {', '.join(RANKED)}")
    with tempfile.TemporaryDirectory() as folder:
        hardware = calibrated(RANKS, Path(folder))
        say(hardware.to_yaml())
        found = {
            name: rank_layouts(RANKED[name], hardware, Sizes(), options.rounds, Path(folder, name))
            for name in options.models
        }
    for name, rows in found.items():
        say("\n".join(table(name, rows)))
    tau = kendall_tau(*map(pairs, found.values()))
    say(f"Kendall's tau {tau:.2f} in all, within models; at least {AIM} is wanted")
    head = origin(shlex.join(["python", "-m", "benchmarks.plan_ranking", *sys.argv[1:]]))
    head |= {"hardware": hardware.model_dump(), "sizes": Sizes()._asdict(), "rounds": options.rounds, "aim": AIM}
    options.record.write_text("".join(json.dumps(line) + "\n" for line in record_lines(head, found)))
    return int(not tau >= AIM or any("reason" in row for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
