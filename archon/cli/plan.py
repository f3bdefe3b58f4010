"""`archon plan MODEL --gpus N`: rank the layouts that fit, and explain slower and rejected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from archon.cli.options import GPU_NAMES
from archon.schema.config import require_output

if TYPE_CHECKING:
    from archon.models.hf.state_dict import BaseStateDictAdapter
    from archon.models.lora.targets import LoRASize

SETTINGS: dict[str, Any] = {"name": "plan", "help": "Find the fastest layouts that fit a number of GPUs."}


def command(
    model: Annotated[Path | None, typer.Argument(help="checkpoint folder, only its config.json, or a hub id")] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, max=2**20, help="total number of GPUs")] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help=GPU_NAMES)] = "h100-80gb",
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=1, max=2**50, help="tokens per optimizer step (1048576)")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", metavar="N", min=2, max=2**40, help="tokens per document (4096)")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option("--dtype", help="compute dtype (bfloat16)")
    ] = None,
    fp8: Annotated[
        Literal["none", "tensorwise", "rowwise", "tensorwise_inner", "rowwise_inner"] | None,
        typer.Option("--fp8", help="FP8 matmuls in blocks (none); inner: skip the first and last block"),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="train a LoRA: rank=16, targets=[q_proj]; fields of model.lora; repeatable"
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE.yaml", help="archon sft config to take model, dtype, fp8, LoRA and batch from"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="file for the configuration of the best layout")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="FILE",
            help="measure this machine (under torchrun also its links), write FILE for --gpu, and exit",
        ),
    ] = None,
) -> None:
    """Rank the layouts for a number of GPUs."""
    for file in (calibrate, output):
        if file is not None:
            require_output(file, ".yaml", [model])
    if calibrate is not None:
        _calibrate(gpu, dtype or "bfloat16", calibrate)
        return
    import yaml

    from archon.checkpoint.hf_reader import read_hf_config
    from archon.cli.config import read_values
    from archon.models import get_model_spec
    from archon.schema.errors import ConfigError, LayoutError
    from archon.tools.planner.describe import as_json as plan_as_json
    from archon.tools.planner.describe import describe, explain_no_plan, run_config
    from archon.tools.planner.hardware import read_hardware
    from archon.tools.planner.inspection import config_errors
    from archon.tools.planner.search import Planner, PlanRequest

    run = {} if config is None else plan_request(config)
    model = model or run.get("path")
    if model is None:
        raise ConfigError("there is no model to plan for; pass a checkpoint folder, or a folder with only config.json")
    hardware = read_hardware(gpu)
    hf_config = read_hf_config(model)
    spec = get_model_spec(str(hf_config.get("model_type")))
    if refused := config_errors(spec.model_args_class, hf_config):
        raise ConfigError(f"{model}: archon refuses this checkpoint: {'; '.join(refused)}")
    args = spec.model_args_class.from_hf_config(hf_config)
    fields = read_values(None, lora) if lora else run.get("lora")
    names = spec.state_dict_adapter_class(hf_config)
    planned = PlannedLoRA() if fields is None else planned_lora(names, fields)
    length = seq or run.get("seq") or 4096
    batch = run["documents"] * length if run else 1 << 20
    request = PlanRequest(str(model), gpus, tokens or batch, length, dtype or run.get("dtype") or "bfloat16", fields)
    request = request._replace(fp8=fp8 or run.get("fp8") or "none")
    plan = Planner(spec, args, hardware, *planned).plan(request)
    best_config = run_config(request, plan.best[0].candidate) if plan.best else None
    text = "" if best_config is None else yaml.safe_dump(best_config, sort_keys=False)
    if as_json:
        print(json.dumps(plan_as_json(plan) | {"config": best_config}, indent=2))
    else:
        print("\n".join(describe(plan)))
        if best_config is not None and output is None:
            print(f"\n# {gpus} processes: torchrun … -m archon sft --config FILE.yaml\n{text}", end="")
    if best_config is None:
        raise LayoutError(explain_no_plan(plan))
    if output is not None:
        output.write_text(text, encoding="utf-8")


def plan_request(file: Path) -> dict[str, Any]:
    """Return the plan options of an `archon sft` config: path, dtype, fp8, lora, documents per step, seq."""
    from archon.cli.config import load_config
    from archon.training.config import SFTConfig

    run = load_config(SFTConfig, file, [])
    lora = None if run.model.lora is None else run.model.lora.model_dump(exclude_defaults=True)
    return {
        "path": Path(run.model.path),
        "dtype": run.model.dtype,
        "fp8": run.model.fp8,
        "lora": lora,
        "documents": run.batch_size,
        "seq": run.train_data.max_length,
    }


class PlannedLoRA(NamedTuple):
    """LoRA sizes by native name, native names of saved modules, and the format of the base; None trains all weights."""

    sizes: dict[str, LoRASize] | None = None
    saved_modules: tuple[str, ...] = ()
    quantize_base: Literal["none", "nf4", "fp8"] = "none"


def planned_lora(names: BaseStateDictAdapter, fields: dict[str, Any]) -> PlannedLoRA:
    """Return the LoRA of fields of `model.lora`.

    Raises:
        ConfigError: The fields describe several LoRAs, or a base that cannot be quantized.
    """
    from archon.engine.build import check_quantized_base, lora_sizes, saved_modules
    from archon.schema.config import LoRAConfig
    from archon.schema.errors import ConfigError

    lora = LoRAConfig.parse(fields, source="lora")
    if lora.loras is not None:
        raise ConfigError(
            "lora.loras has several LoRAs, but a plan supports one; plan with one of their total rank: "
            f"--lora rank={sum(each.rank for each in lora.loras.values())}"
        )
    sizes = lora_sizes(names, lora)
    saved = saved_modules(names, lora, sizes)
    check_quantized_base(lora.quantize_base, names, sizes, saved)
    return PlannedLoRA(sizes, saved, lora.quantize_base)


def _calibrate(gpu: str, dtype: str, file: Path) -> None:
    import os

    import torch

    from archon.engine.build import resolve_device
    from archon.parallel.process_group import join_process_group, torchrun_world_size
    from archon.tools.planner.calibrate import calibrate

    device = resolve_device("auto")
    join_process_group(torchrun_world_size(), device.type, timeout_s=600.0)
    hardware = calibrate(gpu, device, getattr(torch, dtype))
    if os.environ.get("RANK", "0") == "0":
        file.write_text(hardware.to_yaml(), encoding="utf-8")
        print(f"{file}: {hardware.to_yaml()}", end="")
