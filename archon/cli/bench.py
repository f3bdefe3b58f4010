"""`archon bench MODEL [LAYOUT…]`: measure training steps in several layouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from archon.cli.options import LoRAFolder
from archon.schema.config import require_output

SETTINGS: dict[str, Any] = {
    "name": "bench",
    "help": "Measure training steps in several layouts.\n\nEach point runs in separate processes, checks that its "
    "loss matches the first layout's, and prints a row: throughput, MFU, phases, traffic, memory. Commas separate "
    "the values of an option.",
}


def command(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="checkpoint folder, or a folder with only config.json")
    ] = None,
    layouts: Annotated[
        list[str] | None, typer.Argument(metavar="[LAYOUT]…", help="such as d2t2 p2t2; the first is the reference (d1)")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.yaml", help="archon sft config to measure; archon plan writes one"),
    ] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="tokens per step over all ranks (8192)")] = None,
    seq: Annotated[str, typer.Option(metavar="N,…", help="tokens per document")] = "",
    lengths: Annotated[
        list[str] | None,
        typer.Option(metavar="SHAPE", help="ragged documents: 700,90,13, uniform:N or lognormal:N; repeatable"),
    ] = None,
    micro_batch: Annotated[str, typer.Option(metavar="N,…", help="maximum tokens per micro-batch (16384)")] = "",
    recompute: Annotated[
        str,
        typer.Option(
            metavar="POLICY,…", help="none | full | offload | selective | 'selective N' | 'memory_budget X' (none)"
        ),
    ] = "",
    compile: Annotated[str, typer.Option(metavar="BOOL,…", help="torch.compile each block: false | true (false)")] = "",
    dtype: Annotated[str, typer.Option(metavar="DTYPE,…", help="float32 | bfloat16 | float64 (float32)")] = "",
    steps: Annotated[int, typer.Option(metavar="N", help="timed steps")] = 5,
    warmup: Annotated[int, typer.Option(metavar="N", help="untimed steps first, at least 2")] = 2,
    device: Annotated[str | None, typer.Option(help="auto | cpu | cuda (auto)")] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="threads per process; default: cores / processes")
    ] = None,
    peak_flops: Annotated[
        float | None, typer.Option(metavar="TFLOP/S", help="peak of one device; known GPUs and CPUs need none")
    ] = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="time limit per point")] = 600.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="initialize weights instead of loading them")] = False,
    lora: LoRAFolder = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="set a field of the engine's config")
    ] = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE.json", help="write the record")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE.json", help="write a Chrome trace of a step")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="compare two records"),
    ] = None,
) -> None:
    """Measure training steps in several layouts."""
    from archon.schema.errors import ConfigError

    if compare is not None:
        from archon.tools.bench import compare_records, read_record

        print("\n".join(compare_records(*map(read_record, compare))))
        return
    if model is None and run is None:
        raise ConfigError(
            "no model to measure; use archon bench MODEL LAYOUT… --seq 1024, --config FILE.yaml or --compare A.json "
            "B.json"
        )
    from archon.cli.config import read_values
    from archon.schema.config import merge_sections
    from archon.tools.bench import SweepConfig, run_sweep
    from archon.tools.bench.table import describe, table

    options = {
        "model": None if model is None else str(model),
        "layouts": layouts,
        "tokens": tokens,
        "seq": _values(seq),
        "lengths": lengths,
        "micro_batch": _values(micro_batch),
        "recompute": _values(recompute),
        "compile": _values(compile),
        "dtype": _values(dtype),
        "steps": steps,
        "warmup": warmup,
        "device": device,
        "threads": threads,
        "peak_tflops": peak_flops,
        "time_limit_s": time_limit,
        "fresh": fresh or None,
    }
    planned = {} if run is None else sweep_config(run, device)
    engine = merge_sections(planned.pop("engine", {}), read_values(None, set_ or []))
    if lora is not None:
        engine = merge_sections(engine, {"lora": {"path": str(lora)}})
    if lengths:
        planned.pop("seq", None)
    chosen = {name: value for name, value in options.items() if value not in (None, [])}
    config = SweepConfig.parse(planned | chosen | {"engine": engine}, source="bench")
    if trace is not None:
        require_output(trace, ".json", [config.folder])
    sweep = run_sweep(
        config,
        record,
        on_row=lambda row: print("\n".join(describe(row)), flush=True),
        on_start=lambda point: print(f"measuring {point.name}", file=sys.stderr, flush=True),
    )
    print("\n" + "\n".join(table(sweep)))
    if trace is not None:
        from archon.tools.bench.chrome_trace import write_trace

        write_trace(sweep, trace)
    if any(row.status != "ok" for row in sweep.rows):
        raise typer.Exit(1)


def sweep_config(file: Path, device: str | None = None) -> dict[str, Any]:
    """Return the `SweepConfig` fields that measure one `archon sft` config with documents of maximum length."""
    from archon.cli.config import load_config
    from archon.engine.build import resolve_device
    from archon.parallel.compile import compile_enabled
    from archon.tools.bench.config import SWEEP_FIELDS
    from archon.training.config import SFTConfig

    run = load_config(SFTConfig, file, [])
    model, longest = run.model, run.train_data.max_length
    batch = {} if longest is None else {"seq": [longest], "tokens": run.batch_size * longest}
    device = device or model.device
    # The sweep sets weights and documents itself.
    engine = model.model_dump(include=model.model_fields_set - SWEEP_FIELDS - {"init_from_scratch", "share_prefixes"})
    return batch | {
        "model": model.path,
        "layouts": [model.layout],
        "micro_batch": [model.max_tokens_per_mb],
        "recompute": [model.activation_checkpoint.name],
        "compile": [compile_enabled(model.compile, resolve_device(device).type)],
        "dtype": [model.dtype],
        "device": device,
        "fresh": model.init_from_scratch,
        "engine": engine,
    }


def _values(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
