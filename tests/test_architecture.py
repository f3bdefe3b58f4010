"""The call traces of ARCHITECTURE.md match the calls, in order, and touch few files."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import archon
from archon.engine.engine import ArchonEngine
from archon.engine.forkserver import forkserver_context
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models import get_model_spec
from archon.remote.config import PushConfig
from archon.remote.connect import connect
from archon.rl import RLConfig, RLTrainer
from archon.rl.bootstrap import write_blank
from archon.schema.config import EngineConfig
from archon.training.config import BootstrapConfig, TokenizerRecipe
from tests.engine.tiny import make_engine, write_config
from tests.remote.test_engine import Weights
from tests.remote.twin import VLLMTwin
from tests.rl.conftest import fresh_checkpoint, small_run
from tests.small_qwen3 import SMALL_QWEN3

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT / package}/" for package in ("archon", "models", "parallel", "rl"))
MOST_FILES = {
    "A checkpoint to logits": 11,
    "A batch through a training step": 12,
    "A prompt to a trained-on sample": 20,
    "A weight push to a server": 3,
    "A layout string to sharded modules": 10,
}

Function = tuple[str, str]
"""A file, from the root, and the qualified name of a function in it."""
Calls = dict[Function, list[Function]]
"""Functions in the order of their first calls, each with its callers at that call, innermost first."""


def listed(title: str) -> list[str]:
    """Return the dotted names of a trace's functions, in order."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.split(f"### {title}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `([\w.]+)`", section, flags=re.M)


def resolve(dotted: str) -> Function:
    """Return the function or method of a dotted name."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = inspect.getattr_static(value, name)
        value = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
        return function_of(inspect.unwrap(value).__code__)
    raise AssertionError(f"{dotted} does not exist")


@cache
def file_of(name: str) -> str:
    path = os.path.realpath(name)
    return os.path.relpath(path, ROOT) if path.startswith(PRODUCT) else ""


def function_of(code: CodeType) -> Function:
    return file_of(code.co_filename), code.co_qualname


def follow(action: Callable[[], object]) -> Calls:
    """Run `action`; return the product functions that it calls."""
    calls: Calls = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not file_of(frame.f_code.co_filename):
            return
        called = function_of(frame.f_code)
        if called in calls:
            return
        callers, back = [], frame.f_back
        while back is not None:
            if file_of(back.f_code.co_filename):
                callers.append(function_of(back.f_code))
            back = back.f_back
        calls[called] = callers

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def checkpoint_to_logits(folder: Path) -> Calls:
    checkpoint, tokens = folder / "checkpoint", torch.arange(8)
    make_engine(folder).save(checkpoint)

    def walk() -> None:
        model = archon.load_model(checkpoint, dtype=torch.float32)
        model(tokens, tokens, torch.tensor([0, 8], dtype=torch.int32), max_seqlen=8)

    return follow(walk)


def batch_through_a_step(folder: Path) -> Calls:
    engine = make_engine(folder)
    mask = torch.arange(9) < torch.tensor([[9], [5], [7]])
    batch = {"input_ids": torch.arange(27).view(3, 9), "attention_mask": mask, "loss_mask": mask.long()}
    return follow(lambda: engine.train_batch(batch, CrossEntropyLoss(), loss_token_count))


def prompt_to_a_sample(folder: Path) -> Calls:
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    blank = folder / "blank"
    write_blank(BootstrapConfig(path=str(blank), hf_config=SMALL_QWEN3, tokenizer=recipe), blank)
    trainer = RLTrainer(RLConfig.parse(small_run(blank, folder / "run")))
    with ExitStack() as stack:
        stack.enter_context(trainer.opened())
        return follow(trainer.train_step)


def push_to_a_server(folder: Path) -> Calls:
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    write_blank(BootstrapConfig(path=str(folder / "blank"), hf_config=SMALL_QWEN3, tokenizer=recipe), folder / "blank")
    checkpoint = fresh_checkpoint(folder / "blank", folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with ExitStack() as stack:
        server = VLLMTwin(checkpoint)
        stack.callback(server.stop)
        engine = connect([server.url], PushConfig(), vocab_size=len(tokenizer), tokenizer=tokenizer, log=print)
        stack.callback(engine.close)
        return follow(lambda: engine.update_weights(Weights(checkpoint), version=0))


def layout_to_modules(folder: Path) -> Calls:
    """Initialize one of four fake ranks in a separate process."""
    with ProcessPoolExecutor(1, forkserver_context()) as pool:
        return pool.submit(initialize_on_a_fake_rank, folder).result()


def initialize_on_a_fake_rank(folder: Path) -> Calls:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "WORLD_SIZE": "4"}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    path = write_config(folder / "model", vocab_size=100)
    engine = ArchonEngine(EngineConfig(path=path, layout="d2t2", device="cpu", init_from_scratch=True))
    return follow(lambda: engine.initialize(10))


WALKS = {
    "A checkpoint to logits": checkpoint_to_logits,
    "A batch through a training step": batch_through_a_step,
    "A prompt to a trained-on sample": prompt_to_a_sample,
    "A weight push to a server": push_to_a_server,
    "A layout string to sharded modules": layout_to_modules,
}


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_what_is_called_in_that_order_and_touches_few_files(title: str, tmp_path: Path) -> None:
    """A trace touches the files of its functions and of all callers between two of them."""
    get_model_spec("qwen3")  # the registry reads the families once
    names = listed(title)
    functions = [resolve(name) for name in names]
    calls = WALKS[title](tmp_path)
    for name, function in zip(names, functions, strict=True):
        assert function in calls, f"{name} is not called"
    order = [function for function in calls if function in functions]
    assert order == functions, "the functions are called in another order"
    touched = {file for file, _ in functions}
    for function in functions[1:]:
        for caller in calls[function]:
            if caller in functions:
                break
            touched.add(caller[0])
    print(f"{title}: {len(functions)} functions in {len(touched)} files: {', '.join(sorted(touched))}")
    assert len(touched) <= MOST_FILES[title], sorted(touched)
