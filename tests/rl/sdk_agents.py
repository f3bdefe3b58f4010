"""One agent, that asks how the weather is, as it is written with each of the published clients and frameworks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from archon.rl.episode_context import workflow_context

PLACES = {"Rome": "sunny", "Oslo": "snowy"}
TASK = "Use the tool."
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL: dict[str, Any] = {"name": "weather", "description": "The weather of a place.", "parameters": SCHEMA}
MAX_TOKENS = 48
LOOKED_UP: list[str] = []
"""Every place that a tool was asked for."""
TEXTS: list[str] = []
"""What the tokenizer is trained on."""


def rows(split: str) -> list[dict[str, str]]:
    """Return the questions; of the split `words` what the tokenizer is trained on."""
    if split == "words":
        return [{"question": text, "place": "."} for text in TEXTS]
    return [{"question": f"How is the weather in {place}?", "place": place} for place in PLACES]


def weather(place: str) -> str:
    """The weather of a place.

    Args:
        place: its name.
    """
    LOOKED_UP.append(place)
    return PLACES.get(place, "unknown")


def score(data: dict[str, Any], answer: object) -> float:
    """Return 1 for the right weather, and a little more for every later sample, so that groups differ."""
    return float(PLACES[data["answer"]] in str(answer)) + 0.01 * (workflow_context.get().sample_index or 0)


class OpenAIChat:
    """The OpenAI SDK: chat completions."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **_: Any) -> float:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        talk: list[Any] = [{"role": "user", "content": data["messages"][0]["content"]}]
        tools: list[Any] = [{"type": "function", "function": TOOL}]
        for _turn in range(3):
            completion = await client.chat.completions.create(
                model="archon", messages=talk, tools=tools, parallel_tool_calls=False, store=False
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return score(data, message.content)
            talk.append(message)
            for call in message.tool_calls:
                said = weather(**json.loads(call.function.arguments))  # type: ignore[union-attr]
                talk.append({"role": "tool", "tool_call_id": call.id, "content": said})
        return 0.0


class OpenAIResponses:
    """The OpenAI SDK: responses."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **_: Any) -> float:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        talk: list[Any] = [{"role": "user", "content": data["messages"][0]["content"]}]
        tools: list[Any] = [{"type": "function", "strict": True, **TOOL}]
        for _turn in range(3):
            response = await client.responses.create(model="archon", input=talk, tools=tools, include=[])
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return score(data, response.output_text)
            talk += response.output
            for call in calls:
                said = weather(**json.loads(call.arguments))
                talk.append({"type": "function_call_output", "call_id": call.call_id, "output": said})
        return 0.0


class Anthropic:
    """The Anthropic SDK."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        from anthropic import AsyncAnthropic

        talk: list[Any] = [{"role": "user", "content": data["messages"][0]["content"]}]
        tools: list[Any] = [{"name": "weather", "description": TOOL["description"], "input_schema": SCHEMA}]
        async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0) as client:
            for _turn in range(3):
                message = await client.messages.create(
                    model="archon", max_tokens=MAX_TOKENS, messages=talk, tools=tools
                )
                calls = [block for block in message.content if block.type == "tool_use"]
                if not calls:
                    return score(data, "".join(block.text for block in message.content if block.type == "text"))
                talk.append({"role": "assistant", "content": message.content})
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)} for call in calls
                ]
                talk.append({"role": "user", "content": results})
        return 0.0


class OpenAIAgentsChat:
    """The OpenAI Agents SDK over chat completions."""

    responses = False

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **_: Any) -> float:
        import agents
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        kind = agents.OpenAIResponsesModel if self.responses else agents.OpenAIChatCompletionsModel
        agent = agents.Agent(
            name="forecaster",
            instructions=TASK,
            model=kind(model="archon", openai_client=client),
            tools=[agents.function_tool(weather)],
        )
        quiet = agents.RunConfig(tracing_disabled=True)
        result = await agents.Runner.run(agent, data["messages"][0]["content"], max_turns=4, run_config=quiet)
        return score(data, result.final_output)


class OpenAIAgentsResponses(OpenAIAgentsChat):
    """The OpenAI Agents SDK over responses."""

    responses = True


class PydanticAI:
    """Pydantic AI."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=base_url, api_key=api_key)
        agent = Agent(OpenAIChatModel("archon", provider=provider), instructions=TASK, tools=[weather])
        return score(data, (await agent.run(data["messages"][0]["content"])).output)


class LangGraph:
    """LangGraph's ReAct graph, and LangChain's client."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **_: Any) -> float:
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

        tools = [tool(weather)]
        options: dict[str, Any] = {"base_url": base_url, "api_key": api_key, "http_async_client": http_client}
        model = ChatOpenAI(model="archon", max_retries=0, **options).bind_tools(tools)

        async def call_model(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", call_model)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        asked: Any = {"messages": [("user", data["messages"][0]["content"])]}
        state = await graph.compile().ainvoke(asked, {"recursion_limit": 6})
        return score(data, state["messages"][-1].content)


class SmolAgents:
    """smolagents, which blocks, and so runs in a thread."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        return await asyncio.to_thread(self._answer, data, base_url, api_key)

    def _answer(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        from smolagents import OpenAIModel, ToolCallingAgent, tool
        from smolagents.agents import EMPTY_PROMPT_TEMPLATES

        # The server forces no tool calls, which this library asks for unless it is told otherwise.
        model = OpenAIModel("archon", api_base=base_url, api_key=api_key, tool_choice="auto")
        prompts: Any = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": TASK}
        agent = ToolCallingAgent([tool(weather)], model, prompt_templates=prompts, max_steps=3, verbosity_level=-1)
        return score(data, agent.run(data["messages"][0]["content"]))


AGENTS = (
    OpenAIChat,
    OpenAIResponses,
    Anthropic,
    OpenAIAgentsChat,
    OpenAIAgentsResponses,
    PydanticAI,
    LangGraph,
    SmolAgents,
)
