"""Mistakes in latent attention: gradients, scales, expanded and absorbed keys, pages."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX
from tests.mutants.mutant import Mutant

LATENT = "tests/models/test_latent_attention.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the gradient of latents is doubled",
        "models/layers/latent_attention.py",
        "        rows = torch.cat((self.kv_a_norm(latents), k_rot), dim=-1)\n",
        "        rows = torch.cat((self.kv_a_norm(latents), k_rot), dim=-1)\n        rows = 2 * rows - rows.detach()\n",
        (f"{LATENT}::test_output_and_gradients_are_those_of_the_equations",),
    ),
    Mutant(
        "scores are multiplied by YaRN's factor, not by its square",
        "models/layers/latent_attention.py",
        "self.q_features**-0.5 * factor**2",
        "self.q_features**-0.5 * factor",
        (f"{LATENT}::test_the_scale_has_the_square_of_yarns_factor",),
    ),
    Mutant(
        "values are expanded with the rows of keys",
        "models/attention/latent.py",
        "self._matrices()[:, self.key_features :]",
        "self._matrices()[:, : self.value_features]",
        (f"{LATENT}::test_decoding_from_latents_is_the_packed_forward",),
    ),
    Mutant(
        "the values among paged latents are their last features",
        "models/attention/paged_cache.py",
        "keys[..., : rows.value_features]",
        "keys[..., -rows.value_features :]",
        (f"{LATENT}::test_decoding_from_latents_is_the_packed_forward",),
    ),
    Mutant(
        "latents have the gradient of one rank's heads",
        "models/layers/latent_attention.py",
        "from archon.parallel.comm import Group, all_gather\n",
        "from archon.parallel.comm import Group, all_gather_replicated as all_gather\n",
        (f"{FURTHER_MATRIX}[latent-t2-float64]",),
    ),
)
