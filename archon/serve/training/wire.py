"""The SDK's messages: bodies to documents, and results to bodies. All message definitions are the installed SDK's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
import zstandard
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from archon.generation.prompt_scores import PromptScores
from archon.generation.types import ModelResponse, TopLogprobs
from archon.schema.config import describe_validation_error
from archon.schema.errors import UserError
from archon.serve.training.losses import Loss, find_loss

INFLATED_BYTES = 256 << 20
"""Maximum size of a decompressed body; the SDK splits requests at 5 MB, except for a single larger datum."""
MAX_TARGETS = 64
"""Maximum targets of one position."""
_ZSTD_WINDOW = 1 << 27  # bytes; zstd's own limit without --long

Message = TypeVar("Message", bound=BaseModel)


class TooLargeError(UserError):
    """A body above a limit of the server."""


@dataclass(frozen=True)
class Datum:
    """One document of a forward_backward request.

    Attributes:
        tokens: int64 [N].
        targets: int64 [N], or [N, K].
        inputs: float32 inputs of the loss, each of the shape of `targets`.
    """

    tokens: Tensor
    targets: Tensor
    inputs: Mapping[str, Tensor]

    @property
    def copies(self) -> int:
        """The number of documents that the engine computes: one per target of a position, with a shared prefix."""
        return 1 if self.targets.ndim == 1 else self.targets.shape[1]


@dataclass(frozen=True)
class LossRequest:
    """A forward_backward request: documents and their loss."""

    data: tuple[Datum, ...]
    loss: Loss
    settings: Mapping[str, float]
    backward: bool

    @property
    def n_tokens(self) -> int:
        """The number of tokens that the engine computes without shared prefixes."""
        return sum(len(datum.tokens) * datum.copies for datum in self.data)


@dataclass(frozen=True)
class LossResult:
    """Log-probabilities and losses of the documents of a request, each of the shape of its targets."""

    logprobs: Sequence[Tensor]
    losses: Sequence[Tensor]

    @property
    def total(self) -> float:
        """The sum of all losses."""
        return sum(float(loss.double().sum()) for loss in self.losses)


def inflate(body: bytes, encoding: str) -> bytes:
    """Decompress a body; the size is limited while it is decompressed.

    Raises:
        UserError: the encoding is unknown, or the body is damaged.
        TooLargeError: the body is larger than `INFLATED_BYTES`.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise UserError(f"content-encoding {encoding!r:.80} is not supported; send zstd or none")
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(body)
    try:
        inflated = reader.read(INFLATED_BYTES + 1)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not zstd: {error}") from None
    if len(inflated) > INFLATED_BYTES:
        raise TooLargeError(f"the body decompresses to more than {INFLATED_BYTES:,} bytes; send fewer data at once")
    return inflated


def parse(model: type[Message], body: bytes) -> Message:
    """Return a JSON message of the SDK; UserError if it is none."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise UserError(describe_validation_error(error)) from None


def parse_proto(body: bytes) -> pb.ForwardBackwardRequest:
    """Return a protobuf forward_backward request; UserError if it is none."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise UserError("the body is no ForwardBackwardRequest of the SDK's protobuf messages") from None


def loss_request(message: pb.ForwardBackwardRequest, vocab_size: int, max_tokens: int) -> LossRequest:
    """Check a forward_backward request, and return its documents.

    Args:
        message: the request.
        vocab_size: the number of token ids.
        max_tokens: the longest document of the server.

    Raises:
        UserError: names the datum and field.
    """
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    loss, settings = find_loss(message.loss_fn, config)
    if not message.data:
        raise UserError("the request has no data; expected at least one datum")
    data = []
    for number, datum in enumerate(message.data):
        try:
            data.append(_datum(datum, message.loss_fn, loss, settings, vocab_size, max_tokens))
        except UserError as error:
            raise UserError(f"datum {number}: {error}") from None
    return LossRequest(tuple(data), loss, settings, not message.forward_only)


def _datum(
    message: pb.Datum, name: str, loss: Loss, settings: Mapping[str, float], vocab_size: int, max_tokens: int
) -> Datum:
    tokens = _tokens(message.model_input, vocab_size, max_tokens)
    length = len(tokens)
    known = ("target_tokens", *loss.inputs, *loss.optional)
    for key in message.loss_fn_inputs:
        if key not in known:
            raise UserError(f"loss_fn_inputs has {key!r:.80}, which {name} does not use; expected {', '.join(known)}")
    for key in ("target_tokens", *loss.inputs):
        if key not in message.loss_fn_inputs:
            raise UserError(f"loss_fn_inputs lacks {key!r}; {name} needs {', '.join(('target_tokens', *loss.inputs))}")
    targets = _tensor("target_tokens", message.loss_fn_inputs["target_tokens"], pb.DTYPE_INT64, length)
    if targets.ndim > 1 and not loss.several_targets:
        raise UserError(f"target_tokens is {tuple(targets.shape)}; {name} takes one target per position, ({length},)")
    require_tokens("target_tokens", targets, vocab_size)
    inputs = {}
    for key in (*loss.inputs, *loss.optional):
        if key not in message.loss_fn_inputs:
            inputs[key] = torch.full(targets.shape, settings.get(key, 1.0))
            continue
        inputs[key] = _tensor(key, message.loss_fn_inputs[key], pb.DTYPE_FLOAT32, length)
        if inputs[key].shape != targets.shape:
            raise UserError(f"{key} is {tuple(inputs[key].shape)}, and target_tokens {tuple(targets.shape)}")
        if not inputs[key].isfinite().all():
            raise UserError(f"{key} has values that are not finite")
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise UserError("sequence_ratio_mask is zero everywhere; mark the sampled tokens")
    return Datum(tokens, targets, inputs)


def _tokens(chunks: Sequence[pb.Chunk], vocab_size: int, max_tokens: int) -> Tensor:
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UserError(f"model_input has a chunk of type {kind}; this server takes text only")
        if len(chunk.encoded_text.tokens) % 4:
            raise UserError(f"a text chunk has {len(chunk.encoded_text.tokens)} bytes, not a multiple of 4")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32))
    tokens = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int64))
    require_prompt(tokens, vocab_size, max_tokens)
    return tokens


def require_prompt(tokens: Tensor | Sequence[int], vocab_size: int, max_tokens: int) -> None:
    """Raise UserError for an empty or too long model input, or for a token outside of the vocabulary."""
    if not 1 <= len(tokens) <= max_tokens:
        raise UserError(f"model_input has {len(tokens)} tokens; expected 1 to {max_tokens}")
    require_tokens("model_input", tokens, vocab_size)


def require_tokens(name: str, ids: Tensor | Sequence[int], vocab_size: int) -> None:
    """Raise UserError for a token id outside of the vocabulary."""
    # JSON has integers of any size, which tensors do not hold.
    low, high = (int(x) for x in (ids.aminmax() if isinstance(ids, Tensor) else (min(ids), max(ids))))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise UserError(f"{name} has token id {wrong}; expected 0 to {vocab_size - 1}: is it this model's tokenizer?")


def _tensor(name: str, message: pb.Tensor, dtype: int, length: int) -> Tensor:
    """Return a tensor [length] or [length, K]; its sizes are checked before memory is allocated."""
    kind = np.dtype(np.int64 if dtype == pb.DTYPE_INT64 else np.float32)
    if message.dtype != dtype:
        raise UserError(f"{name} has dtype {message.dtype}; expected {kind.name}")
    shape = tuple(message.shape) or (length,)
    if shape[0] != length or len(shape) > 2 or (len(shape) == 2 and not 1 <= shape[1] <= MAX_TARGETS):
        raise UserError(f"{name} is {shape}; expected ({length},), or ({length}, 1 to {MAX_TARGETS})")
    if message.WhichOneof("encoding") == "sparse_csr":
        return _dense(name, message.sparse_csr, kind, shape)
    if len(message.dense) != math.prod(shape) * kind.itemsize:
        raise UserError(f"{name} has {len(message.dense)} bytes; its shape {shape} needs {kind.itemsize} per value")
    return torch.from_numpy(np.frombuffer(message.dense, dtype=kind).copy()).view(shape)


def _dense(name: str, message: pb.SparseCsr, kind: np.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a sparse matrix as a dense tensor; cells that are not listed are 0."""
    if len(shape) != 2 or any(len(part) % 8 for part in (message.crow_indices, message.col_indices)):
        raise UserError(f"{name} is sparse with shape {shape}; expected a matrix with int64 indices")
    rows, columns = (np.frombuffer(part, dtype=np.int64) for part in (message.crow_indices, message.col_indices))
    counts = np.diff(rows)
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != len(columns) or (counts < 0).any():
        raise UserError(f"{name} has {len(rows)} sparse row pointers that do not fit its shape {shape}")
    if len(message.values) != len(columns) * kind.itemsize or ((columns < 0) | (columns >= shape[1])).any():
        raise UserError(f"{name} has sparse columns or values that do not fit its shape {shape}")
    dense = np.zeros(shape, dtype=kind)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = np.frombuffer(message.values, dtype=kind)
    return torch.from_numpy(dense)


def loss_response(result: LossResult) -> bytes:
    """Return the body of a ForwardBackwardOutput: `logprobs` and `elementwise_loss` of each document."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = result.total
    pairs = zip(result.logprobs, result.losses, strict=True)
    # The trailing shape is per record: consecutive documents with the same number of targets share one.
    for trailing, group in groupby(pairs, key=lambda pair: tuple(pair[0].shape[1:])):
        columns = zip(*group, strict=True)
        record = message.loss_fn_outputs.add()
        for name, column in zip(("logprobs", "elementwise_loss"), columns, strict=True):
            arrays = [tensor.float().numpy() for tensor in column]
            record.num_datums = len(arrays)
            offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
            record.fields[name].CopyFrom(
                pb.BatchedTensor(
                    data=b"".join(array.tobytes() for array in arrays),
                    offsets=offsets.tobytes(),
                    dtype=pb.DTYPE_FLOAT32,
                    trailing_shape=trailing,
                )
            )
    return message.SerializeToString()


def sample_response(answers: Sequence[ModelResponse], scores: PromptScores | None, last_n: int | None) -> bytes:
    """Return the body of a SampleResponse.

    Args:
        answers: the sampled sequences.
        scores: scores of the prompt; None if they were not requested.
        last_n: report scores only of the last n tokens of the prompt.
    """
    message = pb.SampleResponse()
    for answer in answers:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if answer.stop_reason == "length" else pb.STOP_REASON_STOP,
            tokens=np.asarray(answer.output_tokens, dtype=np.int32).tobytes(),
            logprobs=np.asarray(answer.output_logprobs, dtype=np.float32).tobytes(),
        )
        if answer.output_top_logprobs:
            sequence.topk_sampled_logprobs.CopyFrom(_top_logprobs(answer.output_top_logprobs))
    if scores is not None:
        logprobs = np.asarray([math.nan, *scores.logprobs], dtype=np.float32)
        skipped = 0 if last_n is None else len(logprobs) - last_n
        logprobs[:skipped] = math.nan
        message.prompt_logprobs = logprobs.tobytes()
        if scores.top:
            rows: list[TopLogprobs] = [[], *scores.top]
            message.topk_prompt_logprobs.CopyFrom(
                _top_logprobs([[] if row < skipped else best for row, best in enumerate(rows)])
            )
    return message.SerializeToString()


def _top_logprobs(rows: Sequence[TopLogprobs]) -> pb.TopkLogprobs:
    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), dtype=np.int32)
    values = np.full((len(rows), width), -99999.0, dtype=np.float32)  # of empty cells, by the SDK's definition
    for row, best in enumerate(rows):
        for column, (token, logprob) in enumerate(best):
            ids[row, column], values[row, column] = token, logprob
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=width, length=len(rows))
