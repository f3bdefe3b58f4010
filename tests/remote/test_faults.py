"""A sample of `benchmarks.faults`: real servers that are killed, stopped, cut off and made to lie, and a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import KINDS, faults, is_good


@pytest.mark.slow
def test_a_run_trains_every_prompt_once_on_right_tokens_whatever_happens_to_its_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.faults.SECONDS", 3.0)
    *events, outcome = faults(tmp_path, len(KINDS) + 1)
    assert is_good(outcome), outcome
    kinds = [event["kind"] for event in events]
    assert kinds == [*KINDS, "disk"] or (kinds == [*KINDS, kinds[-1]] and not outcome["ended_by_full_disk"])
    assert outcome["ended_by_full_disk"] == kinds.count("disk")
    assert outcome["servers_lost"] >= 1 and outcome["requests_retried"] >= 1
