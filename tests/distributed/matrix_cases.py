"""The list of the gradient matrix: layouts × models × options, and what each case guards."""

from __future__ import annotations

from tests.distributed.cases import Case


def _case(
    layout: str, model: str = "dense", *traps: str, dtype: str = "float64", critic: bool = False, **config: object
) -> Case:
    return Case(layout, model, dtype, critic, dict(config), traps)


def _pipeline(layout: str, schedule: str, model: str = "dense", *traps: str, **config: object) -> Case:
    return _case(layout, model, *traps, pipeline={"schedule": schedule}, **config)


FULL = {"mode": "full"}
BY_OP = {"mode": "selective", "selective": "op"}
EVERY_SECOND = {"mode": "selective", "selective": 2}

# Run by `make test`: every axis and every trap once.
QUICK: tuple[Case, ...] = (
    _case("d2", "dense", "unequal token counts across ranks and micro-batches"),
    _case("d2", "tied", "tied embeddings with FSDP", gradient_reduction="per_microbatch"),
    _case("r2d2", "dense", "replicas"),
    _case("t2", "dense", "norms see a share of the tokens"),
    _case("t4", "few_kv", "fewer key heads than ranks"),
    _case("t2", "tied", "tied embeddings with TP", loss="fused"),
    _case("t2", "dense", "value head under TP", critic=True),
    _case("c2", "dense", "documents across a rank boundary", context_parallel="allgather"),
    _case("c2", "window", "documents across a rank boundary", context_parallel="ulysses"),
    _case("d2c2", "tied", "gradient norm under CP", loss="fused"),
    _pipeline("p2", "1f1b", "tied", "tied embeddings with PP"),
    _pipeline("p2", "interleaved_1f1b", "dense", "micro-batches of unequal token counts"),
    _pipeline("p2", "interleaved_zero_bubble", "tied", "zero-bubble with real attention"),
    _pipeline("p2", "zbv", "tied", "zero-bubble with real attention"),
    _pipeline("d2p2t2", "1f1b", "tied", "gradient norm under PP"),
    _case("t2", "moe", "router gate under TP", "expert gradients with TP and no EP"),
    _case("d2e2", "moe", "expert gradients with EP", router_aux_loss_coef=0.1),
    _case("d2t2e4", "moe", "gradient norm under EP that borrows TP", "router gate under EP x TP"),
    _case("(attn:d2t2|ffn:d1t2e2)", "moe", "experts split by hidden features"),
    _case("d2e2", "moe", "statistics under recomputation", activation_checkpoint=FULL, dtype="float32"),
    _case("d2e2", "idle_experts", "experts without a token"),
    _case("t2", "shared", "shared experts under TP"),
)

# The rest of the matrix, marked slow.
FURTHER: tuple[Case, ...] = (
    _case("d4"),
    _case("d2", "bias"),
    _case("d2", "window"),
    _case("d2", critic=True),
    _case("d2", dtype="float32"),
    _case("d2", reshard_after_forward="always"),
    _case("d2", reshard_after_forward="never"),
    _case("d2", cpu_offload=True),
    _case("d2", activation_checkpoint=FULL),
    _case("d2", activation_checkpoint=BY_OP),
    _case("d2", activation_checkpoint=EVERY_SECOND),
    _case("d2", compile=True),
    _case("r2d2", "tied", gradient_reduction="per_microbatch"),
    _case("r2t2", "tied"),
    _case("t2", "bias"),
    _case("t2", "window", dtype="float32"),
    _case("t8", "few_kv", "fewer key heads than ranks"),
    _case("t2", activation_checkpoint=FULL),
    _case("t2", compile=True),
    _case("d2t2", "tied", loss="fused"),
    _case("d2t2", cpu_offload=True),
    _case("d2t2", "bias", critic=True),
    _case("c2", "tied", context_parallel="ulysses"),
    _case("c4", "few_kv", context_parallel="allgather"),
    _case("c2", "window", context_parallel="allgather"),
    _case("c2", critic=True),
    _case("c2", activation_checkpoint=FULL, context_parallel="allgather"),
    _case("c2", compile=True, context_parallel="ulysses"),
    _case("c2t2", "few_kv", context_parallel="ulysses"),
    _case("c2t2", "tied", context_parallel="allgather", dtype="float32"),
    _case("d2c2t2", "tied"),
    _case("r2c2", "dense", loss="fused"),
    _pipeline("p4", "1f1b"),
    _pipeline("p4", "1f1b", "tied"),
    _pipeline("p2", "1f1b", "window", activation_checkpoint=FULL),
    _pipeline("p2", "interleaved_1f1b", "tied", activation_checkpoint=BY_OP),
    _pipeline("p2", "1f1b", compile=True),
    _pipeline("p2", "1f1b", critic=True),
    _pipeline("d2p2", "interleaved_zero_bubble", "tied"),
    _pipeline("d2p2", "zbv"),
    _pipeline("p2t2", "zbv", "tied"),
    _pipeline("p2t2", "interleaved_1f1b"),
    _pipeline("p2c2", "1f1b", "tied"),
    _pipeline("p2c2", "interleaved_zero_bubble"),
    _pipeline("r2p2", "1f1b", "tied"),
    _case("d2", "moe"),
    _case("d4e2", "moe"),
    _case("d4e4", "moe", dtype="float32"),
    _case("r2d2e2", "moe"),
    _case("t2e2", "moe"),
    _case("t2e2", "moe", dtype="float32", router_aux_loss_coef=0.1),
    _case("d2t2e2", "moe"),
    _case("(attn:d1t2|ffn:d1t2)", "moe", dtype="float32"),
    _case("(attn:d4t2|ffn:d2t2e2)", "shared"),
    _case("c2e2", "moe", router_aux_loss_coef=0.1),
    _case("d2c2e4", "moe", context_parallel="ulysses"),
    _case("c2t2e4", "shared"),
    _case("d2e2", "tied_moe", activation_checkpoint=BY_OP),
    _case("d2e2", "moe", compile=True),
    _case("d2e2", "moe", dtype="float32", gradient_reduction="per_microbatch"),
    _case("d2e2", "moe", critic=True),
    _pipeline("p2", "1f1b", "moe"),
    _pipeline("d2p2e2", "zbv", "moe"),
    _pipeline("d2p2e2", "interleaved_1f1b", "tied_moe"),
    _pipeline("p2t2e2", "1f1b", "moe", dtype="float32"),
)

CASES = QUICK + FURTHER
