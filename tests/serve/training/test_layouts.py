"""The training service on several ranks: an SDK script gets the numbers of one process, and failures are one story."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.training.conftest import ROOT
from tests.serve.training.data import datum, policy_inputs, rows, tensor
from tests.serve.training.test_numbers import adam, largest_difference, saved_weights

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
tinker = pytest.importorskip("tinker")


@pytest.fixture(scope="module")
def checkpoints(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny Qwen3s without and with experts, with the tokenizer of `base` and an even vocabulary."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = Qwen3Config.from_pretrained(base).to_dict()
    sizes = {name: value for name, value in fields.items() if name not in ("model_type", "architectures")}
    sizes["vocab_size"] += sizes["vocab_size"] % 2
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    folders = {}
    for name in ("dense", "experts"):
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp("base") / name
        if name == "dense":
            Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(folders[name])
        else:
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).save_pretrained(folders[name])
        AutoTokenizer.from_pretrained(base).save_pretrained(folders[name])
    return folders


@contextmanager
def launched(
    base: Path, state: Path, layout: str, ranks: int, *arguments: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL and the process of `archon launch … serve-training`."""
    launch = ["launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-m", "archon", *launch, "serve-training", str(base), "--port", "0"]
    options = ["--state", str(state), f"layout={layout}", "device=cpu", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("ARCHON_TOKEN", None)
    with subprocess.Popen(
        [*command, *options], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                if " at http://" in line:
                    yield line.split(" at ")[1].split()[0], process
                    break
            else:
                pytest.fail(process.stderr.read())
        finally:
            process.terminate()
            process.wait(60)


def script(base: Path, url: str) -> dict[str, Any]:
    """Train two LoRAs, save and load one, and sample; return everything that a client sees."""
    from tinker import types

    def output(future: Any) -> list[torch.Tensor]:
        result = future.result(60)
        names = ("logprobs", "elementwise_loss")
        return [tensor(one, name) for one in result.loss_fn_outputs for name in names]

    service = tinker.ServiceClient(base_url=url, api_key="tml-one")
    first = service.create_lora_training_client(base_model=str(base), rank=4, seed=3).result(60)
    second = service.create_lora_training_client(base_model=str(base), rank=8, seed=4, train_mlp=False).result(60)
    scores, norms = list[torch.Tensor](), list[float]()
    for step in range(3):
        documents = rows(step)
        data = [datum(ids, **policy_inputs(n, len(ids) - 1)) for n, ids in enumerate(documents)]
        one = first.forward_backward([datum(ids) for ids in documents], "cross_entropy")
        # A single document, fewer than data-parallel ranks; then three more, which accumulate.
        two = [second.forward_backward(part, "ppo") for part in (data[:1], data[1:])]
        for future in (one, *two):
            scores += output(future)
        norms += [client.optim_step(adam(eps=1e-3)).result(60).metrics["grad_norm"] for client in (first, second)]
        if step == 1:
            state = first.save_state("middle").result(60).path
    resumed = service.create_training_client_from_state_with_optimizer(state).result(60)
    resumed.forward_backward([datum(ids) for ids in rows(2)], "cross_entropy").result(60)
    resumed.optim_step(adam(eps=1e-3)).result(60)
    scores += output(second.forward([datum(ids) for ids in rows(9)], "cross_entropy"))
    sampler = second.save_weights_and_get_sampling_client().result(60)
    params = types.SamplingParams(max_tokens=12, seed=5, stop=[])
    [answer] = sampler.sample(types.ModelInput.from_ints(rows()[0][:5]), 1, params).result(60).sequences
    try:
        first.optim_step(adam(eps=1e-3)).result(60)
        refused = ""
    except tinker.RequestFailedError as error:
        refused = str(error).partition("there is no gradient")[1]
    results = {
        "scores": scores,
        "norms": norms,
        "loras": [saved_weights(client) for client in (first, second)],
        "resumed": saved_weights(resumed),
        "answer": (answer.tokens, answer.logprobs),
        "refused": refused,
    }
    service.close("success").result(30)
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, Any]]:
    """The results of one process by checkpoint."""
    return {}


LAYOUTS = {
    "d2": ("dense", 2),
    "t2": ("dense", 2),
    "c2": ("dense", 2),
    "p2": ("dense", 2),
    "d2t2": ("dense", 4),
    "d2e2": ("experts", 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_process(
    layout: str, checkpoints: dict[str, Path], alone: dict[Path, dict[str, Any]], tmp_path: Path
) -> None:
    kind, ranks = LAYOUTS[layout]
    path = checkpoints[kind]
    if path not in alone:
        with launched(path, tmp_path / "alone", "d1", 1) as (url, _):
            alone[path] = script(path, url)
    expected = alone[path]
    with launched(path, tmp_path / "state", layout, ranks) as (url, process):
        actual = script(path, url)
    assert process.returncode in (0, 128 + signal.SIGTERM)
    # float32, in sums of another order; a large eps keeps AdamW from amplifying the rounding of small gradients.
    for found, wanted in zip(actual["scores"], expected["scores"], strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for found, wanted in zip(actual["loras"], expected["loras"], strict=True):
        assert largest_difference(found, wanted) < 1e-6
    assert largest_difference(actual["resumed"], actual["loras"][0]) < 1e-6
    assert actual["answer"][0] == expected["answer"][0]
    torch.testing.assert_close(torch.tensor(actual["answer"][1]), torch.tensor(expected["answer"][1]))
    assert actual["refused"] == "there is no gradient"


def test_a_lost_rank_ends_the_service_and_is_named(base: Path, tmp_path: Path) -> None:
    with launched(base, tmp_path / "state", "d2", 2) as (url, process):
        service = tinker.ServiceClient(base_url=url, api_key="tml-one")
        client = service.create_lora_training_client(base_model=str(base), rank=4).result(60)
        client.forward_backward([datum(ids) for ids in rows()], "cross_entropy").result(60)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        environments = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children}
        [rank_1] = [int(pid) for pid, lines in environments.items() if "RANK=1" in lines]
        os.kill(rank_1, signal.SIGKILL)
        assert process.wait(60) != 0
        assert process.stderr is not None
        assert "rank 1 (process" in process.stderr.read()


IMPOSSIBLE = {
    "d3": "needs 3 processes, but 2 are running",
    "x2": "'x' is not one of",
    "t2": "tp = 2 does not divide the vocabulary of 99",
}


@pytest.mark.parametrize("layout", IMPOSSIBLE)
def test_an_impossible_layout_is_one_line(layout: str, base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "archon", "launch", "--nproc-per-node", "2", "serve-training", str(base)]
    done = subprocess.run(
        [*command, f"layout={layout}", "device=cpu", "--state", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("archon: ")]
    assert done.returncode == 2 and len(lines) == 1 and IMPOSSIBLE[layout] in lines[0], done.stderr


DIFFERING = """
import os, sys
from pathlib import Path

base, folder = sys.argv[1:]
rank = os.environ["RANK"]
Path(folder, rank).mkdir()
os.chdir(Path(folder, rank))  # relative paths name other files on each rank

from archon.cli.serve_training import make_trainer
from archon.cli.serve_training_config import ServeTrainingConfig
from archon.engine.lora_pool import AdamStep
from archon.schema.errors import UserError
from archon.serve.training.trainer import LoRAShape

config = ServeTrainingConfig(layout="d2", device="cpu", max_models=1)
trainer = make_trainer(Path(base), config, Path(folder, "state"))
if rank == "1":
    trainer.follow()
else:
    trainer.create("a", LoRAShape(4, seed=1))
    trainer.save("a", Path("saved"), True)
    before = {name: x.clone() for name, x in trainer._pool.weights("lora_0").items()}
    for call in (
        lambda: trainer.load("a", Path("saved"), True),  # only rank 0 has it
        lambda: trainer.step("a", AdamStep(1, 0.9, 0.95, 1e-8)),
    ):
        try:
            call()
        except UserError as error:
            print("refused:", error, flush=True)
    trainer.create("b", LoRAShape(4, seed=1))  # "a" moves to disk
    trainer.load("a", Path(folder, "0", "saved"), True)  # the ranks still agree
    assert all((x == before[name]).all() for name, x in trainer._pool.weights("lora_0").items())
    trainer.close()
    print("ended", flush=True)
"""


def test_an_error_of_one_rank_is_every_ranks(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "differing.py"
    file.write_text(DIFFERING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(file), str(base)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert done.returncode == 0 and "ended" in done.stdout, done.stderr
    assert refused[0].startswith("refused: rank 1: ") and "saved" in refused[0]
    assert refused[1].startswith("refused: there is no gradient")
