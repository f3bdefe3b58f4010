"""No config field is ignored: removed or changed, it alters the outputs as transformers' do, or is rejected by name."""

from __future__ import annotations

import pytest

from archon.models.spec import FAMILIES
from archon.tools.check.family import REFERENCES
from archon.tools.check.silent_defaults import field_outcomes


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_counts_as_in_transformers_or_is_rejected(family: str) -> None:
    outcomes, wrong = field_outcomes(family, "transformers 5", REFERENCES.get(family))
    assert wrong == []
    assert outcomes["equal"] >= 20 and outcomes["rejected"] >= 10, "the variants say little"


@pytest.mark.parametrize("family", FAMILIES)
def test_so_do_the_fields_that_published_configs_write_otherwise(family: str) -> None:
    """The other fields are in the sweep of `make test-models`, in this style as well."""
    outcomes, wrong = field_outcomes(family, "hub", REFERENCES.get(family), restyled_only=True)
    assert wrong == []
    assert outcomes["equal"] >= 10 and outcomes["rejected"] >= 3, "the variants say little"
