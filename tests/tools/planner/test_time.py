"""What seconds are made of where ranks share processors, and what is fitted to the machine at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from archon.checkpoint.hf_reader import read_hf_config
from archon.engine.memory.memory_model import rank_parameters
from archon.engine.memory.recompute import GIB
from archon.models import get_model_spec
from archon.models.lora.targets import resolve_lora_sizes
from archon.parallel.activation_offload import MAX_DEVICE_INPUTS
from archon.parallel.layout import parse_layout
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.tools.planner.calibrate import CPU_KERNELS, fit_latency
from archon.tools.planner.hardware import Hardware, read_hardware
from archon.tools.planner.prediction import Batch, Prediction, predict
from archon.tools.planner.search import Planner
from archon.tools.planner.time_model import BLOCK_LAUNCHES, FORWARD_LAUNCHES, Link, StepTime
from tests.tools.planner.models import DENSE, MODELS, MOE

SEQ, DOCUMENTS = 256, 16
# What a machine of two cores might be measured to do, with four ranks.
CPU = read_hardware("h100-80gb").model_copy(
    update=CPU_KERNELS
    | {
        "fp32_flops": 3e10,
        "memory_bandwidth": 1e10,
        "gpus_per_node": 4,
        "processors": 2.0,
        "overlap": 0.0,
        "node_bandwidth": 1e9,
        "node_latency_s": 2e-4,
        "node_latency_per_rank_s": 1e-4,
        "layer_overhead_s": 1e-3,
        "micro_batch_overhead_s": 2e-3,
        "shard_overhead_s": 5e-4,
    }
)


def step(
    layout: str,
    hardware: Hardware,
    micro_batch: int = 1024,
    policy: Mapping[str, object] = MappingProxyType({}),
    context: str = "auto",
    **fields: object,
) -> StepTime:
    spec = get_model_spec("qwen3")
    planner = Planner(spec, spec.model_args_class.from_hf_config(DENSE), hardware)
    fields = {"path": "model", "layout": layout, "dtype": "float32", "max_tokens_per_mb": micro_batch} | fields
    fields |= {"activation_checkpoint": dict(policy), "context_parallel": context}
    return planner.seconds(EngineConfig.model_validate(fields), SEQ, DOCUMENTS)


def test_ranks_beyond_the_processors_share_them() -> None:
    alone = CPU.model_copy(update={"processors": 0.0})
    assert [CPU.oversubscription(ranks) for ranks in (1, 2, 4, 64)] == [1, 1, 2, 2]
    assert alone.oversubscription(4) == 1
    assert step("d2", CPU) == step("d2", alone)
    assert step("t4", CPU).total == pytest.approx(2 * step("t4", alone).total)


def test_a_pipeline_that_waits_leaves_the_processors_to_others() -> None:
    """Four stages on two processors: the work of all of them, or a micro-batch's passage through all of them."""
    alone = CPU.model_copy(update={"processors": 0.0})
    free, crowded = step("p4", alone, 256), step("p4", CPU, 256)
    assert free.bubble > 0
    assert free.total < crowded.total < 2 * free.total


def test_the_host_takes_its_time_for_every_layer_and_micro_batch() -> None:
    layers, micro_batches = DENSE["num_hidden_layers"], SEQ * DOCUMENTS // 1024
    expected = micro_batches * (layers * CPU.layer_overhead_s + CPU.micro_batch_overhead_s)
    assert step("d1", CPU).host == pytest.approx(expected)


def test_a_gpu_idles_between_its_kernels() -> None:
    """For every block; a recomputed one launches its forward again."""
    gpu, layers, micro_batches = read_hardware("h100-80gb"), DENSE["num_hidden_layers"], SEQ * DOCUMENTS // 1024
    assert step("d1", gpu).host == pytest.approx(micro_batches * layers * BLOCK_LAUNCHES * gpu.launch_s)
    launches = BLOCK_LAUNCHES + FORWARD_LAUNCHES
    recomputed = step("d1", gpu, policy={"mode": "full"}).host
    assert recomputed == pytest.approx(micro_batches * layers * launches * gpu.launch_s)


H100 = read_hardware("h100-80gb")
# The head of 27 Nov 2026 was a dozen operators on tiles of float32 logits: 189.5 ms where the matmuls take 42.5.
TILES = H100.model_copy(update={"head_passes": 40})


@pytest.mark.parametrize(
    ("model", "documents", "hardware", "options", "measured"),
    [
        ("Qwen3-0.6B", 8, TILES, {"attn_type": "varlen"}, 53.6e3),
        ("Qwen3-0.6B", 8, TILES, {"attn_type": "varlen", "compile": False}, 38.9e3),
        ("Qwen3-0.6B", 8, H100, {"attn_type": "varlen"}, 68.0e3),
        ("Qwen3-0.6B", 8, H100, {"attn_type": "fa4"}, 84.4e3),
        ("Qwen3-0.6B", 8, H100, {}, 84.4e3),
        ("Qwen3-1.7B", 4, TILES, {"attn_type": "varlen"}, 30.0e3),
        (
            "Qwen3-8B",
            4,
            TILES,
            {"attn_type": "varlen", "lora": {"rank": 16}, "activation_checkpoint": {"mode": "full"}},
            9994,
        ),
    ],
)
def test_steps_measured_on_an_h100_are_predicted(
    model: str, documents: int, hardware: Hardware, options: dict[str, Any], measured: float
) -> None:
    """Tokens per second of one micro-batch of documents of 4,096 tokens, within the 15 % that the project aims at."""
    config = EngineConfig(path="model", dtype="bfloat16", max_tokens_per_mb=documents * 4096, **options)
    hf_config = read_hf_config(Path(__file__).parents[2] / "data" / "hf_configs" / model)
    spec = get_model_spec(hf_config["model_type"])
    names, args = spec.state_dict_adapter_class(hf_config), spec.model_args_class.from_hf_config(hf_config)
    lora = None if config.lora is None else resolve_lora_sizes(names, config.lora)
    seconds = Planner(spec, args, hardware, lora).seconds(config, 4096, documents).total
    assert documents * 4096 / seconds == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("model", "tokens", "options", "measured"),
    [
        ("Qwen3-0.6B", 32768, {}, 51.8e9),
        ("Qwen3-8B", 16384, {"lora": {"rank": 16}, "activation_checkpoint": {"mode": "full"}}, 26.9e9),
    ],
)
def test_peak_memory_measured_on_an_h100_is_predicted(
    model: str, tokens: int, options: dict[str, Any], measured: float
) -> None:
    """Allocated bytes of one micro-batch, within the 10 % that the project aims at."""
    config = EngineConfig(path="model", dtype="bfloat16", max_tokens_per_mb=tokens, **options)
    hf_config = read_hf_config(Path(__file__).parents[2] / "data" / "hf_configs" / model)
    prediction = predict(config, hf_config, H100, Batch(tokens // 4096, 4096))
    assert prediction.memory.total == pytest.approx(measured, rel=0.1)


OFFLOAD: dict[str, Any] = {"mode": "offload"}


def offload_prediction(mode: str, hardware: Hardware = H100, layout: str = "d1", tokens: int = 131072) -> Prediction:
    """Two micro-batches per rank for LoRA of Qwen3-8B on documents of 32,768 tokens."""
    lora: dict[str, Any] = {"lora": {"rank": 16}, "activation_checkpoint": {"mode": mode}}
    config = EngineConfig(path="model", dtype="bfloat16", layout=layout, max_tokens_per_mb=tokens, **lora)
    hf_config = read_hf_config(Path(__file__).parents[2] / "data" / "hf_configs" / "Qwen3-8B")
    return predict(config, hf_config, hardware, Batch(2 * tokens * parse_layout(layout).dp // 32768, 32768))


def test_offload_moves_block_inputs_to_host_memory() -> None:
    """36 inputs of 131,072 × 4,096 in bfloat16, 1 GiB each, of which three stay on the GPU."""
    full, offload = (
        offload_prediction(mode, H100.model_copy(update={"memory_bytes": 1 << 40})) for mode in ("full", "offload")
    )
    assert full.memory.activations - offload.memory.activations == (36 - MAX_DEVICE_INPUTS) * GIB
    assert (full.host, offload.host) == (0, 36 * GIB)
    assert (
        "36.0 GiB of pinned host memory per rank for the inputs of blocks; a step hides the copies"
        in offload.lines()[1]
    )
    assert len(full.lines()) == len(offload.lines()) - 1
    assert offload.seconds == full.seconds  # 1 GiB at 45 GB/s takes 24 ms, the forward of a block longer
    odd = offload_prediction("offload", tokens=65536 + 32768, layout="d2")  # pinned memory comes in powers of two
    assert odd.host == 36 * GIB


def test_copies_longer_than_the_computation_are_waited_for() -> None:
    slow = H100.model_copy(update={"host_bandwidth": 1e9, "link_efficiency": 1.0, "memory_bytes": 1 << 40})
    full, offload = (offload_prediction(mode, slow) for mode in ("full", "offload"))
    copies, s = 2 * 36 * GIB / 1e9, full.seconds
    head = 4 * 2 * 131072 * 4096 * 151936 / (slow.bf16_flops * slow.gemm_efficiency)
    passes = s.products + s.attention + s.elementwise + s.recompute
    assert 2 * copies - passes < offload.seconds.offload < 2 * copies - passes + 2 * head
    assert offload.seconds.total == pytest.approx(s.total + offload.seconds.offload)
    assert f"a step waits {offload.seconds.offload:.2f} s for the copies" in offload.lines()[1]
    with pytest.raises(ConfigError, match=r"host_bandwidth of h100-80gb is 0; set it, or choose full"):
        offload_prediction("offload", slow.model_copy(update={"host_bandwidth": 0.0}))
    assert step("d1", CPU, policy=OFFLOAD).offload > step("d1", CPU, policy={"mode": "full"}).offload == 0


def test_a_model_that_does_not_fit_is_told_of_offload() -> None:
    small = H100.model_copy(update={"memory_bytes": 30 * GIB})
    with pytest.raises(
        ConfigError, match=r"set activation_checkpoint\.mode = auto, set it to offload, or use more GPUs"
    ):
        offload_prediction("full", small)
    with pytest.raises(ConfigError, match=r"mode = auto, or use more GPUs"):
        offload_prediction("offload", small)


def test_attention_slows_down_where_a_query_attends_to_few_keys() -> None:
    """Measured on an H100 with FlashAttention-2: 272 TFLOP/s at a mean of 2,048 keys, 330 at 16,384."""
    rate = H100.attention["varlen"]
    assert rate.reached(2048) == pytest.approx(272e12, rel=0.01)
    assert rate.reached(16384) == pytest.approx(330e12, rel=0.01)
    assert H100.attention["fa4"].reached(2048) == pytest.approx(486e12, rel=0.01)
    slow, fast = (step("d1", H100, dtype="bfloat16", attn_type=name).attention for name in ("varlen", "fa4"))
    assert fast < slow


def test_a_recomputed_forward_of_attention_is_four_fourteenths_of_it() -> None:
    gpu = H100.model_copy(update={"memory_bandwidth": 1e30})  # matmuls and attention alone
    full, head = step("d1", gpu, dtype="bfloat16", policy={"mode": "full"}), 2048 * DENSE["hidden_size"]
    blocks = full.products - 6 * SEQ * DOCUMENTS * head / (gpu.bf16_flops * gpu.gemm_efficiency)
    assert full.recompute == pytest.approx(blocks / 3 + full.attention * 4 / 14)


def test_attention_is_timed_by_its_backend() -> None:
    assert H100.attention_backend("auto") == "fa4"
    assert H100.attention_backend("flash") == H100.attention_backend("varlen") == "varlen"
    assert read_hardware("a100-80gb").attention_backend("auto") == "varlen"
    assert CPU.attention_backend("auto") is None


def test_no_traffic_is_hidden_without_overlap() -> None:
    hides = CPU.model_copy(update={"overlap": 1.0})
    assert step("d2", hides).fsdp < step("d2", CPU).fsdp
    assert step("p2", hides).stages == 0 < step("p2", CPU).stages


def test_context_ranks_swap_heads_or_gather_keys() -> None:
    wire = CPU.model_copy(
        update={"processors": 0.0, "node_latency_s": 0.0, "node_latency_per_rank_s": 0.0, "node_bandwidth": 1e9}
    )
    layers, passes = DENSE["num_hidden_layers"], 2 * SEQ * DOCUMENTS // 1024  # micro-batches, forward and backward
    head = 1024 * DENSE["head_dim"] * 4 / (1e9 * wire.link_efficiency)  # of the whole pack
    heads, kv_heads = DENSE["num_attention_heads"], DENSE["num_key_value_heads"]
    gathered = step("c4", wire, context="allgather").context_parallel
    assert gathered == pytest.approx(passes * layers * 2 * kv_heads * head * 3 / 4)
    swapped = step("c4", wire, context="ulysses").context_parallel
    assert swapped == pytest.approx(passes * layers * 2 * (heads + kv_heads) * head / 4 * 3 / 4)
    assert step("c4", wire).context_parallel == swapped


def test_context_ranks_swap_the_heads_of_delta_nets() -> None:
    """Queries, keys, values, two gates and the result of each head, there and back again in the backward."""
    wire = CPU.model_copy(update={"processors": 0.0, "node_latency_s": 0.0, "node_latency_per_rank_s": 0.0})
    config = MODELS["delta"]
    spec = get_model_spec("qwen3_5_text")
    planner = Planner(spec, spec.model_args_class.from_hf_config(config), wire)
    heads, key_heads, features = 8, 4, 32
    assert config["linear_num_value_heads"] == heads and config["linear_num_key_heads"] == key_heads
    gated = 2 * (DENSE["num_attention_heads"] + DENSE["num_key_value_heads"]) * DENSE["head_dim"]
    for ranks in (2, 4):
        fields = {"path": "model", "layout": f"c{ranks}", "dtype": "float32", "max_tokens_per_mb": 1024}
        of_nets = 2 * key_heads * features + 2 * heads * features + 2 * heads
        a_token = 4 * (3 * of_nets + gated)  # three nets, one attention
        sent = 2 * SEQ * DOCUMENTS * a_token / ranks * (ranks - 1) / ranks
        found = planner.seconds(EngineConfig.model_validate(fields), SEQ, DOCUMENTS).context_parallel
        assert found == pytest.approx(sent / (1e9 * wire.link_efficiency)), ranks


def test_experts_come_from_the_ranks_that_hold_the_same() -> None:
    """With e ranks of experts there are d / e of each: the gathered weights of the others go over all d."""
    spec, nodes = get_model_spec("qwen3_moe"), CPU.model_copy(update={"processors": 0.0, "shard_overhead_s": 0.0})
    args = spec.model_args_class.from_hf_config(MOE)
    fields = {"path": "model", "dtype": "float32", "max_tokens_per_mb": 1024}
    found = {}
    for layout in ("d4", "d4e2", "d4e4"):
        planner = Planner(spec, args, nodes.model_copy(update={"node_latency_s": 0.0, "node_latency_per_rank_s": 0.0}))
        state = rank_parameters(planner.weights, parse_layout(layout), None, 0)
        config = EngineConfig.model_validate(fields | {"layout": layout})
        dense, experts, ranks = state.gathered - state.experts, state.experts, 4 // parse_layout(layout).ep
        # One micro-batch: gathered for the forward and for the backward, shared out once.
        bytes_ = 3 * 4 * (dense * 3 / 4 + experts * (ranks - 1) / ranks)
        found[layout] = planner.seconds(config, SEQ, 16).fsdp
        assert found[layout] == pytest.approx(bytes_ / (1e9 * nodes.link_efficiency))
    assert found["d4"] > found["d4e2"] > found["d4e4"]


def test_every_second_block_is_computed_and_sent_again() -> None:
    again = {
        policy: step("t4", CPU, policy={"mode": "selective", "selective": every} if every else {"mode": "none"})
        for policy, every in (("none", 0), ("all", 1), ("half", 2))
    }
    for part in ("tensor_parallel", "host", "recompute"):
        none, half, whole = (getattr(again[policy], part) for policy in ("none", "half", "all"))
        assert whole > none and half - none == pytest.approx((whole - none) / 2), part


def test_a_larger_group_takes_longer_to_begin() -> None:
    pair, four = (Link(CPU, size, 1).seconds(0, 1) for size in (2, 4))
    assert (pair, four) == pytest.approx((2e-4, 4e-4))


@pytest.mark.parametrize(
    ("by_size", "expected"),
    [
        ({2: 1.0, 4: 2.0}, (1.0, 0.5)),
        ({2: 1.0}, (1.0, 1.0)),
        ({3: 1.0}, (0.5, 0.5)),
        ({2: 1.0, 4: 0.9}, (1.0, 0.0)),
        ({3: 2.0, 9: 5.0}, (1.5, 0.5)),
    ],
)
def test_latency_is_a_line_over_the_sizes_of_groups(by_size: dict[int, float], expected: tuple[float, float]) -> None:
    assert fit_latency(by_size) == pytest.approx(expected)


def test_8_bit_products_take_the_time_of_their_rate() -> None:
    """Two of three products in `rowwise`, all in `tensorwise`; the head's are as before, and rounding takes passes."""
    gpu = read_hardware("h100-80gb").model_copy(update={"memory_bandwidth": 1e30})  # products alone
    plain, tensorwise, rowwise = (
        step("d1", gpu, dtype="bfloat16", fp8=fp8).products for fp8 in ("none", "tensorwise", "rowwise")
    )
    assert plain / 2 < tensorwise < plain
    assert plain - rowwise == pytest.approx((plain - tensorwise) * 2 / 3)
    inner, layers = step("d1", gpu, dtype="bfloat16", fp8="tensorwise_inner").products, DENSE["num_hidden_layers"]
    assert plain - inner == pytest.approx((plain - tensorwise) * (layers - 2) / layers)
    slow = read_hardware("h100-80gb")
    assert (
        step("d1", slow, dtype="bfloat16", fp8="rowwise").elementwise > step("d1", slow, dtype="bfloat16").elementwise
    )
    with pytest.raises(ConfigError, match="a100-80gb has no FP8 matmuls"):
        step("d1", read_hardware("a100-80gb"), dtype="bfloat16", fp8="rowwise")


@pytest.mark.parametrize("layout", ["d1", "d4", "t4"])
def test_ranks_share_the_time_of_muon(layout: str) -> None:
    muon, adamw = (step(layout, CPU, optimizer={"kind": kind}).optimizer for kind in ("muon", "adamw"))
    flops = 0
    for rows, columns, count in ((256, 256, 2), (256, 128, 2), (256, 768, 3)):  # q and o, k and v, the feed-forward
        low, high = min(rows, columns), max(rows, columns)
        flops += DENSE["num_hidden_layers"] * count * 5 * (4 * low * low * high + 2 * low**3)
    ranks = parse_layout(layout).world_size
    seconds = flops / ranks / (CPU.flops("float32") * CPU.gemm_efficiency)
    slowdown = CPU.oversubscription(ranks)
    matrices = DENSE["num_hidden_layers"] * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768) // ranks
    traffic = Link(CPU, ranks, 1).all_to_all_seconds(2 * 4 * matrices, 2)
    assert muon - adamw == pytest.approx(slowdown * (seconds + traffic))
