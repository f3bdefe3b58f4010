"""SECURITY.md states the limits that the code has."""

from __future__ import annotations

import pytest

from archon.checkpoint import safetensors_file, template_sandbox
from archon.checkpoint.peft import config as peft
from archon.cli import app
from archon.cli.serve_config import ServeConfig
from archon.data import images, sources
from archon.remote import weight_stream
from archon.rl.environments import episodes, openenv
from archon.rl.rewards import async_wrapper, code_tests, pool, result, worker
from archon.rl.sandbox import local, programs, tools
from archon.rl.sandbox import remote as remote_sandbox
from archon.schema import capacity, config, files, interpolations, name_patterns, yaml_files
from archon.serve import openai_base, request_limits
from archon.serve.service import Limits
from tests.test_readme import ROOT

KIB, MIB, GIB = 2**10, 2**20, 2**30
PROGRAM = programs.Limits()
SERVE, LIMITS, ITEMS = ServeConfig(), Limits(), request_limits.MAX_ITEMS
ROWS = {
    "end of a canceled `async def` reward": f"{async_wrapper._CANCEL_SECONDS:g} s",
    "start of a reward's process": f"{pool.START_SECONDS:g} s, {pool._MAX_FAILED_STARTS} attempts",
    "arguments of a reward's call": f"{pool.MAX_CALL_BYTES // GIB} GiB",
    "output of a reward's call": f"{pool.MAX_OUTPUT_BYTES // KIB} KiB; the rest is dropped",
    "reply of a reward's process": f"{worker.MAX_REPLY_BYTES // MIB} MiB",
    "a program in the sandbox": f"{PROGRAM.wall_seconds:g} s, {PROGRAM.cpu_seconds:g} s of processor time, "
    f"{PROGRAM.memory_bytes // MIB} MiB, {PROGRAM.processes} processes, {PROGRAM.output_bytes // MIB} MiB of output, "
    f"{PROGRAM.file_bytes // MIB} MiB of files",
    "files and input of a program in the sandbox": f"{programs.MAX_INPUT_BYTES // MIB} MiB, "
    f"{programs.MAX_FILES:,} files",
    "start of a worker of the sandbox": f"{local.START_SECONDS:g} s; a program that does not report ends "
    f"{local._GRACE_SECONDS:g} s after its limit",
    "tests of an answer's program": f"{code_tests.LIMITS.wall_seconds:g} s each, {code_tests.TOTAL_SECONDS:g} s "
    "together, "
    f"{code_tests.MAX_TESTS:,} of them",
    "result of a tool; index of a search tool": f"{tools.MAX_TEXT:,} characters, {tools.TOOL_LIMITS.wall_seconds:g} s; "
    f"{tools.MAX_INDEX_BYTES // GIB} GiB",
    "request to the sandbox's server": f"body {remote_sandbox.MAX_BODY_BYTES // MIB} MiB, received in "
    f"{remote_sandbox._READ_SECONDS:g} s with its headers; {remote_sandbox.MAX_WAITING} at once; "
    f"{remote_sandbox.MAX_CONNECTIONS:,} connections; 60 s and 2 GiB for a program",
    "parts of a reward": f"{result.MAX_PARTS}, with names of {result.MAX_PART_NAME} characters",
    "exception of a reward": f"{worker._MAX_MESSAGE:,} characters, and {worker._MAX_TRACEBACK:,} of its traceback",
    "ranks, and launched servers, of one machine": f"{capacity.RANKS_PER_CORE} per processor, one per "
    f"{capacity.RANK_BYTES // MIB} MiB of memory; the limits of a container count",
    "body of a request to the server": f"{SERVE.max_body_bytes // MIB} MiB, {SERVE.request_seconds:g} s",
    "bodies of all requests in progress; connections": f"{LIMITS.total_body_bytes // MIB} MiB; {LIMITS.connections}",
    "values, objects, nesting, images of a request": f"{request_limits.MAX_VALUES:,}; {request_limits.MAX_OBJECTS:,}, "
    f"of its conversation {request_limits.MAX_PARTS:,}; {request_limits.MAX_DEPTH} levels; {request_limits.MAX_IMAGES}",
    "messages, tools, token ids of a request": f"{ITEMS['messages']:,}; {ITEMS['tools']}; {ITEMS['input_ids']:,}",
    "stop strings, stop ids, `logit_bias`, choices": f"{ITEMS['stop']} of {request_limits.MAX_STOP_CHARACTERS:,} "
    f"characters; {ITEMS['stop_token_ids']:,} each",
    "answers of a request": f"{openai_base.MAX_CHOICES}; {request_limits.MAX_LOGPROBS:,} logprobs with `top_logprobs`",
    "concurrent requests, open sessions, answers of a session": f"{SERVE.max_requests}, {SERVE.max_sessions:,}, "
    f"{SERVE.max_calls_per_session:,}",
    "broadcast weights": "a bucket of the machine's memory, with a description of "
    f"{weight_stream.MAX_DESCRIPTION_BYTES // MIB} MiB; each name once",
    "configuration, hardware file": f"{files.YAML_BYTES // MIB} MiB, {yaml_files.YAML_VALUES:,} values with aliases "
    "expanded",
    "`${…}` in a configuration": f"{interpolations.REFERENCES:,} references and {interpolations.CHARACTERS:,} "
    f"characters after expansion, {interpolations.NESTED} inside each other",
    "JSON of a checkpoint; tokenizer file; file of prompts": f"{files.JSON_BYTES // MIB} MiB; "
    f"{files.TOKENIZER_BYTES // MIB} MiB; {files.PROMPTS_BYTES // MIB} MiB",
    "header of a safetensors file": f"{safetensors_file.MAX_HEADER_BYTES:,} bytes, with offsets that cover the data",
    "LoRA": f"{peft._MAX_BYTES // MIB} MiB of configuration; ",
    "regular expressions of a LoRA": f"{name_patterns._MAX_LENGTH:,} characters; {name_patterns.MAX_SECONDS:g} s for ",
    "line of rows; JSON list of rows": f"{sources.ROW_BYTES // MIB} MiB; {sources.LIST_BYTES // GIB} GiB, after "
    "decompression",
    "row": f"{sources.ROW_COLUMNS:,} columns, nesting of {sources.ROW_DEPTH} levels",
    "rows or answers of one step, and answers of one call": f"{config.MAX_STEP_ROWS:,}; {config.MAX_SAMPLES:,} to one ",
    "learning rate": f"{config.MAX_LR:,.0f}; times the weight decay 1",
    "message of an environment's server": f"{openenv.MESSAGE_BYTES // MIB} MiB, {openenv.SECONDS:g} s; "
    f"{openenv.CLOSE_SECONDS:g} s to close a session",
    "observation and reward of an environment's step": f"{episodes.MAX_CHARACTERS // MIB} Mi characters; 1e30",
    "fields of an environment's action or observation": f"{openenv.MAX_FIELDS}, with names of 200 characters",
    "chat template": f"{template_sandbox.MAX_SOURCE:,} characters; {template_sandbox.MAX_STEPS:,} steps; "
    f"{template_sandbox.MAX_SECONDS:g} s; values of {template_sandbox.MAX_TEXT // MIB} Mi characters, "
    f"{template_sandbox.MAX_PRODUCED // MIB} Mi in total",
    "image": f"{images.MAX_BYTES // MIB} MiB, {images.MAX_PIXELS // MIB} Mi pixels, all rows of data",
    "word and message of an error": f"{app.MAX_WORD} and {app.MAX_MESSAGE:,} characters",
}


@pytest.mark.parametrize("kind", ROWS)
def test_security_states_each_limit_as_the_code_has_it(kind: str) -> None:
    text = (ROOT / "SECURITY.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {kind} |")]
    assert row.split(" | ")[1].startswith(ROWS[kind])
