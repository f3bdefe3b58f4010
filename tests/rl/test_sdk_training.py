"""Published clients and frameworks, each with an agent that calls a tool, through steps of training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from archon.checkpoint.tokenizer import load_tokenizer
from archon.data.encoding import tokenize
from archon.engine.engine import ArchonEngine
from archon.generation.types import GenerationHyperparameters
from archon.rl import RLTrainer
from archon.rl.bootstrap import make_tokenizer, write_blank
from archon.rl.config import RLConfig
from archon.schema.config import EngineConfig
from archon.serve import AgentServer
from archon.training.config import BootstrapConfig, TokenizerRecipe
from tests.rl import sdk_agents
from tests.serve.scripted import Scripted
from tests.serve.taught import teach
from tests.small_qwen3 import SMALL_QWEN3
from tests.tolerances import FIRST_RATIO_FP32

SURE = 0.97  # probability of each token that is learned; it leaves something to reinforce


def said(agent: type, place: str) -> list[str]:
    """What the model is to say: a call of the tool, then the weather."""
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "{}"}}}}\n</tool_call>'
    first = call.format("weather", "place", place)
    weather = sdk_agents.PLACES[place]
    last = call.format("final_answer", "answer", weather) if agent is sdk_agents.SmolAgents else f"It is {weather}."
    return [first, last]


async def talk(agent: type, row: dict[str, str], tokenizer: Any) -> list[tuple[str, str]]:
    """Prompt and answer of each call of a conversation that goes as it should."""
    answers = said(agent, row["place"])
    scripted = Scripted(tokenizer, answers)
    server = AgentServer(tokenizer, scripted, GenerationHyperparameters(max_new_tokens=sdk_agents.MAX_TOKENS))
    data = {"messages": [{"role": "user", "content": row["question"]}], "answer": row["place"]}
    async with httpx.AsyncClient(trust_env=False) as client:
        url = await server.start()
        assert await agent().run(data, base_url=url, api_key="any", http_client=client) >= 1.0
    await server.close()
    prompts = [tokenizer.decode(request.input_ids) for request in scripted.requests]
    return list(zip(prompts, answers, strict=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learned to call the tool in the words of every framework."""
    folder = tmp_path_factory.mktemp("weather")
    characters = "".join(map(chr, range(32, 127)))
    plain = make_tokenizer(TokenizerRecipe(kind="characters", alphabet=characters, chat_template="chatml"))
    questions = sdk_agents.rows("train")
    talks = [pair for agent in sdk_agents.AGENTS for row in questions for pair in asyncio.run(talk(agent, row, plain))]
    sdk_agents.TEXTS[:] = [text for pair in talks for text in pair]
    words: Any = {"path": f"python:{sdk_agents.__name__}.rows", "split": "words"}
    words |= {"prompt_key": "question", "response_key": "place"}
    recipe = TokenizerRecipe(kind="bpe", vocab_size=700, chat_template="chatml", train_data=words)
    hf_config = SMALL_QWEN3 | {"max_position_embeddings": 1024}
    write_blank(BootstrapConfig(hf_config=hf_config, tokenizer=recipe), folder / "blank")
    engine = ArchonEngine(EngineConfig(path=str(folder / "blank"), init_from_scratch=True))
    engine.initialize()
    tokenizer = load_tokenizer(folder / "blank")
    end = [tokenizer.eos_token_id]
    encoded = [[list(tokenize(tokenizer, text, "a text")["input_ids"]) for text in pair] for pair in talks]
    teach(engine.full_model, [(prompt, answer + end) for prompt, answer in encoded], SURE)
    engine.save(folder / "made")
    return folder / "made"


@pytest.mark.slow
@pytest.mark.parametrize("agent", sdk_agents.AGENTS, ids=lambda agent: agent.__name__)
def test_an_agent_of_each_framework_calls_its_tool_and_is_trained(
    agent: type, checkpoint: Path, tmp_path: Path
) -> None:
    config = RLConfig.parse(
        {
            "run_dir": str(tmp_path / "run"),
            "total_steps": 3,
            "actor": {"path": str(checkpoint), "optimizer": {"lr": 1e-5}},
            "algorithm": {"kl": {"coef": 0.0}},
            "gconfig": {"n_samples": 4, "max_new_tokens": sdk_agents.MAX_TOKENS},
            "rollout": {"prompts_per_step": 2, "n_gold_checks": 0, "dump_groups": 0, "workers": {"rewards": 1}},
            "generator": {"max_slots": 16},
            "train_data": {
                "path": f"python:{sdk_agents.__name__}.rows",
                "prompt_key": "question",
                "response_key": "place",
            },
            "reward": "exact_match",
        }
    )
    sdk_agents.LOOKED_UP.clear()
    trainer = RLTrainer(config)
    with trainer.opened(f"{agent.__module__}.{agent.__qualname__}"):
        norms = []
        for step in range(3):
            metrics = trainer.train_step()
            assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32 and metrics["version"] == step + 1
            assert metrics["agent_answers"] > 1 and metrics["agent_answers_unrewarded"] == 0
            norms.append(metrics["grad_norm"])
    assert trainer._logprobs_checked
    assert min(norms) > 0
    assert len(sdk_agents.LOOKED_UP) >= 12, "of 24 conversations most call the tool"
