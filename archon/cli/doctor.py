"""`archon doctor PATH --layout …`: checks a layout on real ranks, or simulates one rank of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archon.cli.options import LoRAFolder

if TYPE_CHECKING:
    from archon.engine.dry_run import RankReport
    from archon.engine.engine import ArchonEngine
    from archon.tools.doctor.checks import ParameterPlacement

SETTINGS: dict[str, Any] = {
    "name": "doctor",
    "help": "Check a layout: groups, placements, copies, memory.\n\n"
    "Under torchrun every rank builds its shards, runs a training step and compares copies. With --rank this process "
    "alone predicts what that rank of a layout of any size would hold and send. With --lora its folder is checked, "
    "and it is what the step trains.",
}

GIB = 2**30


def command(
    path: Annotated[Path, typer.Argument(help="checkpoint folder, or one that holds only config.json")],
    layout: Annotated[str, typer.Option(metavar="LAYOUT", help="such as d4t2")] = "d1",
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="predict this rank without running the others")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=2**30, help="tokens per micro-batch")] = 4096,
    micro_batches: Annotated[int, typer.Option(min=1, max=2**16, help="micro-batches per step")] = 1,
    dtype: Annotated[str, typer.Option(help="compute dtype: float32 | bfloat16 | float64")] = "bfloat16",
    fresh: Annotated[bool, typer.Option("--fresh", help="initialize weights instead of loading them")] = False,
    lora: LoRAFolder = None,
    stall_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="write every rank's stacks if the checks take longer")
    ] = None,
    stacks: Annotated[Path, typer.Option(metavar="FOLDER", help="where stacks are written")] = Path("stacks"),
) -> None:
    from archon.schema.config import EngineConfig

    options = {
        "path": str(path),
        "layout": layout,
        "dtype": dtype,
        "max_tokens_per_mb": tokens,
        "stall_s": stall_seconds,
        "lora": None if lora is None else {"path": str(lora)},
    }
    config = EngineConfig.parse(options | {"init_from_scratch": fresh}, source="doctor")
    if rank is not None:
        from archon.engine.dry_run import dry_run

        print("\n".join(describe_rank(dry_run(config, rank, tokens, micro_batches), layout)))
        return
    import torch.distributed as dist

    from archon.engine.engine import ArchonEngine

    engine = ArchonEngine(config)
    engine.initialize()
    engine.stall_watch.folder = stacks
    with engine.stall_watch.block():
        complaints = examine(engine, tokens, micro_batches)
    if engine.parallel_dims.world_size > 1:
        dist.destroy_process_group()
    if complaints:
        raise typer.Exit(1)


def examine(engine: ArchonEngine, tokens: int, micro_batches: int = 1) -> list[str]:
    """Run every check on every rank; rank 0 prints the findings. Returns the errors found."""
    from archon.engine.dry_run import documents
    from archon.engine.loss import CrossEntropyLoss, loss_token_count
    from archon.parallel.control_plane import ControlPlane
    from archon.tools.doctor.checks import memory, placements, replica_mismatches, self_test

    def say(*lines: str) -> None:
        if ControlPlane.world().is_main:
            print("\n".join(lines), flush=True)

    dims = engine.parallel_dims
    say(f"layout {engine.config.layout} on {dims.world_size} ranks", *describe_meshes(engine), "")
    say("placements on rank 0", *map(describe_placement, placements(engine)), "")
    complaints = self_test(dims, engine.device)
    say("collectives: " + ("; ".join(complaints) or "all right in every group"))
    loaded = replica_mismatches(engine)
    say("copies as loaded: " + ("; ".join(loaded) or "bitwise equal"))
    engine.train_batch(documents(engine.args.vocab_size, tokens, micro_batches), CrossEntropyLoss(), loss_token_count)
    trained = replica_mismatches(engine)
    say("copies after a step: " + ("; ".join(trained) or "bitwise equal"))
    say("", "rank  parameters  moments  peak, GiB")
    for rank, of in enumerate(memory(engine)):
        say(f"{rank:>4}  {of.parameters / GIB:>10.3f}  {of.optimizer / GIB:>7.3f}  {of.peak / GIB:>9.3f}")
    return [*complaints, *loaded, *trained]


def describe_meshes(engine: ArchonEngine) -> list[str]:
    """Return lines with the meshes of the layout and the process groups of rank 0."""
    import torch.distributed as dist

    from archon.parallel.collectives import layout_groups

    dims = engine.parallel_dims
    grids = [
        f"  {name:<7} " + " × ".join(f"{dim} {size}" for dim, size in sizes.items() if size > 1)
        for name, sizes in dims.grids.items()
        if dims.world_size > 1
    ]
    groups = [f"  group {name}: ranks {dist.get_process_group_ranks(pg)}" for name, pg in layout_groups(dims)]
    return grids + groups


def describe_placement(of: ParameterPlacement) -> str:
    """Return a line: name, count, global and local shape, placement, and how FSDP shards it."""
    note = "" if of.sharded else ", not sharded by FSDP"
    note += ", uneven" if of.uneven else ""
    return f"  {of.name} × {of.count}: {list(of.shape)} as {list(of.local)} ({', '.join(of.places) or 'whole'}{note})"


def describe_rank(of: RankReport, layout: str) -> list[str]:
    """Return the report as lines of text."""
    from archon.parallel.layout import parse_layout

    layers = ", ".join(f"{first} to {end - 1}" for first, end in of.stages)
    lines = [
        f"layout {layout}: rank {of.rank} of {parse_layout(layout).world_size:,}",
        f"  layers      {layers}",
        f"  parameters  {of.parameters:,}, {of.parameter_bytes / GIB:.3f} GiB",
        f"  gradients   {of.gradient_bytes / GIB:.3f} GiB",
        f"  moments     {of.optimizer_bytes / GIB:.3f} GiB",
        "",
        "  a step       over           ranks   count            bytes",
    ]
    rows = [
        f"  {traffic.kind:<14} {traffic.group:<13} {traffic.size:>5}  {total.count:>6}  {total.bytes:>15,}"
        for traffic, total in of.step.items()
    ]
    return lines + rows
