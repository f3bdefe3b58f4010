"""Mistakes in the record of a generator's experts and in its replay."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GENERATOR, RUN = "tests/generation/test_expert_record.py", "tests/rl/test_router_replay.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a token is given the experts of the next one",
        "archon/engine/batch.py",
        "to_replay(record.flatten(0, 1)[source])",
        "to_replay(record.flatten(0, 1)[source].roll(-1, 0))",
        (f"{RUN}::test_experts_are_of_the_token_that_is_read_and_padding_and_packing_change_nothing",),
    ),
    Mutant(
        "load balancing counts the experts that a router would have chosen",
        "models/layers/moe.py",
        ".scatter_add_(0, experts.flatten(), ones",
        ".scatter_add_(0, self._choose(scores).flatten(), ones",
        ("tests/models/test_router.py::test_given_experts_are_weighed_by_the_scores_of_now_and_counted",),
    ),
    Mutant(
        "the experts given are weighed as those that the router would have chosen",
        "models/layers/moe.py",
        "weights = p.gather(-1, experts)",
        "weights = p.gather(-1, self._choose(scores))",
        ("tests/models/test_router.py::test_given_experts_are_weighed_by_the_scores_of_now_and_counted",),
    ),
    Mutant(
        "after a change of weights the experts of answered tokens are recorded anew",
        "archon/generation/sequence.py",
        "kept=self.total - 1 if self.output else 0",
        "kept=0",
        (
            f"{GENERATOR}::test_after_a_change_of_weights_a_token_keeps_the_experts_that_its_next_token_was_sampled_with",
        ),
    ),
    Mutant(
        "the reference uses the policy's experts",
        "rl/update.py",
        "if engine is not self.engine:",
        "if False:",
        (f"{RUN}::test_the_policy_uses_the_experts_and_the_reference_chooses_for_itself",),
    ),
    Mutant(
        "tokens of padding and of answers without a record use expert 0",
        "rl/trajectories.py",
        "fill = unknown_expert_id(values[0].dtype)",
        "fill = 0",
        (f"{RUN}::test_padding_of_joined_trajectories_is_unknown",),
    ),
    Mutant(
        "a server's experts are taken of its first layers",
        "archon/generation/expert_record.py",
        "reported[:, list(args.expert_layers)]",
        "reported[:, :layers]",
        ("tests/remote/test_experts.py::test_experts_of_all_layers_are_those_of_the_layers_with_experts",),
    ),
    Mutant(
        "255 is unknown in a uint16 record too",
        "models/layers/routed_experts.py",
        "wide.masked_fill(wide == unknown_expert_id(record.dtype), UNKNOWN_EXPERT)",
        "wide.masked_fill(wide == unknown_expert_id(torch.uint8), UNKNOWN_EXPERT)",
        ("tests/rl/test_router_replay.py::test_an_unknown_token_has_the_largest_index_of_its_dtype",),
    ),
    Mutant(
        "255 and 65535 are unknown in a uint16 record",
        "models/layers/routed_experts.py",
        "wide.masked_fill(wide == unknown_expert_id(record.dtype), UNKNOWN_EXPERT)",
        "wide.masked_fill((wide == unknown_expert_id(record.dtype)) | (wide == 255), UNKNOWN_EXPERT)",
        ("tests/rl/test_router_replay.py::test_an_unknown_token_has_the_largest_index_of_its_dtype",),
    ),
    Mutant(
        "experts in another order count as changed",
        "models/layers/moe.py",
        "(experts.sort(-1).values != chosen.sort(-1).values).any(-1)",
        "(experts != chosen).any(-1)",
        ("tests/models/test_router.py::test_the_same_experts_in_another_order_are_not_counted_as_changed",),
    ),
    Mutant(
        "only the first expert of a token counts as changed",
        "models/layers/moe.py",
        "(experts.sort(-1).values != chosen.sort(-1).values).any(-1)",
        "experts.sort(-1).values[:, 0] != chosen.sort(-1).values[:, 0]",
        ("tests/models/test_router.py::test_the_same_experts_in_another_order_are_not_counted_as_changed",),
    ),
    Mutant(
        "tokens with a known and an unknown expert are accepted",
        "models/layers/routed_experts.py",
        "partial = known.any(-1) & ~known.all(-1)",
        "partial = known.any(-1) & ~known.any(-1)",
        ("tests/rl/test_router_replay.py::test_experts_of_another_model_are_refused",),
    ),
    Mutant(
        "an unknown first expert hides the others",
        "models/layers/routed_experts.py",
        "partial = known.any(-1) & ~known.all(-1)",
        "partial = known[..., 0] & ~known.all(-1)",
        ("tests/rl/test_router_replay.py::test_experts_of_another_model_are_refused",),
    ),
    Mutant(
        "only neighboring repeated experts are refused",
        "models/layers/routed_experts.py",
        "for shift in range(1, top_k):",
        "for shift in range(1, min(top_k, 2)):",
        (
            "tests/distributed/test_unequal_shards.py::test_a_share_that_one_rank_refuses_is_refused_by_all[d2e2-train_batch-repeated_expert]",
        ),
    ),
    Mutant(
        "unknown tokens count as repeated experts",
        "models/layers/routed_experts.py",
        "& known[..., shift:]).any(-1)",
        ").any(-1)",
        ("tests/rl/test_router_replay.py::test_a_run_trains_with_the_generators_experts",),
    ),
    Mutant(
        "uint16 experts above 32767 wrap to unknown",
        "models/layers/routed_experts.py",
        "if wide.numel() and int(wide.max()) >= _MAX_EXPERTS:",
        "if False:",
        ("tests/rl/test_router_replay.py::test_experts_of_another_model_are_refused",),
    ),
    Mutant(
        "one rank alone refuses replayed experts",
        "archon/engine/engine.py",
        "if packed.routed_experts is not None:\n                check_replay",
        "if packed.routed_experts is not None and self.ranks.dp.size == 1:\n                check_replay",
        (
            "tests/distributed/test_unequal_shards.py::test_a_share_that_one_rank_refuses_is_refused_by_all[d2e2-train_batch-partial_experts]",
        ),
    ),
)
