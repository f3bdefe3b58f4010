"""No config field is ignored: removed or changed, it alters the outputs as transformers' do, or is rejected by name."""

from __future__ import annotations

import pytest

from archon.check.family import REFERENCES
from archon.check.silent_defaults import STYLES, Style, field_outcomes
from archon.models.spec import FAMILIES


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_counts_as_in_transformers_or_is_rejected(family: str, style: Style) -> None:
    outcomes, wrong = field_outcomes(family, style, REFERENCES.get(family))
    assert wrong == []
    assert outcomes["equal"] >= 20 and outcomes["rejected"] >= 10, "the variants say little"
