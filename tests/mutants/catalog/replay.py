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
        "(FIELD,) if engine is self.engine else ()",
        "(FIELD,)",
        (f"{RUN}::test_the_policy_uses_the_experts_and_the_reference_chooses_for_itself",),
    ),
    Mutant(
        "tokens of padding and of answers without a record use expert 0",
        "rl/trajectories.py",
        "fill = unknown(values[0].dtype)",
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
)
