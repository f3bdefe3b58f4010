"""The list of the gradient matrix: layouts × models × options, and what each case guards."""

from __future__ import annotations

from tests.distributed.cases import Case
from tests.distributed.features import BUDGET, BY_OP, EVERY_SECOND, FULL


def _case(
    layout: str, model: str = "dense", *traps: str, dtype: str = "float64", critic: bool = False, **config: object
) -> Case:
    return Case(layout, model, dtype, critic, dict(config), traps)


def _pipeline(layout: str, schedule: str, model: str = "dense", *traps: str, **config: object) -> Case:
    return _case(layout, model, *traps, pipeline={"schedule": schedule}, **config)


BALANCED = {"router_bias_update_rate": 0.01}
MUON = {"kind": "muon", "lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1}

# Run by `make test`: every axis and every trap once.
QUICK: tuple[Case, ...] = (
    _case("d2", "dense", "unequal token counts across ranks and micro-batches"),
    _case("d2", "tied", "tied embeddings with FSDP", gradient_reduction="per_microbatch"),
    _case("r2d2", "dense", "replicas"),
    _case("t2", "dense", "norms see a share of the tokens"),
    _case("t4", "few_kv", "fewer key heads than ranks"),
    _case("t4", "biased", "biases of shared key heads and of row products", "a padding token under TP"),
    _case("t2", "tied", "tied embeddings with TP", loss="fused"),
    _case("t2", "dense", "value head under TP", critic=True),
    _case("c2", "dense", "documents across a rank boundary", context_parallel="allgather"),
    _case("c2", "window", "documents across a rank boundary", context_parallel="ulysses"),
    _case("c4", "few_kv", "fewer key heads than context ranks", context_parallel="ulysses"),
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
    _case("d2e2", "moe", "statistics under recomputation", activation_checkpoint=FULL, **BALANCED),
    _case("t2", "moe", "router statistics counted once", **BALANCED),
    _case("t2", "shared", "shared experts under TP"),
    _case("(attn:d2t2|ffn:d1t2e2)", "routed", "the experts' output bias under ETP is added once", **BALANCED),
    _case("t2", "fp8", "scales of sharded operands, padding that changes none", fp8="tensorwise"),
    _case("c2", "fp8", "scales of tokens of several ranks", context_parallel="allgather", fp8="tensorwise"),
    _case("t2", "fp8", "scales of rows whose features are sharded", fp8="rowwise"),
    _case("(attn:t2|ffn:t2)", "fp8_moe", "scales of experts split by hidden features", fp8="tensorwise"),
    _case("(attn:t2|ffn:t2)", "fp8_moe", "scales of rows of experts split by hidden features", fp8="rowwise"),
    _case("d2t2", "few_kv", "Muon's matrices are sharded by rows and columns, or by one of them", optimizer=MUON),
    _case("d2t2e4", "moe", "Muon's experts stay whole", optimizer=MUON),
)

# The rest of the matrix, marked slow.
FURTHER: tuple[Case, ...] = (
    _case("d4", "bias", optimizer=MUON),
    _case("r2d2", "tied", "Muon's replicas share the work", optimizer=MUON),
    _case("d2p2t2", "dense", "Muon in each pipeline stage", optimizer=MUON),
    _case("d4c2", "dense", "Muon's matrices with fewer rows than ranks", optimizer=MUON),
    _case("d2", "dense", optimizer=MUON, cpu_offload=True),
    _case("d2e2", "moe", optimizer=MUON),
    _case("d4e2", "moe", "Muon's experts are dealt to the ranks that hold them", optimizer=MUON),
    _case("(attn:d2t2|ffn:d1t2e2)", "moe", "Muon's experts are split by hidden features", optimizer=MUON),
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
    _case("c2t2", "moe", "router statistics counted once", **BALANCED),
    _pipeline("d2p2", "interleaved_1f1b", "moe", "router statistics counted once", **BALANCED),
    _pipeline("p2", "1f1b", "moe"),
    _pipeline("d2p2e2", "zbv", "moe"),
    _pipeline("d2p2e2", "interleaved_1f1b", "tied_moe"),
    _pipeline("p2t2e2", "1f1b", "moe", dtype="float32"),
    _case("t2", "routed", "gate of the shared experts under TP"),
    _case("d2", "routed"),
    _case("c2", "tied_routed", context_parallel="allgather"),
    _case("d2e2", "routed", activation_checkpoint=FULL, **BALANCED),
    _case("(attn:d1t2|ffn:d1t2)", "routed"),
    _pipeline("p2", "1f1b", "tied_routed", **BALANCED),
    _case("(attn:d1t2|ffn:d1t2)", "glm4_moe"),
    _case("d2e2", "glm4_moe", **BALANCED),
    _pipeline("p2", "1f1b", "glm4_moe"),
    _case("t2", "minimax_m2"),
    _case("d2e2", "minimax_m2", **BALANCED),
    _case("d2e2", "mixtral", router_aux_loss_coef=0.1),
    _case("c2", "mixtral", context_parallel="ulysses"),
    _case("t2", "qwen2_moe"),
    _case("d2e2", "qwen2_moe", router_aux_loss_coef=0.1),
)

# Pairs of features that nothing above has, as many as possible in a case.
PAIRED: tuple[Case, ...] = (
    _case(
        "c2e2",
        "tied_moe",
        critic=True,
        context_parallel="allgather",
        activation_checkpoint=FULL,
        cpu_offload=True,
        gradient_reduction="per_microbatch",
        reshard_after_forward="always",
        router_aux_loss_coef=0.1,
    ),
    _case(
        "(attn:t2|ffn:t2)",
        "moe",
        activation_checkpoint=BY_OP,
        cpu_offload=True,
        gradient_reduction="per_microbatch",
        reshard_after_forward="never",
        loss="fused",
        router_aux_loss_coef=0.1,
    ),
    _case(
        "(attn:t2|ffn:t2)",
        "tied_moe",
        activation_checkpoint=BUDGET,
        compile=True,
        cpu_offload=True,
        gradient_reduction="per_microbatch",
        reshard_after_forward="always",
        loss="fused",
        router_aux_loss_coef=0.1,
    ),
    _case(
        "c2e2",
        "tied_moe",
        critic=True,
        context_parallel="allgather",
        activation_checkpoint=EVERY_SECOND,
        gradient_reduction="per_microbatch",
        reshard_after_forward="never",
        router_aux_loss_coef=0.1,
    ),
    _pipeline(
        "p2c2e2",
        "interleaved_1f1b",
        "moe",
        context_parallel="ulysses",
        activation_checkpoint=EVERY_SECOND,
        cpu_offload=True,
        reshard_after_forward="always",
        loss="fused",
    ),
    _case(
        "r2",
        "few_kv",
        critic=True,
        activation_checkpoint=BY_OP,
        cpu_offload=True,
        gradient_reduction="per_microbatch",
        reshard_after_forward="always",
    ),
    _case(
        "r2c2e2",
        "tied_moe",
        critic=True,
        context_parallel="allgather",
        activation_checkpoint=BUDGET,
        compile=True,
        reshard_after_forward="never",
        router_aux_loss_coef=0.1,
    ),
    _case(
        "c2e2",
        "moe",
        context_parallel="ulysses",
        activation_checkpoint=FULL,
        gradient_reduction="per_microbatch",
        reshard_after_forward="never",
        loss="fused",
    ),
    _pipeline(
        "p2c2",
        "1f1b",
        context_parallel="allgather",
        activation_checkpoint=BY_OP,
        cpu_offload=True,
        reshard_after_forward="never",
        loss="fused",
    ),
    _pipeline("(attn:p2t2|ffn:p2t2)", "interleaved_zero_bubble", "tied_moe", critic=True),
    _pipeline(
        "(attn:p2t2|ffn:p2t2)",
        "1f1b",
        "tied_moe",
        activation_checkpoint=EVERY_SECOND,
        reshard_after_forward="always",
        loss="fused",
    ),
    _pipeline("p2", "zbv", "few_kv", cpu_offload=True, loss="fused"),
    _pipeline(
        "p2c2e2",
        "interleaved_zero_bubble",
        "tied_moe",
        context_parallel="allgather",
        cpu_offload=True,
        reshard_after_forward="never",
    ),
    _pipeline(
        "(attn:p2t2|ffn:p2t2)",
        "interleaved_1f1b",
        "tied_moe",
        activation_checkpoint=FULL,
        reshard_after_forward="never",
        loss="fused",
    ),
    _pipeline(
        "r2p2", "interleaved_1f1b", critic=True, activation_checkpoint=EVERY_SECOND, compile=True, cpu_offload=True
    ),
    _pipeline("r2p2", "zbv", "few_kv", critic=True, reshard_after_forward="never"),
    _case("r2", "few_kv", activation_checkpoint=FULL, compile=True, reshard_after_forward="never"),
    _case(
        "c2e2",
        "moe",
        context_parallel="ulysses",
        activation_checkpoint=BY_OP,
        compile=True,
        cpu_offload=True,
        loss="fused",
        router_aux_loss_coef=0.1,
    ),
    _pipeline("r2p2", "interleaved_zero_bubble", "moe", cpu_offload=True, loss="fused"),
    _pipeline(
        "d2p2c2",
        "interleaved_1f1b",
        "tied",
        context_parallel="allgather",
        activation_checkpoint=BUDGET,
        compile=True,
        loss="fused",
    ),
    _case(
        "(attn:c2t2|ffn:d2t2)",
        "moe",
        context_parallel="ulysses",
        activation_checkpoint=BUDGET,
        compile=True,
        gradient_reduction="per_microbatch",
        reshard_after_forward="always",
    ),
    _pipeline("p2", "1f1b", "tied", activation_checkpoint=BUDGET, compile=True, reshard_after_forward="always"),
    _case(
        "(attn:r2t2|ffn:r2t2)", "tied_moe", activation_checkpoint=EVERY_SECOND, loss="fused", router_aux_loss_coef=0.1
    ),
    _case("(attn:c2t2|ffn:d2t2)", "moe", context_parallel="allgather", activation_checkpoint=EVERY_SECOND),
    _pipeline("p2c2", "zbv", "tied", critic=True, context_parallel="ulysses", cpu_offload=True),
    _pipeline("(attn:p2t2|ffn:p2t2)", "zbv", "tied_moe", loss="fused"),
    _pipeline("p2c2e2", "zbv", "moe", context_parallel="allgather", reshard_after_forward="never", loss="fused"),
)

# What families add to the shared decoder, each in every kind of layout; marked slow.
BLOCKS: tuple[Case, ...] = (
    _case("t2", "grown_queries"),
    _case("d2", "grown_queries"),
    _case("c2", "grown_queries", "query factors of a document across a rank boundary", context_parallel="allgather"),
    _case("c2", "grown_queries", context_parallel="ulysses"),
    _pipeline("p2", "1f1b", "grown_queries"),
    _case("t2", "norms_after", "norms over all heads under TP"),
    _case("t4", "norms_after_few_kv", "norms over all heads with fewer key heads than ranks"),
    _case("d2", "norms_after"),
    _case("c2", "norms_after", context_parallel="allgather"),
    _case("c2", "norms_after", context_parallel="ulysses"),
    _pipeline("p2", "1f1b", "norms_after"),
    _case("t2", "soft_capped", "a soft cap of logits under TP"),
    _case("t2", "soft_capped", "a soft cap of logits under TP", loss="fused"),
    _case("d2", "soft_capped", loss="fused"),
    _case("c2", "soft_capped", context_parallel="allgather"),
    _case("c2", "soft_capped", context_parallel="ulysses"),
    _pipeline("p2", "1f1b", "soft_capped"),
    _case("t2", "multiplied"),
    _case("d2", "multiplied"),
    _case("c2", "multiplied"),
    _pipeline("p2", "1f1b", "multiplied", "logits are divided on the last stage", loss="fused"),
    _case("t2", "ungated", "biases of the row-parallel matrices"),
    _case("d2", "ungated"),
    _case("c2", "ungated", context_parallel="ulysses"),
    _pipeline("p2", "1f1b", "ungated"),
    _case("t2", "layer_norms", "biases of norms"),
    _case("d2", "layer_norms"),
    _case("c2", "layer_norms", context_parallel="allgather"),
    _pipeline("p2", "1f1b", "layer_norms", loss="fused"),
    _case("t2", "parallel", "one normed input of attention and network, gathered twice"),
    _case("d2", "parallel"),
    _case("c2", "parallel", context_parallel="allgather"),
    _pipeline("p2", "1f1b", "parallel", loss="fused"),
    _case("t2", "layer_bases"),
    _pipeline("p2", "1f1b", "layer_bases", "each stage knows the RoPE bases of its layers"),
    _case("t2", "unrotated"),
    _case("d2", "unrotated"),
    _case("c2", "unrotated", context_parallel="allgather"),
    _pipeline("p2", "1f1b", "unrotated", "each stage knows which of its layers have positions"),
    _case("c2", "shared", "soft-capped scores", context_parallel="allgather"),
    _case("c2", "shared", "soft-capped scores", context_parallel="ulysses"),
    _case("t2", "sinks", "sinks of a rank's heads"),
    _case("d2", "sinks"),
    _case("d2", "sinks", "sinks in the operator of compiled code", compile=True),
    _case("c2", "sinks", "sinks see queries of every rank", context_parallel="allgather"),
    _case("c2", "sinks", "sinks of a rank's heads", context_parallel="ulysses"),
    _case("c2t2", "tied_sinks", "sinks of a rank's heads", context_parallel="ulysses"),
    _pipeline("p2", "1f1b", "tied_sinks", activation_checkpoint=FULL),
    _case("d2e2", "sinks", "biases of experts with EP"),
    _case("(attn:d1t2|ffn:d1t2)", "tied_sinks", "biases of experts split by hidden features"),
    _case("(attn:d2t2|ffn:d1t2e2)", "sinks", dtype="float32"),
    _case("t2", "partly_rotated", "queries, keys and values fused in the checkpoint, shards of heads"),
    _case("d2", "partly_rotated"),
    _case("c2", "partly_rotated", context_parallel="allgather"),
    _case("c2", "partly_rotated", context_parallel="ulysses"),
    _pipeline("p2", "1f1b", "partly_rotated"),
    _case("t2", "latent", "latents that the heads of all ranks expand"),
    _case("t2", "tied_latent", "latents that the heads of all ranks expand", compile=True),
    _case("d2", "latent", activation_checkpoint=BY_OP),
    _case("c2", "latent", "latents gathered in place of keys", context_parallel="allgather"),
    _case("c2", "tied_latent", "values wider than keys", context_parallel="ulysses"),
    _case("c2t2", "tied_latent", "latents gathered in place of keys", context_parallel="allgather"),
    _pipeline("p2", "1f1b", "tied_latent", activation_checkpoint=FULL),
    _case("d2e2", "latent"),
    _case("d2e2", "best_groups"),
    _case("(attn:d1t2|ffn:d1t2)", "best_groups"),
    _case("(attn:d1t2|ffn:d1t2)", "tied_latent"),
)

# Gated delta nets, whose states start anew in each document, and gated attention.
DELTA: tuple[Case, ...] = (
    _case("d2", "delta", activation_checkpoint=BY_OP),
    _case("t2", "tied_delta", "convolutions and decays of a rank's heads"),
    _case("t4", "few_key_delta", "fewer key heads than ranks"),
    _case("c2", "delta", "a convolution across a rank boundary", context_parallel="ulysses"),
    _case("c4", "few_key_delta", "fewer key heads than context ranks", context_parallel="ulysses"),
    _case("c2t2", "tied_delta", compile=True, context_parallel="ulysses"),
    _case("d2", "delta", "decays in float32", dtype="float32", gradient_reduction="per_microbatch"),
    _pipeline("p2", "1f1b", "tied_delta", activation_checkpoint=FULL),
    _case("d2e2", "qwen3_next"),
    _case("(attn:d1t2|ffn:d1t2)", "qwen3_next"),
)

# The layouts of the families with experts that the rows above do not have.
EXPERTS: tuple[Case, ...] = (
    _case("t2", "glm4_moe", "shared experts behind partly rotated heads"),
    _case("d2", "glm4_moe", gradient_reduction="per_microbatch"),
    _case("c2", "tied_glm4_moe", context_parallel="allgather", **BALANCED),
    _case("d2", "minimax_m2"),
    _case("c2", "tied_minimax_m2", "norms over all heads under CP", context_parallel="ulysses"),
    _case("(attn:d1t2|ffn:d1t2)", "tied_minimax_m2"),
    _pipeline("p2", "1f1b", "minimax_m2", "router statistics counted once", **BALANCED),
    _case("t2", "mixtral", activation_checkpoint=FULL),
    _case("d2", "untied_mixtral"),
    _case("(attn:d1t2|ffn:d1t2)", "untied_mixtral"),
    _pipeline("p2", "1f1b", "mixtral"),
    _case("d2", "tied_qwen2_moe"),
    _case("c2", "qwen2_moe", context_parallel="allgather"),
    _case("(attn:d1t2|ffn:d1t2)", "qwen2_moe", "gate of the shared experts under ETP"),
    _pipeline("p2", "1f1b", "tied_qwen2_moe"),
    _case("d2e2", "shared"),
    _pipeline("p2", "1f1b", "tied_shared", activation_checkpoint=FULL),
    _pipeline("p2", "1f1b", "tied_partly_rotated", activation_checkpoint=FULL),
)

# Adapters on frozen weights. Both parts of each begin as random numbers, so that both have a gradient; the classic
# mistakes, a sum over ranks that is missing or taken twice, show in the weights after several steps as well.
LORA = {"lora": {"rank": 3, "alpha": 5.0, "init": "random"}}
DROPOUT = {"lora": {**LORA["lora"], "dropout": 0.3}}
LATENT_DROPOUT = {"lora": {**DROPOUT["lora"], "targets": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}}
# Magnitudes that are the norms of their rows show no row of another rank: training moves them, in three steps.
DORA = {"lora": {**LORA["lora"], "dora": True}}
ATTENTION_DORA = {"lora": {**DORA["lora"], "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}}
DORA_DROPOUT = {"lora": {**DORA["lora"], "dropout": 0.3}}
# Whole modules next to a LoRA: norms see a shard of the tokens, embedding and head are split by the vocabulary.
SAVED = {
    "lora": {**LORA["lora"], "targets": ["q_proj", "o_proj"], "modules_to_save": ["norm", "lm_head", "embed_tokens"]}
}
SAVED_MATRICES = {"lora": {**LORA["lora"], "targets": ["q_proj"], "modules_to_save": ["k_proj", "o_proj", "down_proj"]}}
# Lookups and logits with a LoRA, whose rows are split by the vocabulary.
OUTER = {"lora": {**LORA["lora"], "targets": ["q_proj", "o_proj", "embed_tokens", "lm_head"]}}
# A quantized base: shards of codes and scales, and scales of scales that every rank has whole.
NF4_BASE = {"lora": {**LORA["lora"], "quantize_base": "nf4"}}
FP8_BASE = {"lora": {**LORA["lora"], "quantize_base": "fp8"}}
# The base has bfloat16's values, from a checkpoint in it, and the adapters have all digits.
NARROW_BASE = {"base": "bfloat16"}
LORA_CASES: tuple[Case, ...] = (
    _case("d2", "tied", **LORA),
    _case("t2", "dense", "an adapter's part that every rank has whole", **LORA),
    _case("t4", "few_kv", "adapters of key heads that ranks share", **LORA),
    _case("t4", "biased", "adapters of row products with biases", **LORA),
    _case("c2", "dense", context_parallel="allgather", **LORA),
    _case("c2t2", "tied", context_parallel="ulysses", **LORA),
    _pipeline("p2", "1f1b", "tied", "a tied matrix without a gradient", **LORA),
    _pipeline("p2t2", "interleaved_1f1b", activation_checkpoint=FULL, **LORA),
    _case("r2d2", "dense", compile=True, gradient_reduction="per_microbatch", **LORA),
    _case("d2", "moe", **LORA),
    _case("t2", "moe", **LORA),
    _case("d2e2", "moe", "adapters of the experts of a rank", **LORA),
    _case("(attn:d2t2|ffn:d1t2e2)", "moe", "adapters of experts split by hidden features", **LORA),
    _case("(attn:d1t2|ffn:d1t2)", "sinks", "adapters of experts with biases", **LORA),
    _case("t2", "latent", **LORA),
    _case("t2", "delta", **LORA),
    _case("t2", "dense", "features of a rank dropped as in one process", **DROPOUT),
    _case("c2t2", "tied", context_parallel="ulysses", **DROPOUT),
    _case("c2", "latent", context_parallel="allgather", **LATENT_DROPOUT),
    _case("t2", "latent", "rows of a rank dropped as in one process", **LATENT_DROPOUT),
    _pipeline("p2", "1f1b", "tied", activation_checkpoint=FULL, **DROPOUT),
    _case("d2", "blocks", "shards of a base in NF4", **NF4_BASE),
    _case("t2", "blocks", "rows and columns of a base in NF4", **NF4_BASE),
    _case("t4", "blocks", "key heads that ranks share in NF4", **NF4_BASE),
    _case("c2t2", "blocks", context_parallel="ulysses", activation_checkpoint=BY_OP, **NF4_BASE),
    _pipeline("p2", "1f1b", "blocks", activation_checkpoint=FULL, **NF4_BASE),
    _case("r2d2", "blocks", compile=True, gradient_reduction="per_microbatch", **NF4_BASE),
    _case("d2", "blocks", "shards of a base in FP8", **FP8_BASE),
    _case("t2", "blocks", "rows and columns of a base in FP8", **FP8_BASE),
    _pipeline("p2t2", "interleaved_1f1b", "blocks", activation_checkpoint=FULL, **FP8_BASE),
    _case("d2", "tied", **LORA, **NARROW_BASE),
    _case("t4", "few_kv", "adapters of key heads that ranks share", **LORA, **NARROW_BASE),
    _case("c2", "dense", context_parallel="allgather", **LORA, **NARROW_BASE),
    _pipeline("p2", "1f1b", "tied", **LORA, **NARROW_BASE),
    _case("d2e2", "moe", **LORA, **NARROW_BASE),
    _case("(attn:d2t2|ffn:d1t2e2)", "moe", **LORA, **NARROW_BASE),
    _case("d2", "tied", **DORA),
    _case("t2", "dense", "norms of rows with columns on several ranks", **DORA),
    _case("t4", "few_kv", "magnitudes of key heads that ranks share", **DORA),
    _case("t4", "biased", "biases that magnitudes do not scale", **DORA),
    _case("c2t2", "tied", context_parallel="ulysses", **DORA_DROPOUT),
    _pipeline("p2", "1f1b", "tied", activation_checkpoint=FULL, **DORA),
    _case("r2d2", "dense", compile=True, gradient_reduction="per_microbatch", **DORA),
    _case("d2e2", "moe", **ATTENTION_DORA),
    _case("(attn:d2t2|ffn:d1t2e2)", "moe", **ATTENTION_DORA),
    _case("d2", "tied", **DORA, **NARROW_BASE),
    _case("d2", "dense", "modules trained next to frozen ones of their FSDP group", **SAVED),
    _case("d2", "tied", gradient_reduction="per_microbatch", **SAVED, **NARROW_BASE),
    _case("t2", "dense", "trained norms that see a shard of the tokens", **SAVED),
    _case("t2", "tied", "a trained embedding tied to the head, split by the vocabulary", loss="fused", **SAVED),
    _case("t4", "biased", "trained biases", **SAVED_MATRICES),
    _case("t4", "few_kv", "whole key heads that ranks share", **SAVED_MATRICES),
    _case("c2", "dense", context_parallel="allgather", **SAVED),
    _case("c2t2", "tied", context_parallel="ulysses", **SAVED),
    _pipeline("p2", "1f1b", "tied", "a trained tied matrix on the first and the last stage", **SAVED),
    _pipeline("p2t2", "interleaved_1f1b", "dense", activation_checkpoint=FULL, **SAVED),
    _case("r2d2", "dense", compile=True, **SAVED),
    _case("d2e2", "moe", **SAVED),
    _case("d2", "dense", **OUTER),
    _case("d2", "dense", gradient_reduction="per_microbatch", loss="fused", **OUTER, **NARROW_BASE),
    _case("t2", "dense", "a LoRA of a vocabulary split over ranks", **OUTER),
    _case("t2", "dense", "a LoRA of a vocabulary split over ranks", loss="fused", **OUTER),
    _case("t4", "biased", "a padding token of another rank", **OUTER),
    _case("c2", "dense", context_parallel="allgather", **OUTER),
    _case("c2t2", "dense", context_parallel="ulysses", **OUTER),
    _pipeline("p2", "1f1b", "dense", "a LoRA of the embedding on the first stage", **OUTER),
    _pipeline("p2t2", "interleaved_1f1b", "dense", activation_checkpoint=FULL, **OUTER),
    _case("r2d2", "dense", compile=True, **OUTER),
    _case("d2e2", "moe", **OUTER),
)

# Several adapters in one batch, of different ranks, scales, targets and learning rates. A data-parallel rank has no
# document of "y", and "z" has some in the first step alone.
SEVERAL = {
    "lora": {
        "loras": {
            "x": {"rank": 3, "init": "random"},
            "y": {"rank": 5, "alpha": 2.0, "rslora": True, "init": "random", "optimizer": {"lr": 0.003}},
            "z": {"rank": 2, "init": "random"},
        }
    }
}
MULTI_LORA: tuple[Case, ...] = (
    _case("d2", "tied", "a rank without a document of an adapter", **SEVERAL),
    _case("t2", "few_kv", **SEVERAL),
    _case("c2", "dense", context_parallel="allgather", **SEVERAL),
    _case("c2t2", "tied", "adapters of the padding", context_parallel="ulysses", **SEVERAL),
    _pipeline("p2", "1f1b", "tied", **SEVERAL),
    _case("d2e2", "moe", "rows of several adapters sent to the ranks of their experts", **SEVERAL),
    _case("(attn:d2t2|ffn:d1t2e2)", "moe", **SEVERAL),
    _case("t2", "latent", **SEVERAL),
    _case("c2", "latent", context_parallel="allgather", **SEVERAL),
    _case("d2", "delta", loss="fused", **SEVERAL),
)

# Images, in the first step on one of two data-parallel ranks alone, in the second on the other, in the third on none.
TRAINED = {"vision": "trained"}
VISION_LORA = {"lora": {**LORA["lora"], "targets": ["q_proj", "visual.blocks.0.attn.qkv", "linear_fc2"]}}
VISION_LANGUAGE: tuple[Case, ...] = (
    _case("d2", "seeing", "images on one rank alone", **TRAINED),
    _case("d2", "seeing", "images on one rank alone"),
    _case("d2", "seeing", "images on one rank alone", **TRAINED, gradient_reduction="per_microbatch"),
    _case("d2", "seeing", activation_checkpoint=FULL, reshard_after_forward="always", **TRAINED),
    _case("t2", "seeing", "merged rows of a rank's tokens", **TRAINED),
    _case("t2", "seeing"),
    _case("c2", "seeing", "images across a rank boundary", context_parallel="ulysses", **TRAINED),
    _case("c2", "seeing", context_parallel="ulysses"),
    _case("c2", "seeing_attention", "images across a rank boundary", context_parallel="allgather", **TRAINED),
    _case("c2t2", "seeing", context_parallel="ulysses", **TRAINED),
    _pipeline("p2", "1f1b", "seeing", "positions on a stage without images", **TRAINED),
    _pipeline("p2", "1f1b", "seeing"),
    _pipeline("d2p2", "interleaved_1f1b", "seeing", "images on one rank alone", **TRAINED),
    _case("d2", "seeing", **LORA),
    _case("d2", "seeing", "adapters of the tower on one rank alone", **VISION_LORA),
    _case("t2", "seeing", "adapters of the tower", **VISION_LORA),
)

# The same, of a tower that also gives features to the first layers.
DEEPSTACK_LORA = {"lora": {**VISION_LORA["lora"], "targets": ["q_proj", "visual.deepstack_merger_list.1.linear_fc1"]}}
DEEPSTACK: tuple[Case, ...] = (
    _case("d2", "deepstack", "images on one rank alone", **TRAINED),
    _case("d2", "deepstack", "images on one rank alone"),
    _case("d2", "deepstack", activation_checkpoint=FULL, reshard_after_forward="always", **TRAINED),
    _case("t2", "deepstack", "features of a rank's tokens", **TRAINED),
    _case("t2", "deepstack"),
    _case("c2", "deepstack", "images across a rank boundary", context_parallel="ulysses", **TRAINED),
    _case("c2", "deepstack", "images across a rank boundary", context_parallel="allgather", **TRAINED),
    _case("c2", "deepstack", context_parallel="allgather"),
    _case("c2t2", "deepstack", context_parallel="ulysses", **TRAINED),
    _pipeline("p2", "1f1b", "deepstack", "features of layers of the first stage", **TRAINED),
    _pipeline("p2", "1f1b", "deepstack"),
    _pipeline("d2p2", "interleaved_1f1b", "deepstack", "images on one rank alone", **TRAINED),
    _pipeline("p2", "zbv", "deepstack", "weights' gradients apart from those of inputs", **TRAINED),
    _case("d2", "deepstack", **LORA),
    _case("d2", "deepstack", "adapters of the tower on one rank alone", **DEEPSTACK_LORA),
    _case("t2", "deepstack", "adapters of the tower", **DEEPSTACK_LORA),
    _case("d2", "windowed", "images on one rank alone", **TRAINED),
    _case("t2", "windowed", "features of a rank's tokens", **TRAINED),
    _case("c2", "windowed", "images across a rank boundary", context_parallel="allgather", **TRAINED),
    _pipeline("p2", "1f1b", "windowed", "positions on a stage without images", **TRAINED),
    _case("d2e2", "deepstack_moe", "images on one rank alone, next to experts of both", **TRAINED),
    _case("t2", "deepstack_moe", "features of a rank's tokens", **BALANCED, **TRAINED),
    _case("c2", "deepstack_moe", "images across a rank boundary", context_parallel="ulysses", **TRAINED),
    _pipeline("p2", "1f1b", "deepstack_moe", "features of layers of the first stage", **TRAINED),
)

# Documents that begin alike, whose common beginnings are computed once; the reference computes each document by itself.
BRANCHING = {"data": "branching", "max_tokens_per_mb": 340}
BRANCHES: tuple[Case, ...] = (
    _case("d2", "dense", "ranks share beginnings of different lengths", **BRANCHING),
    _case("d2", "few_kv", critic=True, **BRANCHING),
    _case("t2", "tied", "a beginning that no multiple of the ranks has", loss="fused", **BRANCHING),
    _case("t2", "window", critic=True, activation_checkpoint=FULL, **BRANCHING),
    _case("d2t2", "sinks", **BRANCHING),
    _case("d2", "moe", "routers count a beginning for each document", **BALANCED, **BRANCHING),
    _case("d2e2", "moe", "routers count a beginning for each document", router_aux_loss_coef=0.1, **BRANCHING),
    _case("t2", "moe", "routers count a beginning for each document", router_aux_loss_coef=0.1, **BRANCHING),
    _case("(attn:d1t2|ffn:d1t2)", "glm4_moe", **BALANCED, **BRANCHING),
    _case("c2", "tied", "a token is scored where its beginning is computed", context_parallel="ulysses", **BRANCHING),
    _case("c2t2", "moe", loss="fused", context_parallel="ulysses", **BALANCED, **BRANCHING),
    _case("c2", "dense", critic=True, context_parallel="ulysses", **BRANCHING),
    _pipeline("p2", "1f1b", "tied", "micro-batches padded to the most that one computes", **BRANCHING),
    _pipeline("d2p2", "interleaved_1f1b", "moe", **BALANCED, **BRANCHING),
    _case("t2", "latent", **BRANCHING),
    _case("d2", "soft_capped", compile=True, **BRANCHING),
    _case("t2", "moe", compile=True, **BRANCHING),
    _case("d2", "delta", "states after a branch", **BRANCHING),
    _case("t2", "qwen3_next", "states after a branch", **BALANCED, **BRANCHING),
    _case("c2", "tied_delta", "states after a branch", context_parallel="ulysses", **BRANCHING),
    _pipeline("p2", "1f1b", "delta", "states of padding", **BRANCHING),
    _case("d2", "seeing", "pictures of a common beginning", **TRAINED, **BRANCHING),
    _case("t2", "seeing", "pictures of a common beginning", **BRANCHING),
    _case("c2", "seeing", "pictures of a common beginning", context_parallel="ulysses", **TRAINED, **BRANCHING),
    _pipeline("p2", "1f1b", "seeing", "pictures of a common beginning", **TRAINED, **BRANCHING),
    _case("d2", "deepstack", "pictures of a common beginning", **TRAINED, **BRANCHING),
    _case("c2t2", "deepstack", "pictures of a common beginning", context_parallel="ulysses", **TRAINED, **BRANCHING),
    _case("t2", "tied", **LORA, **BRANCHING),
    _case("d2e2", "moe", **SEVERAL, **BRANCHING),
    _pipeline("p2t2", "1f1b", **SEVERAL, **BRANCHING),
)

# Batches with experts that were chosen before, for most tokens.
GIVEN = {"replay": True}
REPLAYED: tuple[Case, ...] = (
    _case("d2", "moe", gradient_reduction="per_microbatch", **GIVEN),
    _case("t2", "routed", "experts given for a rank's share of the tokens", **GIVEN, **BALANCED),
    _case("c2", "latent", "experts given for both chunks of a document", context_parallel="allgather", **GIVEN),
    _pipeline("p2", "interleaved_1f1b", "moe", "each stage finds the experts of its layers", **GIVEN, **BALANCED),
    _case("d2e2", "moe", **GIVEN, **LORA),
    _case("d2e2", "moe", "recomputation uses the experts given", activation_checkpoint=FULL, **GIVEN),
)


# 8-bit products: with one scale for all tokens of a micro-batch the reference is given the micro-batches of each rank.
def _fp8_cases(fp8: str) -> tuple[Case, ...]:
    return (
        _case("d2", "fp8", "ranks with scales of their own", fp8=fp8),
        _case(
            "d2t2",
            "fp8_tied",
            loss="fused",
            activation_checkpoint=FULL,
            cpu_offload=True,
            gradient_reduction="per_microbatch",
            reshard_after_forward="always",
            fp8=fp8,
        ),
        _case("r2", "fp8", critic=True, activation_checkpoint=BY_OP, reshard_after_forward="never", fp8=fp8),
        _case("c2t2", "fp8", "scales over two groups", context_parallel="ulysses", compile=True, fp8=fp8),
        _case("t2", "fp8", activation_checkpoint=BUDGET, compile=True, fp8=fp8),
        _pipeline("p2", "1f1b", "fp8_tied", "micro-batches padded to the longest change no scale", fp8=fp8),
        _pipeline("p2", "interleaved_1f1b", "fp8", activation_checkpoint=EVERY_SECOND, fp8=fp8),
        _pipeline("p2", "interleaved_zero_bubble", "fp8", fp8=fp8),
        _pipeline("p2t2", "zbv", "fp8_tied", fp8=fp8),
        _pipeline("p2", "interleaved_1f1b", "fp8", "blocks are inner by their place in the model", fp8=f"{fp8}_inner"),
        _case("d2", "fp8", "blocks of two kinds", compile=True, fp8=f"{fp8}_inner"),
        _case("t2", "fp8", "the frozen base alone is in 8 bits", fp8=fp8, **LORA),
        _case("d2", "fp8", fp8=fp8, **LORA, **NARROW_BASE),
        _case("d2", "fp8_moe", fp8=fp8),
        _case("t2", "fp8_moe_tied", fp8=fp8),
        _case("d2e2", "fp8_moe", "rows of several ranks", router_aux_loss_coef=0.1, fp8=fp8),
        _case("t2e2", "fp8_moe", fp8=fp8),
        _case("(attn:d2t2|ffn:d1t2e2)", "fp8_moe", fp8=fp8, **LORA),
        _case("t2", "fp8_delta", "gates of delta nets are not in 8 bits", fp8=fp8),
        _case("t2", "fp8_latent", "latents that each rank makes of its tokens", fp8=fp8),
    )


FP8 = _fp8_cases("tensorwise") + _fp8_cases("rowwise")
FP8 += (
    _case("c2", "fp8", context_parallel="allgather", fp8="rowwise"),
    _case("c2", "fp8_latent", "the expansion of gathered latents is not", context_parallel="allgather", fp8="rowwise"),
    _pipeline("p2c2", "1f1b", "fp8", "padding in both chunks", context_parallel="allgather", fp8="tensorwise"),
    _case("t2", "fp8_moe", "experts given for padding too", fp8="tensorwise", replay=True),
)

# Mamba-2, whose states start anew in each document, and attention without positions.
MAMBA: tuple[Case, ...] = (
    _case("d2", "mamba", activation_checkpoint=BY_OP),
    _case("t2", "tied_mamba", "convolutions, step sizes and group norms of a rank's heads"),
    _case("t2", "one_group_mamba", "a norm over the heads of all ranks"),
    _case("t4", "few_group_mamba", "a norm over the heads of two of four ranks"),
    _case("c2", "mamba", "a convolution with a bias across a rank boundary", context_parallel="ulysses"),
    _case("c4", "few_group_mamba", "fewer groups than context ranks", context_parallel="ulysses"),
    _case("c2t2", "mamba_moe", compile=True, context_parallel="ulysses"),
    _case("d2", "mamba", "step sizes in float32", dtype="float32", gradient_reduction="per_microbatch"),
    _pipeline("p2", "1f1b", "tied_mamba", activation_checkpoint=FULL),
    _case("d2e2", "mamba_moe"),
    _case("(attn:d1t2|ffn:d1t2)", "mamba_moe"),
    _case("t2", "mamba", **LORA),
    _case("d2", "tied_mamba", "states after a branch", **BRANCHING),
)

# Blocks of a mixer or a network alone, and experts without a gate, with and without latents.
ONE_PART: tuple[Case, ...] = (
    _case("d2", "one_part", activation_checkpoint=BY_OP),
    _case("t2", "one_part", "projections of a rank's share of the tokens"),
    _case("c2", "one_part", context_parallel="ulysses"),
    _case("c2t2", "one_part", compile=True, context_parallel="ulysses"),
    _case("d2e2", "one_part", **BALANCED),
    _case("t2e2", "one_part_wide"),
    _case("(attn:d1t2|ffn:d1t2)", "one_part", "latents gathered for experts that ranks share"),
    _case("d2e2", "one_part_wide", "experts in float32", dtype="float32", gradient_reduction="per_microbatch"),
    _pipeline("p2", "interleaved_1f1b", "one_part", "stages without a mixer", activation_checkpoint=FULL),
    _case("t2", "one_part", **LORA),
    _case("(attn:d1t2|ffn:d1t2)", "one_part_wide", **LORA),
    _case("d2", "one_part", "states after a branch", **BRANCHING),
    _case("d2", "one_part_wide", critic=True, **GIVEN),
)

BLOCKS += (
    DELTA
    + MAMBA
    + ONE_PART
    + FP8
    + EXPERTS
    + LORA_CASES
    + MULTI_LORA
    + VISION_LANGUAGE
    + DEEPSTACK
    + BRANCHES
    + REPLAYED
)
CASES = QUICK + FURTHER + PAIRED + BLOCKS
