"""Tables from records with one run per line: learning, layouts, endurance and faults."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lora_learning.record import newest

RECORDS = Path(__file__).resolve().parent / "records"

Line = dict[str, Any]
Table = tuple[str, str, Sequence[str], list[list[str]]]
"""Title, command, column names, rows."""


def run_tables(folder: Path = RECORDS) -> Iterator[Table]:
    """Yield the tables that have records."""
    for name, (title, how, head, rows) in _TABLES.items():
        path = folder / f"{name}.jsonl"
        if path.exists():
            yield title, how, head, rows([json.loads(line) for line in path.read_text().splitlines()])


def _mark(line: Line) -> str:
    return "✓" if line["reached"] else "✗ missed"


def _learning(lines: Sequence[Line]) -> list[list[str]]:
    controls = {line["task"]: line for line in lines if line["control"]}
    return [
        [
            line["task"],
            *(f"{line[key]:.3f}" if key in line else "-" for key in ("before", "after")),
            f"{line['seconds']:.0f} s",
            _mark(line),
            *_control(controls.get(line["task"])),
        ]
        for line in lines
        if not line["control"]
    ]


def _control(line: Line | None) -> list[str]:
    if line is None or "after" not in line:
        return ["-", "-", "-"]
    return [f"{line['after']:.3f}", f"{line['lowest']:.3f} to {line['highest']:.3f}", _mark(line)]


def _lora_learning(lines: Sequence[Line]) -> list[list[str]]:
    return [
        [
            name,
            *(f"{line[key]:.3f}" for key in ("before", "after")),
            f"{line['steps']:,}",
            f"{line['seconds'] / 60:.0f} min",
            f"{line['push_bytes'] / 2**20:.0f} MiB" if "push_bytes" in line else "-",
            f"{line['push_seconds']:.2f} s" if "push_seconds" in line else "-",
            *_in_transformers(line.get("exported")),
        ]
        for name, line in newest(lines).items()
        if line.get("curve")
    ]


def _in_transformers(exported: Line | None) -> list[str]:
    """Return the rewards of an export in archon and in transformers: greedy, then sampled."""
    if exported is None:
        return ["-", "-"]
    greedy, sampled = (
        " / ".join(f"{exported[kind][where]:.3f}" for where in ("archon", "transformers"))
        for kind in ("greedy", "sampled")
    )
    return [f"{greedy}, {exported['differing']} of {exported['prompts']} differ", sampled]


def _layouts(lines: Sequence[Line]) -> list[list[str]]:
    return [
        [line["layout"], *(f"{line.get(f'reward_{when}', 0):.3f}" for when in ("before", "after")), _mark(line)]
        for line in lines
    ]


def _async_layouts(lines: Sequence[Line]) -> list[list[str]]:
    return [
        [
            line["case"],
            *(f"{line.get(f'reward_{when}', 0):.3f}" for when in ("before", "after")),
            f"{line.get('staleness_max', 0):.0f}",
            f"{line.get('overlap', 0):.0%}",
            "✓" if line.get("each_once") else "✗",
            "✓" if line["as_expected"] else "✗ missed",
        ]
        for line in lines
    ]


def _soak(lines: Sequence[Line]) -> list[list[str]]:
    return [
        [
            f"{line['seconds'] / 60:.0f} min",
            f"{line['steps']:,}",
            *_held(line),
            "✓" if line["passed"] else "✗ missed",
        ]
        for line in lines
    ]


def _faults(lines: Sequence[Line]) -> list[list[str]]:
    events, outcomes = ([line for line in lines if ("outcome" in line) == ended] for ended in (False, True))
    rows = []
    for kind in dict.fromkeys(event["kind"] for event in events):
        own = [event for event in events if event["kind"] == kind]
        seconds = [event["seconds"] for event in own]
        again = sum(event["run_started_again"] for event in own)
        slowest = max(own, key=lambda event: event["seconds"] / event["limit"])
        most = f"{slowest['seconds']:.0f} of {slowest['limit']:.0f} s"
        rows.append([kind, str(len(own)), f"{statistics.median(seconds):.0f} s", most, str(again), *[""] * 7])
    return [*rows, *map(_faults_outcome, outcomes)]


def _faults_outcome(line: Line) -> list[str]:
    left_out = [f"{kind} was not run: {why}" for kind, why in line["left_out"].items()]
    name = "; ".join([f"**{line['run']}**", *left_out])
    counts = [f"{line[key]:,}" for key in ("prompts", "prompts_missing", "prompts_twice", "episodes_lost", "tokens")]
    difference = f"{line['largest_token_difference']:.0e}"
    mark = "✓" if line["passed"] else "✗ missed"
    time = f"{line['seconds'] / 60:.0f} min"
    return [name, str(line["events"]), "", time, str(line["starts"] - 1), *counts, difference, mark]


def _serve_load(lines: Sequence[Line]) -> list[list[str]]:
    *_, outcome = lines
    return [
        [
            f"{outcome['seconds'] / 60:.1f} min",
            *(f"{outcome[name]:,}" for name in ("answers", "errors", "lost")),
            f"{outcome['ratio']:.2f}×",
            *_held(outcome),
            "✓" if outcome["passed"] else "✗ missed",
        ]
    ]


def _training_service(lines: Sequence[Line]) -> list[list[str]]:
    return [
        [
            f"{line['clients']} clients, {line['case']}",
            *(f"{line[f'{name}_steps_per_second']:.1f}" for name in ("together", "alone")),
            f"{line['ratio']:.2f}×",
            f"{line['weights_difference']:.0e}",
            "✓" if line["passed"] else "✗ missed",
        ]
        for line in lines
        if "passed" in line
    ]


def _training_soak(lines: Sequence[Line]) -> list[list[str]]:
    return [
        [
            f"{line['seconds'] / 60:.0f} min, {line.get('client_kills', line.get('server_kills'))} kills of "
            + ("clients" if line["part"] == "clients" else "the server"),
            *(f"{line[name]:,}" for name in ("steps", "saved", "failed", "unanswered", "missing_states")),
            f"{line['weights_difference']:.0e} of {line['checked_loras']}",
            *(_held(line) if "flat" in line else [""] * len(_HELD)),
            "✓" if line["passed"] else "✗ missed",
        ]
        for line in lines
    ]


def _ranking(lines: Sequence[Line]) -> list[list[str]]:
    head, *rows = lines
    return [
        [
            name,
            " ".join(
                row["layout"]
                for row in sorted(rows, key=lambda row: row.get("measured_s", math.inf))
                if row["model"] == name
            ),
            f"{tau:.2f}",
            f"≥ {head['aim']} {'✓' if tau >= head['aim'] else '✗ missed'}",
        ]
        for name, tau in head["tau_of_models"].items()
    ]


def _held(line: Line) -> list[str]:
    return [f"{line['after_warm_up'][name]:.0f} → {line['at_the_end'][name]:.0f}" for name in _HELD]


_HEADS = ("MiB", "files", "sockets", "threads", "processes")
_HELD = ("mib", "files", "sockets", "threads", "processes")
_TABLES = {
    "learning": (
        "Learning tests",
        "make test-learning",
        ("task", "held-out before", "after", "time", "", "control after", "control range", ""),
        _learning,
    ),
    "lora_learning": (
        "LoRA and full fine-tuning of a pretrained model",
        "python -m benchmarks.lora_learning",
        (
            *("SmolLM2-135M-Instruct", "held-out before", "after", "steps", "time", "push size", "push time"),
            *("export reward, archon / transformers, greedy", "sampled"),
        ),
        _lora_learning,
    ),
    "rl_layouts": (
        "RL in each layout",
        "make test-rl-layouts",
        ("layout", "held-out before", "after", "reaches the demo's reward"),
        _layouts,
    ),
    "async_layouts": (
        "Asynchronous rollouts in each layout",
        "python -m benchmarks.async_layouts --record benchmarks/records/async_layouts.jsonl",
        ("layout:staleness", "held-out before", "after", "maximum staleness", "overlap", "each prompt once", ""),
        _async_layouts,
    ),
    "soak_servers": (
        "Endurance with servers",
        "python -m benchmarks.soak --record benchmarks/records/soak_servers.jsonl --servers 2",
        ("256 concurrent episodes on two servers", "steps", *_HEADS, ""),
        _soak,
    ),
    "soak": (
        "Endurance",
        "make test-soak",
        ("asynchronous RL of an agent", "steps", *_HEADS, ""),
        _soak,
    ),
    "faults": (
        "Injected faults",
        "make test-faults",
        (
            *(
                "two servers, two ranks",
                "count",
                "median recovery",
                "slowest recovery",
                "run resumed",
                "prompts",
                "missing",
            ),
            *("twice", "lost", "tokens", "largest Δ logprob", ""),
        ),
        _faults,
    ),
    "serve_load": (
        "A server under load",
        "make test-serve-load",
        ("64 agents", "answers", "errors", "lost", "speed / bare generator", *_HEADS, ""),
        _serve_load,
    ),
    "training_service": (
        "Clients of the training service",
        "make test-training-service",
        ("26M, one server thread", "steps/s together", "steps/s one by one", "ratio", "largest Δ weight", ""),
        _training_service,
    ),
    "training_soak": (
        "Kills of the training service and of its clients",
        "make test-training-service",
        (
            *("8 clients", "steps", "saved states", "failed requests", "without an answer", "lost states"),
            *("largest Δ weight", *_HEADS, ""),
        ),
        _training_soak,
    ),
    "plan_ranking": (
        "Planner ranking of layouts",
        "make test-ranking",
        ("four gloo ranks", "layouts, fastest first", "Kendall's tau", "aim"),
        _ranking,
    ),
}
