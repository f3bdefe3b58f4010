"""The report shows what a run recorded, asks nothing of the network and trusts no text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from archon.schema.errors import ConfigError, DatasetError, UserError
from archon.tools.report import load_run, render_page, write_report
from archon.tools.report.curves import moving_average
from archon.tools.report.metric_titles import TITLES, metric_title
from archon.tools.report.page_server import ReportServer
from archon.training.metrics import MetricsWriter, TrajectoryWriter

HOSTILE = '</script><script>alert(1)</script><!-- <img src=x onerror="alert(2)"> \u2028 7√3 {{data}}'


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run <b>"
    folder.mkdir()
    with closing(MetricsWriter(folder / "metrics.jsonl")) as writer:
        writer.write(0, {"eval/reward": 0.25})
        for step in range(1, 61):
            writer.write(
                step,
                {
                    "reward": step / 60,
                    "loss": "NaN" if step == 7 else 1 / step,
                    "approx_kl": 1e-4,
                    "length": 5.0,
                    "samples_per_second": 300.0,
                    "grad_norm": 1.0 + step,
                    "never_changes": 4,
                },
            )
    with closing(TrajectoryWriter(folder / "trajectories.jsonl")) as writer:
        for step in (1, 2):
            for sample in range(4):
                text = HOSTILE if sample == 3 else str(sample)
                writer.write(step, 17, "1+2=", text, float(sample == 3), length=sample + 1, answer="3", tokens=["3"])
    (folder / "config.yaml").write_text("run_dir: '<i>here</i>'\n")
    return folder


def page_data(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_every_curve_is_drawn_as_png(run_dir):
    written = {path.name: path for path in write_report(run_dir)}
    assert set(written) == {"report.html", "reward.png", "loss.png", "kl.png", "length.png", "throughput.png"}
    for name, path in written.items():
        if name.endswith(".png"):
            image = Image.open(path)
            assert image.format == "PNG" and min(image.size) >= 500


def test_the_page_holds_the_recorded_numbers(run_dir):
    data = page_data(render_page(load_run(run_dir)))
    panels = {panel["title"]: {series["name"]: series for series in panel["series"]} for panel in data["panels"]}
    reward = panels["Reward"]
    assert reward["eval/reward"]["steps"] == [0] and reward["eval/reward"]["values"] == [0.25]
    assert reward["reward"]["steps"][-1] == 60 and reward["reward"]["values"][-1] == 1.0
    assert panels["Loss"]["loss"]["values"][5:8] == [0.166667, None, 0.125], "NaN is a gap, not a zero"
    assert [panel["title"] for panel in data["further"]] == ["grad_norm"]
    assert data["steps"] == 60


def test_the_charts_of_troubles_are_shown_once_there_are_any(tmp_path):
    quiet = {"staleness_mean": 0.0, "clip_fraction": 0.0, "rollout/dropped/reward_raised": 0.0, "truncated": 0.0}
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer:
        writer.write(1, {"reward": 0.0, "advantage_mean": 0.0, "seconds/rollout": 0.5, "seconds/update": 1.0} | quiet)
        assert [panel.name for panel, _ in load_run(tmp_path).panels()] == ["reward", "advantage", "seconds"]
        writer.write(2, {"staleness_mean": 0.5, "rollout/dropped/reward_raised": 2.0})
    charts = {panel.name: [s.name for s in series] for panel, series in load_run(tmp_path).panels()}
    assert charts["staleness"] == ["staleness_mean"]
    assert charts["failures"] == ["rollout/dropped/reward_raised"]
    assert "clip" not in charts and "lost" not in charts
    assert charts["seconds"] == ["seconds/rollout", "seconds/update"]


def test_a_run_on_servers_has_a_section_of_its_fleet_and_others_have_none(tmp_path):
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer:
        for step in (1, 2):
            writer.write(step, {"reward": 0.0, "push/bytes": 100.0 * step})
        data = page_data(render_page(load_run(tmp_path)))
        assert not data["fleet"] and [panel["title"] for panel in data["further"]] == ["push/bytes"]
        fleet = {"push/servers": 2.0, "push/seconds": 0.5, "push/difference": 1e-6, "servers/lost": 1.0}
        writer.write(3, fleet | {"servers/0/answers": 7.0, "servers/1/answers": 5.0, "push/bytes": 1.0})
    data = page_data(render_page(load_run(tmp_path)))
    drawn = {panel["title"]: [series["name"] for series in panel["series"]] for panel in data["fleet"]}
    assert drawn["Answers of each server"] == ["servers/0/answers", "servers/1/answers"]
    assert drawn["Size of a push"] == ["push/bytes"] and not data["further"]
    assert {"Servers in the fleet", "Verified |Δ logprob| of a push", "Time of a push"} <= drawn.keys()
    assert [panel["title"] for panel in data["panels"]] == ["Reward"]


def test_trajectories_of_a_prompt_stand_together(run_dir):
    groups = page_data(render_page(load_run(run_dir)))["groups"]
    assert [len(group) for group in groups] == [4, 4]
    assert [record["reward"] for record in groups[0]] == [0, 0, 0, 1]
    assert groups[1][3]["completion"] == HOSTILE and groups[1][3]["length"] == 4
    assert "tokens" not in groups[0][0]


def test_no_text_of_a_run_can_act_in_the_page(run_dir):
    page = render_page(load_run(run_dir))
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "<img" not in page and "<b>" not in page and "<i>" not in page and "<!--" not in page
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and "default-src 'none'" in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_the_page_asks_nothing_of_the_network(run_dir):
    page = render_page(load_run(run_dir)).replace("http://www.w3.org/2000/svg", "")
    without_data = re.sub(r'<script id="data".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"https?:|src=|href=|url\(|@import|fetch\(|XMLHttpRequest", without_data)


def test_the_moving_average_keeps_a_line_and_skips_gaps():
    line = [2.0 * i for i in range(50)]
    assert moving_average(line)[10:40] == line[10:40]
    assert moving_average(line[:30]) is None
    assert moving_average([1.0, float("nan")] * 30) == [1.0] * 60


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is not a folder; expected the folder of a run or a record"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no metrics.jsonl"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match="has no numbers yet"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n')
    with pytest.raises(DatasetError, match="line 2 is not JSON"):
        load_run(tmp_path)


def test_strange_values_do_not_stop_the_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "time": "noon", "loss": 1}\n{"step": 1, "time": 5, "loss": [2]}\n'
    )
    (tmp_path / "trajectories.jsonl").write_text('{"step": 0, "group": [1], "split": {}, "prompt": 3, "reward": "x"}\n')
    assert len(load_run(tmp_path).sampled.groups) == 1
    assert any(path.name == "report.html" for path in write_report(tmp_path, curves=False))


@pytest.mark.parametrize("value", ["1e308", "-1.7e308", "9" * 400, "Infinity", "NaN"])
def test_a_number_that_no_axis_can_hold_is_a_gap(tmp_path, value):
    lines = [f'{{"step": {step}, "time": {value}, "loss": {value}, "reward": {step}}}\n' for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    page, *curves = write_report(tmp_path)
    data = page_data(page.read_text())
    values = {series["name"]: series["values"] for panel in data["panels"] for series in panel["series"]}
    assert values == {"reward": [0, 1, 2], "loss": [None, None, None]} and data["seconds"] == 0
    assert {path.name for path in curves} == {"reward.png", "loss.png"}


def test_text_that_is_none_is_replaced_in_the_page(tmp_path):
    folder = tmp_path / os.fsdecode(b"run\xff")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss\\ud800": 2}\n')
    (folder / "config.yaml").write_bytes(b"seed: \xff")
    page, *_ = write_report(folder, curves=False)
    data = page_data(page.read_text())
    assert data["name"] == "run?" and data["config"] == "seed: \ufffd"


def test_without_matplotlib_the_page_is_written_and_the_extra_named(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UserError, match=r"archon-engine\[plots\]"):
        write_report(run_dir)
    assert (run_dir / "report" / "report.html").stat().st_size > 10_000


@pytest.fixture
def server(run_dir):
    with ReportServer(run_dir, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_served_page_follows_the_run(server, run_dir):
    assert page_data(get(server.url)[1])["steps"] == 60
    MetricsWriter(run_dir / "metrics.jsonl").write(61, {"reward": 1.0})
    assert page_data(get(server.url)[1])["steps"] == 61


def test_only_the_page_is_served_and_only_on_loopback(server):
    assert server.server_address[0] == "127.0.0.1"
    assert get(server.url + "../metrics.jsonl")[0] == 404
    assert get(server.url, Host="evil.example")[0] == 403


def test_a_port_in_use_is_named(server, run_dir):
    port = server.server_address[1]
    with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
        ReportServer(run_dir, port=port)


def test_metrics_have_plain_titles_and_their_meaning(run_dir):
    panels = page_data(render_page(load_run(run_dir)))["panels"]
    series = {s["name"]: s for panel in panels for s in panel["series"]}
    assert series["approx_kl"]["title"] == "KL to the rollout policy"
    assert series["eval/reward"]["title"] == "held-out reward"
    assert series["eval/reward"]["about"].startswith("eval/reward: mean reward of all answers")
    assert metric_title("my_metric") == ("my_metric", "")


def test_titles_are_of_metrics_in_the_guide():
    guide = (Path(__file__).resolve().parents[3] / "docs" / "tasks" / "results.md").read_text()
    assert [name for name in TITLES if f"{name}`" not in guide] == []


def test_preference_runs_show_accuracy_and_margin_first(tmp_path):
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": 0.7, "accuracy": 0.5 * step, "eval/accuracy": 0.5, "margin": 0.1, "lr": 1e-5})
    data = page_data(render_page(load_run(tmp_path)))
    assert [panel["title"] for panel in data["panels"]] == ["Accuracy", "Margin", "Loss"]
    assert [s["title"] for s in data["panels"][0]["series"]] == ["accuracy", "held-out accuracy"]
