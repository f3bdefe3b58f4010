"""A workflow of your own: the model may correct itself. After a wrong answer it gets the question once more.

    archon rl --config rl/recipes/arithmetic_cpu.yaml workflow=examples.workflow.SecondTry run_dir=runs/second_try

A workflow is a coroutine: it asks the engine for answers as tokens and returns trajectories with rewards. Tokens of the
environment, here the repeated question, are read by the model and not trained.
"""

import asyncio

from archon.generation.record import TokenRecord
from archon.rl import ModelRequest, RolloutWorkflow
from archon.rl.trajectories import trajectory_tensors


class SecondTry(RolloutWorkflow):
    """Sample `gconfig.n_samples` episodes of at most two answers; a right second answer earns 0.5."""

    def __init__(self, gconfig, tokenizer, **_):
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer

    async def arun_episode(self, engine, data):
        """Return the trajectories of one prompt, [n_samples, S]."""
        episodes = [self.episode(engine, data) for _ in range(self.gconfig.n_samples)]
        records, rewards = zip(*await asyncio.gather(*episodes), strict=True)
        return trajectory_tensors(list(records), list(rewards))

    async def episode(self, engine, data):
        """Return the tokens of one episode, and its reward."""
        question = self.tokenizer(data["prompt"]).input_ids
        record = TokenRecord()
        for reward in (1.0, 0.5):
            record.observe(question)
            answer = await engine.agenerate(ModelRequest(record.input_ids, self.gconfig.new(n_samples=1)))
            record.answer(answer)
            text = self.tokenizer.decode(answer.output_tokens, skip_special_tokens=True)
            if text == str(data["answer"]):
                return record, reward
        return record, 0.0
