"""Mistakes in multi-token prediction: shifted tokens, detached trunk, denominators, names."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = "tests/engine/test_mtp.py"
LOOP = f"{TESTS}::test_a_loop_over_documents_agrees_in_float64[24]"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "an MTP layer reads the token of its position",
        "archon/engine/batch.py",
        "return self.tokens[following], ",
        "return self.tokens, ",
        (LOOP,),
    ),
    Mutant(
        "the targets of an MTP layer cross into the next document",
        "archon/engine/batch.py",
        "torch.where(index + layer < ends, index + layer, index)",
        "torch.where(index + layer < self.n_tokens, index + layer, index)",
        (LOOP,),
    ),
    Mutant(
        "an MTP layer concatenates the hidden state before the embedding",
        "models/mtp.py",
        "torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1)",
        "torch.cat((self.hnorm(hidden), self.enorm(embedding)), dim=-1)",
        (LOOP,),
    ),
    Mutant(
        "MTP layers train the trunk",
        "models/base.py",
        "hidden, losses = hidden.detach(), []",
        "hidden, losses = hidden, []",
        (
            LOOP,
            f"{TESTS}::test_the_trunk_trains_bitwise_as_without_mtp[{{'activation_checkpoint': {{'mode': 'full'}}}}]",
        ),
    ),
    Mutant(
        "MTP layers train the head",
        "models/base.py",
        "rows=rows, detached=True",
        "rows=rows, detached=False",
        (
            LOOP,
            f"{TESTS}::test_the_trunk_trains_bitwise_as_without_mtp[{{'activation_checkpoint': {{'mode': 'full'}}}}]",
        ),
    ),
    Mutant(
        "the gradient norm of the trunk counts MTP layers",
        "archon/engine/engine.py",
        "mtp = {name: named.pop(name) for",
        "mtp = {name: named[name] for",
        (f"{TESTS}::test_the_trunk_trains_bitwise_as_without_mtp[{{'activation_checkpoint': {{'mode': 'full'}}}}]",),
    ),
    Mutant(
        "an export leaves the MTP layers of the source",
        "archon/engine/engine_io.py",
        "adapter=self.adapter if self.args.n_mtp_layers else None,",
        "adapter=None,",
        (f"{TESTS}::test_export_has_trained_layers_and_untouched_ones_are_bitwise[deepseek_v3]",),
    ),
    Mutant(
        "a copy of the head in an MTP layer keeps its old values",
        "models/hf/state_dict.py",
        "if hf in (keys or ())}",
        "if hf in (keys or ()) and not hf}",
        (f"{TESTS}::test_copies_of_embedding_and_head_follow_the_trunk[False]",),
    ),
    Mutant(
        "layers of the trunk count as MTP layers",
        "models/hf/mtp.py",
        "sum(layer >= n_layers * self.counts_from_trunk for layer in numbers)",
        "len(numbers)",
        (f"{TESTS}::test_counting_layers_takes_one_pass_over_the_keys_of_deepseek_v3",),
    ),
    Mutant(
        "a reference ignores its own mtp_loss_weight",
        "archon/schema/config.py",
        "{**defaults, **changes, **fixed}",
        "{**changes, **defaults, **fixed}",
        (f"{TESTS}::test_the_reference_and_the_critic_of_a_model_with_mtp_have_none",),
    ),
)
