"""Summary of a run, for the first screen of its report and the model card of its export."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from archon.tools.report.run_data import RunData, Series

RESULTS = {
    "eval/greedy_reward": "held-out reward of greedy answers",
    "eval/reward": "held-out reward of sampled answers",
    "eval/accuracy": "held-out accuracy",
    "eval/margin": "held-out margin",
    "eval/loss": "held-out loss",
}
"""Results by the metric that holds them."""
TRAINED = {"reward": "reward of trained answers", "accuracy": "accuracy on trained pairs", "loss": "training loss"}
"""Results of a run without evaluations. Single steps are noisy, so tenths of the run are compared."""


def summarize(run: RunData) -> dict[str, str]:
    """Return title and text of each fact about a run: model, data, method, training, results."""
    config = run_config(run)
    model = _section(config, "actor") or _section(config, "model")
    data = _section(config, "train_data")
    steps = max(series.steps[-1] for series in run.series.values())
    export = run.path / "export"
    facts = {
        "Model": _text(model.get("path")),
        "Data": " ".join(filter(None, (_text(data.get("path")), _text(data.get("split"))))),
        "Method": _method(config, model),
        "Training": f"{steps:,} steps, layout {_text(model.get('layout'))}, {_text(model.get('dtype'))}"
        if model
        else "",
        **{name[0].upper() + name[1:]: text for name, text in results(run.series).items()},
        "Use it": next_command(config, export) if export.is_dir() else "",
    }
    return {title: text for title, text in facts.items() if text}


def results(series: Mapping[str, Series]) -> dict[str, str]:
    """Return "first → last" of each result; without evaluations, the means of the first and the last tenth."""
    evaluated = {title: series[name].values for name, title in RESULTS.items() if name in series}
    if found := {title: f"{v[0]:.4g} → {v[-1]:.4g}" for title, v in evaluated.items() if len(v) > 1}:
        return found
    for name, title in TRAINED.items():
        if name in series and len(values := series[name].values) > 1:
            tenth = max(1, len(values) // 10)
            return {title: f"{sum(values[:tenth]) / tenth:.4g} → {sum(values[-tenth:]) / tenth:.4g}"}
    return {}


def next_command(config: Mapping[str, Any], export: Path) -> str:
    """Return a command that uses the export of a run with this configuration."""
    folder = shlex.quote(str(export))
    if config.get("loss") == "reward":
        return f"archon rl reward.model={folder} …"
    model = _section(config, "actor") or _section(config, "model")
    base, lora = shlex.quote(_text(model.get("path"))), _section(model, "lora")
    if not lora:
        return f"archon generate {folder} --prompt …"
    if not (loras := _section(lora, "loras")):
        return f"archon generate {base} --lora {folder} --prompt …"
    return f"archon serve {base} " + " ".join(f"--lora {shlex.quote(f'{name}={export / name}')}" for name in loras)


def model_card(run: RunData) -> str:
    """Return the README.md of an export: model, data, method and results. Equal runs have equal cards."""
    config = run_config(run)
    model = _section(config, "actor") or _section(config, "model")
    base, lora = _text(model.get("path")), _section(model, "lora")
    header = {"library_name": "peft" if lora else "transformers", "tags": ["archon"]}
    if base.count("/") == 1 and not Path(base).exists():  # a hub id
        header["base_model"] = base.partition("@")[0]
    rows = [f"| {title} | {_cell(text)} |\n" for title, text in summarize(run).items() if title != "Use it"]
    use = next_command(config, Path("FOLDER"))
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=True)}---\n\n# {_cell(run.path.resolve().name)}\n\n"
        f"| | |\n|---|---|\n{''.join(rows)}\n```bash\n{use}   # FOLDER: this folder\n```\n"
    )


def run_config(run: RunData) -> dict[str, Any]:
    """Return the configuration of a run; empty if it has none that can be read."""
    try:
        config = yaml.safe_load(run.config)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:500]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _method(config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    lora = _section(model, "lora")
    loras = [_section(_section(lora, "loras"), name) for name in _section(lora, "loras")] or [lora]
    weights = ", ".join(map(_lora, loras)) if lora else "all weights"
    if "actor" in config:
        reward = config.get("reward")
        name = _text(reward.get("model") if isinstance(reward, dict) else reward) or _text(config.get("workflow"))
        algorithm = _text(_section(config, "algorithm").get("preset")) or "custom"
        return f"reinforcement learning: algorithm {algorithm}, reward {name}, {weights}"
    if "loss" in config:
        return f"preference training: loss {_text(config['loss'])}, {weights}"
    return f"supervised fine-tuning: {weights}" if model else ""


def _lora(lora: Mapping[str, Any]) -> str:
    """Describe a LoRA; a folder that it starts from sets its ranks."""
    return f"LoRA from {_text(lora['path'])}" if lora.get("path") else f"LoRA of rank {_text(lora.get('rank'))}"
