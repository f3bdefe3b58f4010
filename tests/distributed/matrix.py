"""One case of the gradient matrix: what one process finds, and what every rank of a layout finds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.models import get_model_spec
from archon.models.layers.routed_experts import routed_experts_sizes, unknown_expert_id
from archon.models.vision.images import Grid, ProcessedImage
from archon.parallel.compile import apply_compile
from archon.parallel.fsdp import local_tensor
from archon.parallel.layout import parse_layout
from archon.tools.check.layouts import LENGTHS, compare, rank_rows
from tests.distributed.cases import (
    MODELS,
    STEPS,
    Case,
    batch,
    branching_batch,
    engine_config,
    loss_of,
    whole_gradients,
    write_config,
)
from tests.distributed.shared_moe import register

TEMPERATURE = 0.8
COMPUTED = (
    "optimizer",
    "router_aux_loss_coef",
    "router_bias_update_rate",
    "loss",
    "lora",
    "base",
    "replay",
    "vision",
    "data",
    "max_tokens_per_mb",
    "fp8",
)


def reference_key(case: Case) -> tuple[object, ...]:
    """Cases of one key have one reference; the auxiliary loss has one for each number of data-parallel ranks."""
    return case.model, case.dtype, case.critic, _shares(case), str(_shared(case))


def _shares(case: Case) -> int:
    """Into how many shares the reference must split the batch: the auxiliary loss depends on it, and one scale for all
    tokens of a micro-batch."""
    depends = "router_aux_loss_coef" in case.config or case.config.get("fp8", "none").startswith("tensorwise")
    return parse_layout(case.layout).dp if depends else 1


def _trains(case: Case) -> bool:
    """Whether the reference, which trains on whole batches, takes the steps that the ranks do."""
    return not case.config.get("router_aux_loss_coef") and _shares(case) == 1


def data_of(step: int) -> dict[str, Tensor]:
    return batch(LENGTHS, seed=10 + step)


# The images of each step by document, as sizes in patches: of the second of two ranks alone, of the first alone, and
# none at all. Adjacent ones, and two micro-batches of the second rank, of which one has none.
IMAGES: tuple[dict[tuple[int, ...], tuple[Grid, ...]], ...] = (
    {(4,): ((2, 4), (4, 4)), (7,): ((4, 2),), (9,): ((2, 2), (2, 2))},
    {(0,): ((4, 6),)},
    {},
)


# Of the documents that branch: one image in the history, another one of its size in a document with the same text, and
# one in the prompt.
IMAGES_OF_BRANCHES = {
    (0, 1, 2, 8): ((4, 6),),
    (4,): ((4, 6),),
    (3, 5, 6, 10): ((2, 4),),
}


def with_images(
    data: dict[str, Any], config: dict[str, Any], step: int, sizes: Mapping[tuple[int, ...], tuple[Grid, ...]]
) -> dict[str, Any]:
    """The batch with images of these sizes, the same in some documents, in place of some of its tokens, and no
    placeholder elsewhere."""
    tower, token = config["vision_config"], config["image_token_id"]
    features = tower["in_channels"] * tower["temporal_patch_size"] * tower["patch_size"] ** 2
    generator = torch.Generator().manual_seed(step)
    ids = data["input_ids"]
    ids[ids == token] = 1
    images: list[list[ProcessedImage]] = [[] for _ in ids]
    for documents, grids in sizes.items():
        start = 1
        for height, width in grids:
            image = ProcessedImage(torch.randn(height * width, features, generator=generator), (1, height, width))
            stop = start + height * width // tower["spatial_merge_size"] ** 2
            for document in documents:
                images[document].append(image)
                ids[document, start:stop] = token
            start = stop
    return data | {"images": images}


def case_data(case: Case, step: int) -> dict[str, Any]:
    branches = case.config.get("data") == "branching"
    data: dict[str, Any] = branching_batch(10 + step) if branches else data_of(step)
    if "vision_config" in MODELS[case.model]:
        data = with_images(data, MODELS[case.model], step, IMAGES_OF_BRANCHES if branches else IMAGES[step])
    if "loras" in case.config.get("lora", {}):
        third = 2 if step == 0 else 1
        data["lora"] = torch.tensor([0, 0, 0, 1, third, 0, 1, third, 1, 0, 1])
    if case.config.get("replay"):
        data["routed_experts"] = experts_of(case.model, data["input_ids"].shape, step)
    return data


def experts_of(model: str, shape: torch.Size, seed: int) -> Tensor:
    """Random experts of every token, as they are recorded, for every fifth one none."""
    layers, top_k, n_experts = routed_experts_sizes(
        get_model_spec(MODELS[model]["model_type"]).model_args_class.from_hf_config(MODELS[model])
    )
    generator = torch.Generator().manual_seed(50 + seed)
    experts = torch.rand(*shape, layers, n_experts, generator=generator).topk(top_k).indices
    experts.flatten(0, 1)[::5] = unknown_expert_id(torch.uint8)
    return experts.to(torch.uint8)


def run_reference(case: Case, folder: Path) -> None:
    """One process: a checkpoint of fresh weights, the gradients of the first batch and the weights after the steps."""
    register()
    plain = Case("d1", case.model, case.dtype, case.critic, _shared(case))
    path = write_config(folder / "config", case.model)
    engine = ArchonEngine(
        engine_config(plain, path, "d1", init_from_scratch=True, seed=3, lora=None, share_prefixes=False)
    )
    engine.initialize()
    for name in engine.adapter.buffer_shapes:  # fresh biases of routers are 0
        engine.model.get_buffer(name).normal_(std=0.2, generator=torch.Generator().manual_seed(7))
    for name, parameter in engine.model.named_parameters():  # fresh biases of towers are 0
        if name.startswith("visual.") and name.endswith(".bias"):
            parameter.detach().normal_(std=0.2, generator=torch.Generator().manual_seed(8))
    base = case.config.get("base")
    engine.save(folder / "checkpoint", dtype=None if base is None else getattr(torch, base))
    if case.config.get("lora"):
        engine = ArchonEngine(engine_config(plain, str(folder / "checkpoint"), "d1", share_prefixes=False))
        engine.initialize()
    found = measure(engine, case, case_data(case, 0), _shares(case))
    if _trains(case):
        found |= train(engine, case, 0, 1)
    save_file(found, folder / "reference.safetensors")


def _shared(case: Case) -> dict[str, Any]:
    """The options that change what is computed, not where."""
    return {key: value for key, value in case.config.items() if key in COMPUTED}


def measure(engine: ArchonEngine, case: Case, data: dict[str, Tensor], shares: int = 1) -> dict[str, Tensor]:
    """Loss, norm and every gradient of one batch, before any step.

    One process is given the micro-batches of all `shares` data-parallel ranks: the auxiliary loss of a mixture of
    experts is that of a micro-batch, and another partition has another one.
    """
    if shares == 1:
        grads, metrics = whole_gradients(engine, data, loss_of(case), TEMPERATURE)
        if "data" in case.config:
            check_sharing(engine, metrics)
    else:
        grads, metrics = _of_all_shares(engine, case, data, shares)
    found = {f"grad.{name}": grad for name, grad in grads.items()}
    found["loss"] = torch.tensor(metrics["loss"], dtype=torch.float64)
    found["norm"] = torch.tensor(metrics["grad_norm"], dtype=torch.float64)
    replay = {name: value for name, value in metrics.items() if name.startswith("router_replay/")}
    assert len(replay) == (2 if case.config.get("replay") else 0)
    found |= {name: torch.tensor(value, dtype=torch.float64) for name, value in replay.items()}
    return found


def _of_all_shares(
    engine: ArchonEngine, case: Case, data: dict[str, Tensor], shares: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients, loss and norm of the shares together: each share's mean counts by the units that it is the mean of."""
    of_each = [
        whole_gradients(engine, rank_rows(data, share, shares), loss_of(case), TEMPERATURE) for share in range(shares)
    ]
    units = sum(metrics["loss_weight"] for _, metrics in of_each)
    parts = [(metrics["loss_weight"] / units, grads, metrics) for grads, metrics in of_each]
    grads = {name: sum(part * grads[name] for part, grads, _ in parts) for name in of_each[0][0]}
    loss = sum(part * metrics["loss"] for part, _, metrics in parts)
    norm = torch.stack([grad.double().square().sum() for grad in grads.values()]).sum().sqrt()
    return grads, {"loss": loss, "grad_norm": float(norm)}


def train(engine: ArchonEngine, case: Case, rank: int, ranks: int) -> dict[str, Tensor]:
    """The weights after a few clipped steps."""
    for step in range(STEPS):
        engine.train_batch(rank_rows(case_data(case, step), rank, ranks), loss_of(case), loss_token_count, TEMPERATURE)
        engine.step_lr_scheduler()
    base = [] if engine.loras else engine.weights()
    trained = {*engine.lora, *engine.built.builder.saved_modules}
    changed = [(name, tensor) for name, tensor in base if not engine.lora or name in trained]
    weights = {f"weight.{name}": tensor.clone() for name, tensor in changed}
    return weights | {f"adapter.{name}": tensor.clone() for name, tensor in engine.lora_weights()}


def run_case(case: Case, folder: str) -> dict[str, float]:
    """On every rank: the layout's findings against the reference, as max|a - b| / max|b| a tensor."""
    register()
    engine = ArchonEngine(engine_config(case, f"{folder}/checkpoint", case.layout))
    # Shapes that are dynamic, fusion left out: what the compiler itself does to the numbers is another test's.
    with mock.patch("archon.parallel.decoder.apply_compile", partial(apply_compile, backend="aot_eager")):
        engine.initialize()
    ranks = engine.ranks
    check_shards(engine)
    with Collectives() as comms:
        found = measure(engine, case, rank_rows(case_data(case, 0), ranks.dp.rank, ranks.dp.size))
    check_collectives(engine, comms.kinds)
    if _trains(case):
        found |= train(engine, case, ranks.dp.rank, ranks.dp.size)
    return compare(found, load_file(f"{folder}/reference.safetensors"))


class Collectives(TorchDispatchMode):
    """The kinds of functional collectives that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.kinds.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def check_shards(engine: ArchonEngine) -> None:
    """No rank holds more of a parameter than its layout says; a layout that quietly replicates would pass otherwise."""
    dims = engine.parallel_dims
    for name, parameter in engine.model.named_parameters():
        held, whole = local_tensor(parameter).numel(), parameter.numel()
        expert = ".experts." in name and "shared" not in name
        # Of an adapter one part is split by the model's layout, as its matrix is: a of row products, else b.
        is_row = ".wo." in name or ".w2." in name
        whole_part = ".lora." in name and name.endswith(".b" if is_row else ".a")
        model_ways = dims.ep * (1 if whole_part else dims.etp) if expert else dims.tp
        few = "attention.wk." in name or "attention.wv." in name
        few_keys = any(f"delta_net.{part}." in name for part in ("wq", "wk", "q_conv", "k_conv"))
        few_groups = any(f"mamba.{part}." in name for part in ("wb", "wc", "b_conv", "c_conv"))
        if not expert and whole_part:
            model_ways = 1
        elif not expert and (parameter.ndim < 2 or "router" in name or "score" in name):
            split = (".wq.bias", ".wq.lora.magnitude.weight", ".sinks", ".A_log", ".dt_bias", ".D")
            model_ways = dims.tp if name.endswith(split) else 1
        elif few_keys or few_groups or few:
            sizes = engine.args
            heads = sizes.delta_key_heads if few_keys else sizes.mamba_groups if few_groups else sizes.n_kv_heads
            model_ways = 1 if heads < dims.tp else dims.tp
        elif any(part in name for part in ("wq_a", "wkv_a", "latent_in", "latent_out")):
            model_ways = 1
        if name.startswith("visual."):
            model_ways = 1
        ways = dims.expert_shard if expert else dims.dp_shard * dims.cp
        # FSDP gives whole rows, so that the last rank may hold none.
        rows = -(-parameter.shape[0] // ways) * ways if ways > 1 else parameter.shape[0]
        most = whole / parameter.shape[0] * max(rows, ways) / ways
        if dims.world_size > 1:
            assert held <= most / model_ways + whole / parameter.shape[0], f"{name}: {held} of {whole} elements"


def check_sharing(engine: ArchonEngine, metrics: dict[str, float]) -> None:
    """What documents begin alike with is computed once, unless the engine is told to compute each by itself."""
    shares = metrics["tokens_computed"] < 0.95 * metrics["tokens"]
    assert shares == engine.config.share_prefixes, f"{metrics['tokens_computed']} of {metrics['tokens']} computed"


def check_collectives(engine: ArchonEngine, seen: set[str]) -> None:
    """What the layout must have sent, by kind."""
    dims = engine.parallel_dims
    expected = set()
    if dims.tp > 1:
        expected |= {"all_gather_into_tensor", "reduce_scatter_tensor"}
    if dims.ep > 1 or (dims.cp > 1 and engine.layout.context_parallel == "ulysses"):
        expected.add("all_to_all_single")
    assert expected <= seen, f"expected {sorted(expected)}, seen {sorted(seen)}"
