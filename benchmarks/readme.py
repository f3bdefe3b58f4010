"""Write benchmarks/README.md from the records, and their headlines into the top-level README.md.

python -m benchmarks.readme            # write both
python -m benchmarks.readme --check    # exit code 1 if a file differs from the records
python -m benchmarks.readme --print    # the summary alone
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from archon.tools.bench import read_record
from archon.tools.bench.origin import Spread
from archon.tools.bench.table import table as sweep_table
from benchmarks.figures import figures
from benchmarks.gpu_predictions import read_predictions
from benchmarks.record import FOLDER, Ratio, Record, read_records
from benchmarks.runs import run_tables

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

TITLES = {
    "gpu": "One GPU",
    "train_step": "A training step",
    "lora": "LoRA training",
    "head_memory": "The language-model head",
    "generate": "Generation",
    "load": "Loading a checkpoint",
    "time_to_reward": "Time to reward",
    "speed": "Single optimizations",
    "trees": "Shared prefixes",
    "busy": "On a busy machine",
}
# Many small cases of one kind: a line each.
COMPACT = {"speed"}
# The rows of the top-level README.md: benchmark, case, ratio, and the sentence's subject.
HEADLINES = (
    (
        "train_step",
        "ragged",
        "archon / transformers (padded)",
        "training on rows of different lengths, to transformers with padded rows",
    ),
    ("train_step", "even", "archon / torchtitan", "training on rows of one length, to torchtitan"),
    ("train_step", "even", "archon / megatron-core", "the same, to megatron-core"),
    ("lora", "ragged", "archon / peft (padded)", "LoRA training, to PEFT with padded rows"),
    ("generate", "ragged", "archon / transformers generate (static cache)", "generation, to transformers"),
    ("generate", "ragged", "archon / vLLM (CPU build)", "generation, to vLLM"),
    ("time_to_reward", "arithmetic", "TRL / archon, time to TRL's best reward", "RL, time to the best reward of TRL"),
    ("trees", "samples", "archon / no prefix sharing", "RL step with 8 answers per prompt, to no shared prefixes"),
)
TITLE = "# Benchmarks"
INTRODUCTION = f"""
`python -m benchmarks.readme` writes this page from `records/`; a test fails if they differ.

Every comparison is a ratio measured in one run on one machine. The two sides run in separate processes. Before timing,
a check compares their results: loss and gradient norm, greedy tokens, weights or prompts. After a warm-up the sides run
alternately. Figures are medians, with minimum and maximum in brackets. A ratio divides two medians; its brackets hold
the smallest and the largest ratio of a single round. An aim is the project's own target. If a training step misses its
aim, profiles of both sides show where the time goes. A peer that is not installed or fails is listed with the reason.

Compare ratios, not absolute CPU times, between machines. Ratios of float32 training also depend on the processor:
archon multiplies matrices with oneDNN and its peers use MKL. oneDNN is 1.6 times as fast as MKL on the AMD EPYC of most
records, which do not name the model, and hardly faster on family 25, model 17, which the growth figure was measured on.

```
pip install -e '.[bench]'
pip install --no-deps torchtitan==0.3.0    # its pins are older than transformers 5 needs
python -m benchmarks                       # everything (about two hours on 2 cores), or one of:
{chr(10).join(f"python -m benchmarks.{name}" for name in TITLES if name != "gpu")}
python -m benchmarks.gpu --out gpu-records # on one GPU, within 9 minutes; the same command continues later
python -m benchmarks.growth                # cost of a step over tokens, context, vocabulary, experts and ranks
python -m benchmarks.peers                 # the even training step next to every peer
```

## One GPU

`python -m benchmarks.gpu --out gpu-records` tests and measures archon on one NVIDIA GPU: correctness, training,
generation, LoRA, FP8, RL and profiles, next to aims and predictions. A call takes at most 9 minutes (`--minutes`), and
the same command continues where it stopped. It needs PyTorch's CUDA build, but no network and no checkpoint, because
weights are random. On a machine without a network, carry the packages:

```
python -m benchmarks.gpu --wheels > wheels.txt && pip download -r wheels.txt -d wheels   # with a network
pip install --no-index --find-links wheels -r wheels.txt                                 # on the GPU machine
python -m benchmarks.gpu --out gpu-records
python -m benchmarks.gpu --out gpu-records --summary                                     # print the figures again
```

`--stage NAME` runs one stage; `--miniature` runs every stage with tiny models on a CPU.
"""


def number(value: float) -> str:
    """Three significant digits, thousands with a comma."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def spread(value: Spread) -> str:
    return f"{number(value.median)} [{number(value.min)}–{number(value.max)}] {value.unit}"


def ratio(value: Ratio) -> str:
    return f"{number(value.value)}× [{number(value.min)}–{number(value.max)}]"


def aim(value: Ratio) -> str:
    if value.aim is None:
        return ""
    sign = value.aim.replace(">=", "≥").replace("<=", "≤")
    return f"{sign} {'✓' if value.aim_met else '✗ missed'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def memory(value: Spread) -> str:
    """Return the memory of a side, by kind, in gigabytes."""
    names = {"rss_peak": "RSS", "rss_above_start": "grew by", "allocated": "allocated", "reserved": "reserved"}
    return ", ".join(f"{names.get(kind, kind)} {size / 1e9:.2f} GB" for kind, size in value.memory_bytes.items())


def profile_table(record: Record) -> str:
    """Seconds by kind of operator, the longest of archon's first."""
    sides = record.profiles
    kinds = dict.fromkeys(kind for side in sides.values() for kind in sorted(side, key=lambda kind: -side[kind]))
    rows = [[kind, *(f"{number(side.get(kind, 0.0))} s" for side in sides.values())] for kind in kinds]
    total = ["total", *(f"{number(sum(side.values()))} s" for side in sides.values())]
    return table(["time of one step", *sides], [*rows, total])


def section(record: Record) -> str:
    """Return one record in full."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    gpus = "".join(f", {gpu}" for gpu in record.machine.gpus)
    how = f"{record.threads} threads, {record.layout}"
    where = f"{record.machine.cpu}, {record.machine.cores} cores, {record.machine.memory_bytes / 2**30:.0f} GiB{gpus}"
    parts = [
        f"### {record.benchmark}: {record.case}",
        f"`{record.command}` at {record.commit}, {record.date[:10]}; {where}; {how}; {versions}.",
        table(
            ["side", "figure", "memory"], ([name, spread(side), memory(side)] for name, side in record.sides.items())
        ),
    ]
    if record.ratios:
        rows = ([name, ratio(value), aim(value)] for name, value in record.ratios.items())
        parts.append(table(["ratio", "measured", "aim"], rows))
    if record.checks:
        worst: dict[str, tuple[float, float]] = {}
        for check in record.checks:
            worst[check.what] = max(worst.get(check.what, (0.0, 0.0)), (check.difference, check.tolerance))
        said = (f"{what} equal" if not limit else f"{what} within {seen:.0e}" for what, (seen, limit) in worst.items())
        parts.append(f"Checked before timing: {'; '.join(said)}.")
    if record.profiles:
        parts += ["One step under the profiler:", profile_table(record)]
    parts += [f"Missing: {peer} ({reason})." for peer, reason in record.missing.items()]
    parts += [f"{note[0].upper()}{note[1:]}." for note in record.notes]
    return "\n\n".join(parts)


def lines(records: Sequence[Record]) -> str:
    """Record in short."""
    rows = [
        [
            record.case,
            name,
            ratio(value),
            *map(spread, record.sides.values()),
            f"{record.commit}, {record.threads} threads",
        ]
        for record in records
        for name, value in record.ratios.items()
    ]
    said = [f"{record.case}: {note}." for record in records for note in record.notes]
    return "\n\n".join([table(["case", "ratio", "measured", "archon", "baseline", "commit"], rows), *said])


def gpu_summary(records: Sequence[Record]) -> str:
    """Return the aims on one GPU: earlier figures, predictions, and measurements where there are some."""
    by_case = {record.case: record for record in records if record.benchmark == "gpu"}
    lines = [json.loads(line) for line in (FOLDER / "gpu_baseline.jsonl").read_text(encoding="utf-8").splitlines()]
    earlier = {(line["case"], line["side"]): line for line in lines}
    rows = []
    for prediction in read_predictions():
        unit, line = prediction.unit, earlier[prediction.case, prediction.side]
        note = f" ({line['note']})" if "note" in line else ""
        peers = [other for other in lines if other["case"] == line["case"] and other is not line]
        note += "".join(f"; {peer['side']} {number(peer['value'])}" for peer in peers)
        measured, figure = "not yet", prediction.measured(by_case)
        if figure is not None:
            met = "✓" if figure >= prediction.aim else "✗ missed"
            measured = f"{number(figure)} {unit} {met} ({by_case[prediction.case].commit})"
        before, predicted, aimed = (f"{number(x)} {unit}" for x in (line["value"], prediction.value, prediction.aim))
        rows.append([prediction.name, prediction.setup, before + note, predicted, aimed, measured])
    origin = lines[0]
    head = ["one GPU", "setup", f"at {origin['commit']}", "predicted", "aim", "measured"]
    text = (
        f"Figures at the earlier commit {origin['commit']} were measured on one {origin['gpu']}\n"
        f"({origin['date']}, torch {origin['torch']}) by scripts outside this repository. Predictions are\n"
        "calculated from kernel counts, bytes and kernel rates of that GPU (`python -m benchmarks.gpu_predictions`).\n"
        "`python -m benchmarks.gpu` fills the last column."
    )
    return f"{table(head, rows)}\n\n{text}"


def summary(records: Sequence[Record]) -> str:
    """Return the aims on one GPU, and one line for each ratio that has an aim."""
    rows = [
        [TITLES.get(record.benchmark, record.benchmark), record.case, name, ratio(value), aim(value)]
        for record in records
        for name, value in record.ratios.items()
        if value.aim is not None
    ]
    if not rows:
        return "No records yet."
    return f"{gpu_summary(records)}\n\n{table(['', 'case', 'ratio', 'measured', 'aim'], rows)}"


def readme(records: Sequence[Record]) -> str:
    """Return the whole of benchmarks/README.md."""
    seen = [f"![{figure.what}]({figure.path.parent.name}/{figure.path.name})" for figure in figures(records)]
    parts = [TITLE, *seen, INTRODUCTION.strip(), "## Summary", summary(records)]
    for name, title in TITLES.items():
        of_this = [record for record in records if record.benchmark == name]
        if of_this:
            parts += [f"## {title}", *([lines(of_this)] if name in COMPACT else map(section, of_this))]
    for path in sorted((FOLDER / "layouts").glob("*.json")):
        sweep = read_record(path)
        parts += ["## Layouts", f"`{sweep.command}` at {sweep.commit}.", "\n".join(["```", *sweep_table(sweep), "```"])]
    for title, how, head, rows in run_tables():
        parts += [f"## {title}", f"`{how}`", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def headlines(records: Sequence[Record]) -> str:
    """Return the table of the top-level README.md: speed ratios of the `HEADLINES` that have records."""
    by_case = {(record.benchmark, record.case): record for record in records}
    rows = []
    for benchmark, case, name, subject in HEADLINES:
        if (benchmark, case) in by_case:
            link = f"[{subject}](benchmarks/README.md#{benchmark}-{case})"
            rows.append([link, ratio(by_case[benchmark, case].ratios[name])])
    return table(["archon compared", "times as fast"], rows)


def with_headlines(text: str, records: Sequence[Record]) -> str:
    """Return `text` with the headlines between the markers.

    Raises:
        ValueError: the markers are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no place for the headlines: expected {BEGIN} and {END}")
    return f"{before}{begin}\n{headlines(records)}\n{end}{after}"


def wanted(records: Sequence[Record]) -> dict[Path, str]:
    """Return the expected text of each file."""
    files = {HERE / "README.md": readme(records)}
    top = HERE.parent / "README.md"
    if top.exists():
        files[top] = with_headlines(top.read_text(encoding="utf-8"), records)
    return files


def main() -> int:
    """Write, check or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a file is out of date")
    parser.add_argument("--print", action="store_true", help="print the summary table")
    arguments = parser.parse_args()
    records = read_records()
    if arguments.print:
        print(summary(records))
        return 0
    stale = []
    for path, text in wanted(records).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    for figure in figures(records):
        if not figure.is_current:
            stale.append(figure.path)
            if not arguments.check:
                figure.draw()
    if arguments.check and stale:
        print(f"out of date: {', '.join(map(str, stale))}; run python -m benchmarks.readme", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
