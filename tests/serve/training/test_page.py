"""The page of the training service: what it knows, and what it tells whom. `browser` sees it in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("training_service")
tinker = pytest.importorskip("tinker")

from archon.serve.training.activity import POINTS, SECONDS, Activity  # noqa: E402
from tests.serve.training.conftest import running  # noqa: E402
from tests.serve.training.data import datum, rows  # noqa: E402
from tests.serve.training.test_numbers import adam  # noqa: E402


def get(url: str, **headers: str) -> tuple[int, dict[str, str], str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, dict(response.headers), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def test_the_page_asks_only_its_own_server(url: str) -> None:
    status, headers, text = get(f"{url}/")
    assert status == 200
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "connect-src 'self'", f"script-src 'sha256-{digest}'"} <= set(policy)
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert get(f"{url}/status", Host="example.com")[0] == 403


def test_the_status_has_sessions_models_and_losses(train: Callable[..., Any], url: str) -> None:
    client = train("tml-one", rank=3)
    losses = []
    for _ in range(3):
        result = client.forward_backward([datum(ids) for ids in rows()], "cross_entropy")
        client.optim_step(adam(learning_rate=1e-2)).result(30)
        losses.append(result.result(30).metrics["loss:sum"] / sum(len(ids) - 1 for ids in rows()))
    client.save_weights_and_get_sampling_client().result(30).sample(
        tinker.ModelInput.from_ints(rows()[0]), 2, tinker.SamplingParams(max_tokens=5, stop=[])
    ).result(30)
    status = json.loads(get(f"{url}/status")[2])
    [model] = [model for model in status["models"] if model["name"] == f"{client.model_id[:8]}:train:0"]
    assert (model["rank"], model["steps"], model["waiting"]) == (3, 3, 0)
    assert model["tokens"] == 3 * sum(len(ids) - 1 for ids in rows())
    assert [step for step, _ in model["losses"]] == [1, 2, 3]
    assert [loss for _, loss in model["losses"]] == pytest.approx(losses)
    [session] = [session for session in status["sessions"] if client.model_id.startswith(session["name"])]
    assert session["models"] == 1
    assert session["silent_seconds"] < 30
    assert (status["everyone"], status["queue"]["waiting"]) == (True, 0)
    assert len(status["tokens_per_second"]["trained"]) == SECONDS


def test_rates_and_curves_are_bounded() -> None:
    now = [1000.0]
    activity = Activity(clock=lambda: now[0])
    for step in range(3 * POINTS):
        activity.trained("a", 2.0 * step, 4)
        activity.trained("a", 2.0 * step, 4)
        activity.stepped("a")
        activity.sampled(5)
        now[0] += 1
    curve, rates = activity.curve("a"), activity.rates()
    assert (curve["steps"], curve["tokens"]) == (3 * POINTS, 24 * POINTS)
    assert POINTS / 2 <= len(curve["losses"]) <= POINTS
    assert all(loss == pytest.approx((step - 1) / 2) for step, loss in curve["losses"])  # of the last step alone
    assert rates == {"trained": [8] * SECONDS, "sampled": [5] * SECONDS}
    assert len(activity._tokens["trained"]) <= SECONDS + 1
    activity.remove("a")
    assert activity.curve("a") == {"steps": 0, "tokens": 0, "losses": []}


@pytest.mark.slow
def test_a_client_sees_only_its_own_sessions(base: Path, tmp_path: Path) -> None:
    with running(base, tmp_path / "state", "--token", "tml-one", "--token", "tml-two") as (url, _):
        for name in ("one", "two"):
            service = tinker.ServiceClient(base_url=url, api_key=f"tml-{name}")
            service.create_lora_training_client(str(base), rank=2).result(30)
        assert get(f"{url}/")[0] == 200  # which has no data
        assert get(f"{url}/status")[0] == get(f"{url}/status", **{"X-API-Key": "tml-three"})[0] == 401
        statuses = [json.loads(get(f"{url}/status", **{"X-API-Key": f"tml-{name}"})[2]) for name in ("one", "two")]
        for status in statuses:
            assert (len(status["sessions"]), len(status["models"]), status["everyone"]) == (1, 1, False)
        assert statuses[0]["models"][0]["client"] != statuses[1]["models"][0]["client"]
