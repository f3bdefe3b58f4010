"""Every pair of features is in the gradient matrix, or the engine refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.schema.errors import ConfigError
from archon.tools.check.layouts import LENGTHS
from tests.distributed.cases import batch, engine_config, loss_of, write_config
from tests.distributed.features import FEATURES, PAIRS, REFUSED, features, pairs, refused_case
from tests.distributed.matrix_cases import CASES, QUICK


def test_every_pair_of_features_occurs_or_is_refused() -> None:
    met = set().union(*map(pairs, CASES))
    missing = [f"{first} with {second}" for first, second in PAIRS if (first, second) not in met | REFUSED.keys()]
    assert missing == []
    assert met.isdisjoint(REFUSED)


@pytest.mark.parametrize("pair", REFUSED, ids=" with ".join)
def test_a_pair_that_occurs_in_no_case_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    case = refused_case(pair)
    assert features(case) >= set(pair)
    path = write_config(tmp_path, case.model)
    engine = ArchonEngine(engine_config(case, path, case.layout, init_from_scratch=True))

    def run() -> None:
        engine.initialize()
        engine.train_batch(batch(LENGTHS, seed=1), loss_of(case), loss_token_count)

    with pytest.raises(ConfigError, match=REFUSED[pair]):
        run()


def test_the_quick_cases_meet_every_axis_of_a_layout() -> None:
    options = {name for name in FEATURES if name.startswith(("recompute", "memory", "compile", "cpu_", "reshard"))}
    assert set().union(*map(features, QUICK)) >= FEATURES.keys() - options
