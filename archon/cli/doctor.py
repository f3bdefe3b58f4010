"""`archon doctor`: check the installation; with a checkpoint, a layout on real ranks, or one simulated rank."""

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
    "help": "Check the installation, or a layout of a checkpoint.\n\n"
    "Without PATH it lists PyTorch, devices, memory, compiler, optional packages, folders and ports, and what to "
    "install. With PATH it checks process groups, placements, replicas and memory. Under torchrun every rank builds "
    "its shards, runs a training step and compares replicas. With --rank a single process predicts the memory and "
    "traffic of that rank. With --lora the step trains the LoRA in that folder.",
}

GIB = 2**30


def command(
    path: Annotated[
        Path | None, typer.Argument(help="checkpoint folder, a folder with only config.json, or a hub id")
    ] = None,
    layout: Annotated[str, typer.Option(metavar="LAYOUT", help="such as d4t2")] = "d1",
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="simulate only this rank")] = None,
    tokens: Annotated[int, typer.Option(min=1, max=2**30, help="tokens per micro-batch")] = 4096,
    micro_batches: Annotated[int, typer.Option(min=1, max=2**16, help="micro-batches per step")] = 1,
    dtype: Annotated[str, typer.Option(help="compute dtype: float32 | bfloat16 | float64")] = "bfloat16",
    fresh: Annotated[bool, typer.Option("--fresh", help="initialize weights instead of loading them")] = False,
    lora: LoRAFolder = None,
    stall_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="dump all ranks' stacks if the checks take longer")
    ] = None,
    stacks: Annotated[Path, typer.Option(metavar="FOLDER", help="folder for stack dumps")] = Path("stacks"),
) -> None:
    """Check the installation, or a layout on all ranks or on one simulated rank."""
    from archon.schema.config import EngineConfig
    from archon.schema.errors import ConfigError

    if path is None:
        used = {
            "--layout": layout != "d1",
            "--rank": rank is not None,
            "--tokens": tokens != 4096,
            "--micro-batches": micro_batches != 1,
            "--dtype": dtype != "bfloat16",
            "--fresh": fresh,
            "--lora": lora is not None,
            "--stall-seconds": stall_seconds is not None,
        }
        if needing := [name for name, is_used in used.items() if is_used]:
            raise ConfigError(f"{needing[0]} needs PATH, a checkpoint; without PATH the installation is checked")
        from archon.tools.doctor.installation import check_installation

        checks = []
        for check in check_installation():
            checks.append(check)
            print(f"{check.status:<8} {check.subject:<18} {check.finding}", flush=True)
        raise typer.Exit(any(check.status == "problem" for check in checks))
    if rank is not None and stall_seconds is not None:
        raise ConfigError("--stall-seconds needs running ranks, and --rank simulates one; leave one of them out")
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
        errors = examine(engine, tokens, micro_batches)
    if engine.parallel_dims.world_size > 1:
        dist.destroy_process_group()
    if errors:
        raise typer.Exit(1)


def examine(engine: ArchonEngine, tokens: int, micro_batches: int = 1) -> list[str]:
    """Run every check on every rank and print the findings on rank 0. Returns the errors."""
    from archon.engine.dry_run import documents
    from archon.engine.loss import CrossEntropyLoss, loss_token_count
    from archon.parallel.control_plane import ControlPlane
    from archon.tools.doctor.checks import memory, placements, replica_mismatches, self_test

    def print_main(*lines: str) -> None:
        if ControlPlane.world().is_main:
            print("\n".join(lines), flush=True)

    dims = engine.parallel_dims
    print_main(f"layout {engine.config.layout} on {dims.world_size} ranks", *describe_meshes(engine), "")
    print_main("placements on rank 0", *map(describe_placement, placements(engine)), "")
    errors = self_test(dims, engine.device)
    print_main("collectives: " + ("; ".join(errors) or "correct in every group"))
    loaded = replica_mismatches(engine)
    print_main("replicas as loaded: " + ("; ".join(loaded) or "bitwise equal"))
    engine.train_batch(documents(engine.args.vocab_size, tokens, micro_batches), CrossEntropyLoss(), loss_token_count)
    trained = replica_mismatches(engine)
    print_main("replicas after a step: " + ("; ".join(trained) or "bitwise equal"))
    print_main("", "rank  parameters  moments  peak, GiB")
    for rank, use in enumerate(memory(engine)):
        print_main(f"{rank:>4}  {use.parameters / GIB:>10.3f}  {use.optimizer / GIB:>7.3f}  {use.peak / GIB:>9.3f}")
    return [*errors, *loaded, *trained]


def describe_meshes(engine: ArchonEngine) -> list[str]:
    """Describe the meshes of the layout and the process groups of rank 0."""
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


def describe_placement(p: ParameterPlacement) -> str:
    """Return one line: name, count, global and local shape, placements, FSDP sharding."""
    note = "" if p.sharded else ", not sharded by FSDP"
    note += ", uneven" if p.uneven else ""
    return f"  {p.name} × {p.count}: {list(p.shape)} as {list(p.local)} ({', '.join(p.places) or 'whole'}{note})"


def describe_rank(report: RankReport, layout: str) -> list[str]:
    """Return the report as lines of text."""
    from archon.parallel.layout import parse_layout

    layers = ", ".join(f"{first} to {end - 1}" for first, end in report.stages)
    lines = [
        f"layout {layout}: rank {report.rank} of {parse_layout(layout).world_size:,}",
        f"  layers      {layers}",
        f"  parameters  {report.parameters:,}, {report.parameter_bytes / GIB:.3f} GiB",
        f"  gradients   {report.gradient_bytes / GIB:.3f} GiB",
        f"  moments     {report.optimizer_bytes / GIB:.3f} GiB",
        "",
        "  a step       over           ranks   count            bytes",
    ]
    rows = [
        f"  {traffic.kind:<14} {traffic.group:<13} {traffic.size:>5}  {total.count:>6}  {total.bytes:>15,}"
        for traffic, total in report.step.items()
    ]
    return lines + rows
