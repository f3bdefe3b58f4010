"""Chat templates with the shape of the families': turns, tools, calls and thinking, as their model cards show them."""

from __future__ import annotations

SYSTEM_TOOLS = (
    "{%- if tools %}{{- OPEN + 'system\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}"
    "{{- CLOSE }}{%- endif %}"
)


def _turns(opened: str, closed: str, calls: str, prompt: str, tool: str, thinking: str = "") -> str:
    """A template whose turns stand between two marks; `calls`, `tool` and `thinking` render parts of a message."""
    system = SYSTEM_TOOLS.replace("OPEN", repr(opened)).replace("CLOSE", repr(closed))
    return (
        system
        + "{%- for message in messages %}"
        + "{%- if message.role == 'tool' %}"
        + tool
        + "{%- else %}{{- "
        + repr(opened)
        + " + message.role + '\n' }}"
        + thinking
        + "{{- message.content }}{%- if message.tool_calls %}"
        + calls
        + "{%- endif %}{{- "
        + repr(closed)
        + " }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
        + prompt
        + "{%- endif %}"
    )


CHATML = ("<|im_start|>", "<|im_end|>\n")
_PROMPT = "{{- '<|im_start|>assistant\n' }}"
_RESPONSE = "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
_HERMES_CALLS = (
    "{%- for call in message.tool_calls %}{{- ('\n' if message.content or not loop.first else '') + '<tool_call>\n' }}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}"
)

HERMES = _turns(*CHATML, _HERMES_CALLS, _PROMPT, _RESPONSE)

# Thinking stands before what is said; without it the prompt has an empty one. Only the last turns show theirs.
QWEN3 = _turns(
    *CHATML,
    _HERMES_CALLS,
    _PROMPT
    + "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
    _RESPONSE,
    "{%- if message.role == 'assistant' and message.reasoning_content %}"
    "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}",
)

# The prompt opens the thinking.
QWEN3_THINKING = _turns(*CHATML, _HERMES_CALLS, _PROMPT + "{{- '<think>\n' }}", _RESPONSE) + "{#- </think> #}"

QWEN3_CODER = _turns(
    *CHATML,
    "{%- for call in message.tool_calls %}{{- ('\n' if message.content or not loop.first else '') + '<tool_call>\n' }}"
    "{{- '<function=' + call.function.name + '>\n' }}{%- for key, value in call.function.arguments.items() %}"
    "{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}"
    "{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}",
    _PROMPT,
    _RESPONSE,
)

LLAMA3 = _turns(
    "<|start_header_id|>",
    "<|eot_id|>",
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('only one tool call at once') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}",
    "{{- '<|start_header_id|>assistant\n' }}",
    "{{- '<|start_header_id|>ipython\n' + message.content + '<|eot_id|>' }}",
)

GLM = _turns(
    "<|turn|>",
    "<|done|>",
    "{%- for call in message.tool_calls %}{{- '\n<tool_call>' + call.function.name + '\n' }}"
    "{%- for key, value in call.function.arguments.items() %}{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    "{{- (value if value is string else value | tojson) + '</arg_value>\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}{%- endfor %}",
    "{{- '<|turn|>assistant\n' }}",
    "{{- '<|turn|>observation\n<tool_response>\n' + message.content + '\n</tool_response><|done|>' }}",
)

_DEEPSEEK_TURN = ("<｜turn｜>", "<｜end▁of▁sentence｜>")
_DEEPSEEK_TOOL = (
    "{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message.content }}"
    "{{- '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}"
)

# Arguments are put in as text, so that they must be JSON already.
DEEPSEEK_V3 = _turns(
    *_DEEPSEEK_TURN,
    "{{- '<｜tool▁calls▁begin｜>' }}{%- for call in message.tool_calls %}{{- '' if loop.first else '\n' }}"
    "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
    "{{- call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}",
    "{{- '<｜turn｜>assistant\n' }}",
    _DEEPSEEK_TOOL,
)

DEEPSEEK_V31 = _turns(
    *_DEEPSEEK_TURN,
    "{{- '<｜tool▁calls▁begin｜>' }}{%- for call in message.tool_calls %}"
    "{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}"
    "{{- (call.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}",
    "{{- '<｜turn｜>assistant\n' }}",
    _DEEPSEEK_TOOL,
)

HARMONY = (
    "{%- if tools %}{{- '<|start|>developer<|message|>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|end|>' }}{%- endif %}{%- if reasoning_effort %}"
    "{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{%- if message.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
    "{%- if message.content %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{- '<|end|>' if message.tool_calls else '<|return|>' }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}"
    "{{- (call.function.arguments | tojson) + '<|call|>' }}{%- endfor %}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|start|>functions.tool to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)

# Refuses ids of calls that have not nine letters and digits.
MISTRAL = _turns(
    "<|turn|>",
    "<|done|>",
    "{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}"
    "{%- if call.id is defined and call.id | length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}"
    "{{- '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}' }}"
    "{{- ']' if loop.last else ', ' }}{%- endfor %}",
    "{{- '<|turn|>assistant\n' }}",
    "{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}",
)

# Renders tools, and calls in a syntax that no parser has.
UNKNOWN = _turns(*CHATML, "{{- '<do>' + message.tool_calls[0].function.name + '</do>' }}", _PROMPT, _RESPONSE)

# By the name of the parser that the template implies.
TEMPLATES = {
    "hermes": (HERMES, QWEN3, QWEN3_THINKING),
    "qwen3_coder": (QWEN3_CODER,),
    "llama3_json": (LLAMA3,),
    "glm45": (GLM,),
    "deepseek_v3": (DEEPSEEK_V3, DEEPSEEK_V31),
    "harmony": (HARMONY,),
    "mistral": (MISTRAL,),
}
