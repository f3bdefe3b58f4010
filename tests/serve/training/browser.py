"""The page of the training service in a real browser, while clients train.

    make test-browser
    python -m tests.serve.training.browser --out FOLDER    # screenshots at two widths, light and dark

Needs Chromium; a machine without one is told so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import tinker

from tests.serve.training.conftest import make_base, running
from tests.serve.training.data import datum, rows
from tests.serve.training.test_numbers import adam
from tests.tools.report.chromium import Page

HOSTILE = '<img src=x onerror="alert(1)"><b>bold</b>'
SIZES = {"wide": (1280, 900), "phone": (390, 844)}


def text(page: Page, selector: str) -> str:
    found: str = page.run(f"document.querySelector({json.dumps(selector)}).innerText")
    return found


def wait_for(page: Page, condition: str) -> None:
    """Wait until an expression of the page is true; it asks the server every two seconds."""
    deadline = time.monotonic() + 20
    while not page.run(condition):
        assert time.monotonic() < deadline, (condition, text(page, "body")[:500])
        time.sleep(0.1)


def train(url: str, base: Path, key: str, name: str, steps: int) -> Any:
    service = tinker.ServiceClient(base_url=url, api_key=key, display_name=name)
    client = service.create_lora_training_client(str(base), rank=4).result(30)
    for _ in range(steps):
        client.forward_backward([datum(ids) for ids in rows()], "cross_entropy")
        client.optim_step(adam(learning_rate=1e-2)).result(30)
    sampler = client.save_weights_and_get_sampling_client().result(30)
    sampler.sample(tinker.ModelInput.from_ints([1, 2]), 4, tinker.SamplingParams(max_tokens=40, stop=[])).result(30)
    return client


def check_page(page: Page, url: str, base: Path, out: Path) -> None:
    """A server without tokens shows all clients, live, on a desk and on a phone."""
    page.open(f"{url}/")
    wait_for(page, "document.body.innerText.includes('there is no model')")
    first = train(url, base, "tml-one", HOSTILE, 30)
    train(url, base, "tml-two", "second", 3)
    wait_for(page, "document.querySelectorAll('#charts .chart').length === 4")
    assert HOSTILE in text(page, "#sessions")
    assert page.run("document.querySelectorAll('#sessions img, #sessions b').length") == 0
    assert "30" in text(page, "#models")
    points = page.run("[...document.querySelectorAll('.chart path')].map(p => p.getAttribute('d').split('L').length)")
    assert sorted(points)[:2] == [3, 30], points
    first.forward_backward([datum(ids) for ids in rows()], "cross_entropy")
    first.optim_step(adam()).result(30)
    wait_for(page, "document.querySelector('#models').innerText.includes('31')")  # without a reload
    print("ok  sessions, models, losses and rates are live, and names are only text")
    for name, (width, height) in SIZES.items():
        page.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=name == "phone",
        )
        for scheme in ("light", "dark"):
            page.dark(scheme == "dark")
            page.screenshot(out / f"page-{name}-{scheme}.png")
            assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} scrolls sideways"
            colors = page.run(
                "['color', 'backgroundColor'].map(p => getComputedStyle(document.body)[p].match(/\\d+/g).map(Number))"
            )
            assert (sum(colors[0]) > sum(colors[1])) == (scheme == "dark"), colors
    print("ok  it fits a desk and a phone, light and dark")


def check_key(page: Page, url: str, base: Path) -> None:
    """A server with tokens asks for the key, and shows that client's sessions."""
    train(url, base, "tml-one", "mine", 1)
    train(url, base, "tml-two", "not mine", 1)
    page.open(f"{url}/")
    wait_for(page, "getComputedStyle(document.forms[0]).display === 'flex'")
    assert "not one of the server's tokens" in text(page, "#facts")
    page.run("(() => { document.forms[0].key.value = 'tml-one'; document.querySelector('button').click(); })()")
    wait_for(page, "document.querySelector('#sessions').innerText.includes('mine')")
    assert "not mine" not in text(page, "#sessions")
    assert page.run("document.querySelectorAll('#charts .chart').length") == 3
    assert page.run("getComputedStyle(document.forms[0]).display") == "none"
    print("ok  a key shows the sessions of its client alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/browser"), help="folder of the screenshots")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Page() as page:
        base = make_base(Path(folder) / "base")
        urls = []
        with running(base, Path(folder) / "open") as (url, _):
            urls.append(url)
            check_page(page, url, base, out)
            page.open("about:blank")  # it would ask a server that has ended
        with running(base, Path(folder) / "tokens", "--token", "tml-one", "--token", "tml-two") as (url, _):
            urls.append(url)
            check_key(page, url, base)
        asked = {entry["request"]["url"] for entry in page.reported("Network.requestWillBeSent")}
        outside = [address for address in asked if not address.startswith((*urls, "data:"))]
        assert not outside, outside
        wrong = page.reported("Runtime.exceptionThrown")
        wrong += [entry for entry in page.reported("Log.entryAdded") if "401" not in str(entry)]
        assert not wrong, wrong
        print(f"ok  no request elsewhere, no exception, no complaint of the content security policy: {page.version}")


if __name__ == "__main__":
    main()
