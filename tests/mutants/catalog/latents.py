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
        "models/attention/decode/paged_cache.py",
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
    Mutant(
        "latent queries do not grow with their position",
        "models/layers/latent_attention.py",
        "        if rotation.query_scale is not None:\n            q_THK = q_THK * rotation.query_scale\n",
        "",
        ("tests/models/test_latent_attention.py::test_output_and_gradients_are_those_of_the_equations",),
    ),
    Mutant(
        "latent queries grow with their position only without a query latent",
        "models/layers/latent_attention.py",
        "if rotation.query_scale is not None:",
        "if rotation.query_scale is not None and self.wq is not None:",
        ("tests/models/test_latent_attention.py::test_output_and_gradients_are_those_of_the_equations",),
    ),
    Mutant(
        "latent queries grow with their position only with a query latent",
        "models/layers/latent_attention.py",
        "if rotation.query_scale is not None:",
        "if rotation.query_scale is not None and self.wq is None:",
        ("tests/models/test_latent_attention.py::test_output_and_gradients_are_those_of_the_equations",),
    ),
    Mutant(
        "rotated features of latent queries do not grow",
        "models/layers/latent_attention.py",
        "            q_THK = q_THK * rotation.query_scale\n",
        "            q_THK = torch.cat((q_THK[..., : s.key_features] * rotation.query_scale, q_rot), dim=-1)\n",
        ("tests/models/test_latent_attention.py::test_output_and_gradients_are_those_of_the_equations",),
    ),
    Mutant(
        "latent attention leaves out YaRN's factor of the scores",
        "models/layers/latent_attention.py",
        "self.spec = AttentionSpec(scale=s.scale)",
        "self.spec = AttentionSpec(scale=s.q_features**-0.5)",
        ("tests/models/test_latent_attention.py::test_output_and_gradients_are_those_of_the_equations",),
    ),
    Mutant(
        "a disabled adapter is in absorbed matrices",
        "models/attention/latent.py",
        "if lora is not None and lora.enabled and not",
        "if lora is not None and not",
        ("tests/models/test_latent_attention.py::test_absorbed_matrices_have_the_adapter_while_it_is_enabled",),
    ),
    Mutant(
        "disabled adapters of several are in absorbed matrices",
        "models/attention/latent.py",
        "several is None or not several.enabled",
        "several is None",
        ("tests/models/test_latent_attention.py::test_absorbed_matrices_have_the_adapter_while_it_is_enabled",),
    ),
)
