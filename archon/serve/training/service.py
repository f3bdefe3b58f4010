"""The operations of the training service: sessions, models, samplers, checkpoints and futures of each client."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from tinker import types

from archon.engine.lora_pool import AdamStep
from archon.generation.seeds import request_seed
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.schema.errors import ConfigError, UserError
from archon.serve.service import Limits, require_local
from archon.serve.sessions import LimitError
from archon.serve.training.queues import Queues, Task, failure
from archon.serve.training.sampler import Sampler
from archon.serve.training.store import LOST, Checkpoint, Kind, Store
from archon.serve.training.trainer import LoRAShape, Trainer
from archon.serve.training.wire import (
    LossRequest,
    loss_request,
    parse_proto,
    require_prompt,
    require_tokens,
    sample_response,
)

logger = logging.getLogger(__name__)

SDK_VERSION = version("tinker")
SESSION_SECONDS = 600.0
"""Seconds without a heartbeat until a session ends; the SDK sends one every 10 s."""
LONG_POLL_SECONDS = 20.0
"""Longest wait for a future in one request; the SDK gives up after 45 s."""
HOUSEKEEPING_SECONDS = 5.0
MAX_SESSIONS = 256
"""Maximum open sessions of a client."""
MAX_MODELS = 4096
"""Maximum models of all clients, in memory and on disk."""
MAX_SAMPLES = 512
"""Maximum unfinished sampling requests; the SDK repeats further ones later."""
MAX_ANSWERS = 1024
"""Maximum answers of one sampling request."""
MAX_STOPS = 64
"""Maximum stop strings or tokens; each is searched in the answer after every token."""
MAX_METADATA = 1 << 16
"""Maximum characters of metadata of a session, model or checkpoint."""
MAX_PARSING = 2
"""Maximum bodies that are decompressed and parsed at once; one may have 256 MiB."""
MAX_SHOWN = 100
"""Maximum sessions and models on the page."""
UNNAMED = "_step-"
"""Prefix of checkpoints that a client samples from without naming them; the end of their session deletes them."""
URL_SECONDS = 3600.0
"""Seconds for which a download URL is valid."""
NO_UNEMBEDDING = (
    "archon trains no LoRA of the unembedding: train_unembed is accepted and has no effect, and get_info and "
    "weights_info report it as false"
)


class TrainingService:
    """State of the service. Use it on one event loop.

    A client is an API key. It sees only its own sessions, models, samplers, checkpoints and futures.

    Attributes:
        model: the name of the base model for clients.
        tokenizer: the tokenizer folder for clients.
        tokens: accepted API keys; empty accepts any key, which is allowed only on loopback.
        disk_bytes: maximum bytes of a client's checkpoints.
    """

    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        store: Store,
        *,
        model: str,
        tokenizer: str,
        tokens: Sequence[str] = (),
        disk_bytes: int = 64 << 30,
    ) -> None:
        self.trainer, self.sampler, self.store = trainer, sampler, store
        self.model, self.tokenizer, self.tokens = model, tokenizer, tuple(tokens)
        self.disk_bytes = disk_bytes
        self.limits = Limits(body_bytes=64 << 20, total_body_bytes=256 << 20)
        self.parsing = asyncio.Semaphore(MAX_PARSING)
        self._body_bytes = 0  # of all requests in progress
        if any(not token.startswith("tml-") for token in tokens):
            raise ConfigError("a token must start with tml-, or the SDK refuses to send it")
        self._secret = secrets.token_bytes(32)
        self._events: dict[str, asyncio.Event] = {}  # of pending futures
        self._samples = 0
        self._tasks = set[asyncio.Task[None]]()

    def start(self) -> None:
        """Start the queues and the housekeeping on the running event loop."""
        self.queues = Queues(self.trainer, self._finish)
        self._spawn(self._housekeeping())

    async def close(self) -> None:
        """Wait for the running batch, and release threads and files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.queues.stop()
        await asyncio.to_thread(self.trainer.close)
        await asyncio.to_thread(self.sampler.close)
        self.store.close()

    def authorize(self, key: str, host: str, origin: str | None) -> str:
        """Return the owner of everything that requests with this API key create.

        Raises:
            HTTPException: access is denied.
        """
        if not self.tokens:
            require_local(host, origin)
        elif not any(hmac.compare_digest(key.encode("utf-8", "replace"), token.encode()) for token in self.tokens):
            raise HTTPException(401, "the API key is not one of the server's tokens")
        return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()

    def reserve(self, size: int) -> None:
        """Count bytes of a body; a negative size releases them. Raises LimitError if there are too many."""
        if size > 0 and self._body_bytes + size > self.limits.total_body_bytes:
            raise LimitError(f"the requests in progress have {self._body_bytes:,} bytes, the maximum; try again")
        self._body_bytes += size

    # Sessions

    def client_config(self, sdk_version: str) -> dict[str, Any]:
        """Return the SDK's settings; refuse another version of the SDK, whose messages differ."""
        if sdk_version.split(".")[:2] != SDK_VERSION.split(".")[:2]:
            raise HTTPException(
                400,
                f"this server speaks the protocol of tinker {SDK_VERSION}, and the client is {sdk_version:.80}; "
                f"pip install tinker=={SDK_VERSION}",
            )
        return {"proto_compress_fwdbwd": True, "sample_join_sampling_session": True}

    def create_session(self, owner: str, request: types.CreateSessionRequest) -> dict[str, Any]:
        """Open a session."""
        self.client_config(request.sdk_version)
        _require_small(request.user_metadata, request.tags, request.display_name)
        count = self.store.query("SELECT count(*) AS n FROM sessions WHERE owner=? AND ended=0", owner)[0]["n"]
        if count >= MAX_SESSIONS:
            raise HTTPException(
                400, f"{count} sessions are open, the maximum; close some, or wait {SESSION_SECONDS:g} s"
            )
        session = self.store.create_session(owner, request.user_metadata, request.display_name)
        return {"session_id": session, "warning_message": NO_UNEMBEDDING}

    def touch(self, owner: str, session: str) -> None:
        """Record a heartbeat."""
        self._session(owner, session)
        self.store.touch_session(session)

    def end_session(self, session: str, reason: str) -> None:
        """Remove the models of a session from memory, and fail its waiting requests."""
        for row in self.store.query("SELECT id, owner FROM models WHERE session=?", session):
            self.queues.close_model(row["id"], reason)
            for checkpoint in self.store.checkpoints(row["owner"], row["id"]):
                if checkpoint.name.startswith(UNNAMED):
                    self._forget(checkpoint)
        self.store.end_session(session)

    def _session(self, owner: str, session: str) -> None:
        rows = self.store.query("SELECT ended FROM sessions WHERE id=? AND owner=?", session, owner)
        if not rows:
            raise HTTPException(404, f"this API key has no session {session!r:.80}")
        if rows[0]["ended"]:
            raise HTTPException(410, "the session has ended; create a new ServiceClient")

    # Models

    def create_model(self, owner: str, request: types.CreateModelRequest) -> dict[str, Any]:
        """Queue the creation of a LoRA."""
        self._require_base(request.base_model)
        if request.lora_config is None:
            raise HTTPException(400, "lora_config is missing; this server trains LoRAs over one frozen base")
        if request.optimizer_config.type != "adamw":
            raise HTTPException(400, f"optimizer {request.optimizer_config.type!r:.80} is not supported; use adamw")
        lora = request.lora_config
        chosen = {} if lora.seed is None else {"seed": lora.seed}
        shape = LoRAShape(lora.rank, lora.train_attn, lora.train_mlp, **chosen)
        self.trainer.sizes(shape)  # before it is queued
        model = f"{request.session_id}:train:{request.model_seq_id}"
        return self._open_model(
            owner, request.session_id, model, asdict(shape), request.user_metadata,
            lambda: self._create(model, shape, None, optimizer=False),
        )  # fmt: skip

    def load_weights(self, owner: str, request: types.LoadWeightsRequest) -> dict[str, Any]:
        """Queue the load of a checkpoint into a model, or the creation of a model from it."""
        if request.weights_access_token is not None:
            raise HTTPException(400, "weights_access_token is not supported; use the API key that saved the checkpoint")
        if request.optimizer_config is not None and request.optimizer_config.type != "adamw":
            raise HTTPException(400, f"optimizer {request.optimizer_config.type!r:.80} is not supported; use adamw")
        if request.base_model is not None:
            self._require_base(request.base_model)
        if request.session_id is not None:
            checkpoint = self._checkpoint(owner, request.path)
            folder, shape = self._folder(checkpoint), LoRAShape(**checkpoint.config)
            model = f"{request.session_id}:train:{request.model_seq_id}"
            return self._open_model(
                owner, request.session_id, model, checkpoint.config, request.user_metadata,
                lambda: self._create(model, shape, folder, optimizer=request.optimizer) | {"path": request.path},
            )  # fmt: skip
        model = request.model_id or ""

        def prepare() -> Callable[[], dict[str, Any]]:
            folder = self._folder(self._checkpoint(owner, request.path))
            return lambda: self._load(model, folder, request.path, optimizer=request.optimizer)

        return self._queue(owner, model, request.seq_id, prepare)

    def _open_model(
        self, owner: str, session: str, model: str, config: Any, metadata: Any, create: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        self._session(owner, session)
        _require_small(metadata)
        future = f"{model}:0"
        if not self._known(owner, future):
            if self.store.query("SELECT id FROM models WHERE id=?", model):
                raise HTTPException(400, f"model {model} exists")
            live = self.store.query("SELECT count(*) AS n FROM models WHERE live=1")[0]["n"]
            if live >= MAX_MODELS:
                raise HTTPException(400, f"{live} models exist, the maximum; close some sessions")
            self.store.create_model(model, session, owner, config, metadata)
            self.queues.open(model, owner)
            self._pending(owner, future, model)
            self.queues.submit(model, 0, Task(future, create))
        return {"request_id": future, "model_id": model}

    def _create(self, model: str, shape: LoRAShape, folder: Path | None, *, optimizer: bool) -> dict[str, Any]:
        self.trainer.create(model, shape)
        if folder is not None:
            self.trainer.load(model, folder, optimizer=optimizer)
        return {"model_id": model}

    def _load(self, model: str, folder: Path, path: str, *, optimizer: bool) -> dict[str, Any]:
        self.trainer.load(model, folder, optimizer=optimizer)
        return {"path": path, "model_id": model}

    def model_info(self, owner: str, model: str) -> dict[str, Any]:
        """Return a model's `GetInfoResponse`."""
        rows = self.store.query("SELECT * FROM models WHERE id=? AND owner=?", model, owner)
        if not rows:
            raise HTTPException(404, f"this API key has no model {model!r:.120}")
        rank = json.loads(rows[0]["config"])["rank"]
        data = {"arch": self.trainer.family, "model_name": self.model, "tokenizer_id": self.tokenizer}
        return {"model_data": data, "model_id": model, "is_lora": True, "lora_rank": rank, "model_name": self.model}

    def _require_base(self, name: str) -> None:
        if name != self.model:
            raise HTTPException(404, f"base model {name!r:.120} is not here; this server has {self.model!r}")

    # Training

    async def loss(self, owner: str, body: bytes) -> dict[str, Any]:
        """Queue a forward_backward request."""
        message = await asyncio.to_thread(parse_proto, body)
        self._require_model(owner, message.model_id, message.seq_id)
        work: LossRequest | UserError
        try:
            work = await asyncio.to_thread(loss_request, message, self.trainer.vocab_size, self.trainer.max_tokens)
        except UserError as error:
            work = error
        return self._queue(owner, message.model_id, message.seq_id, lambda: work)

    def optim_step(self, owner: str, request: types.OptimStepRequest) -> dict[str, Any]:
        """Queue an optimizer step."""
        params = request.optim_params

        def prepare() -> Callable[[], dict[str, Any]]:
            settings = _adam_step(params)
            return lambda: {"metrics": {"grad_norm": self.trainer.step(request.model_id, settings)}}

        return self._queue(owner, request.model_id, request.seq_id, prepare, short=True)

    def save(
        self,
        owner: str,
        request: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest | types.SaveWeightsExternalRequest,
    ) -> dict[str, Any]:
        """Queue the save of a checkpoint, and for a sampler without a name also its sampling session."""
        model = request.model_id

        def prepare() -> Callable[[], dict[str, Any]]:
            if isinstance(request, types.SaveWeightsForSamplerRequest):
                return self._save_for_sampler(owner, request)
            if isinstance(request, types.SaveWeightsExternalRequest):
                if request.age_encryption_recipients:
                    raise UserError("age_encryption_recipients is not supported; download over a trusted connection")
                return self._save(owner, model, "external_weights", request.path, request.ttl_seconds, None)
            name = request.path or f"step-{request.seq_id}"
            return self._save(
                owner, model, "weights", name, request.ttl_seconds, request.user_metadata, replace=request.overwrite
            )

        return self._queue(owner, model, request.seq_id, prepare)

    def _save_for_sampler(
        self, owner: str, request: types.SaveWeightsForSamplerRequest
    ) -> Callable[[], dict[str, Any]]:
        if request.kind != "snapshot":
            raise UserError("inflight sampling clients are not supported; save a snapshot after each update")
        model, name = request.model_id, request.path or f"{UNNAMED}{request.seq_id}"
        save = self._save(
            owner,
            model,
            "sampler_weights",
            name,
            request.ttl_seconds,
            request.user_metadata,
            unnamed=request.path is None,
        )
        if request.path is not None:
            return save
        session = model.rpartition(":train:")[0]
        sampler = f"{session}:sample:{request.sampling_session_seq_id}"

        def save_and_open() -> dict[str, Any]:
            path = save()["path"]
            self._on_loop(lambda: self.store.create_sampler(sampler, session, owner, path))
            return {"sampling_session_id": sampler}

        return save_and_open

    def _save(
        self,
        owner: str,
        model: str,
        kind: Kind,
        name: str,
        ttl: int | None,
        metadata: Any,
        *,
        replace: bool = False,
        unnamed: bool = False,
    ) -> Callable[[], dict[str, Any]]:
        """Return the save of a checkpoint, for the engine thread."""
        if name.startswith("_") and not unnamed:
            raise UserError(
                f"checkpoint name {name!r:.200} begins with an underscore, which is reserved; choose another"
            )
        folder, path = self.store.folder(model, kind, name), f"tinker://{model}/{kind}/{name}"
        expires = None if ttl is None else time.time() + _checked_ttl(ttl)
        _require_small(metadata)
        config = json.loads(self.store.query("SELECT config FROM models WHERE id=?", model)[0]["config"])

        def check() -> None:
            if self.store.find_checkpoint(owner, path) is not None and not replace:
                raise UserError(f"the checkpoint {path} exists; choose another name, or pass overwrite=True")
            if self.store.used_bytes(owner) > self.disk_bytes:
                raise UserError(f"this client's checkpoints exceed {self.disk_bytes:,} bytes; delete some")

        def save() -> dict[str, Any]:
            self._on_loop(check)
            size = self.trainer.save(model, folder, optimizer=kind == "weights")
            self.sampler.forget(folder)  # an earlier checkpoint of this name
            saved = Checkpoint(path, model, owner, kind, name, config, metadata, time.time(), expires, size)
            self._on_loop(lambda: self.store.add_checkpoint(saved))
            return {"path": path}

        return save

    def _on_loop(self, work: Callable[[], Any]) -> Any:
        """Run work on the event loop, from the engine thread: SQLite's connection belongs to it."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _require_model(self, owner: str, model: str, sequence_id: int | None) -> None:
        """Raise HTTPException for a model of another client, and for a new request of a model that is not in memory."""
        if not self.store.query("SELECT id FROM models WHERE id=? AND owner=?", model, owner):
            raise HTTPException(404, f"this API key has no model {model!r:.120}")
        if model not in self.queues and not self._known(owner, f"{model}:{sequence_id}"):
            saved = [
                checkpoint.path for checkpoint in self.store.checkpoints(owner, model) if checkpoint.kind == "weights"
            ]
            advice = f"create a training client from its last state, {saved[0]}" if saved else "it has no saved state"
            raise HTTPException(
                404, f"model {model} is not in memory: the server restarted, or its session ended; {advice}"
            )

    def _queue(
        self,
        owner: str,
        model: str,
        sequence_id: int | None,
        prepare: Callable[[], Any],
        *,
        short: bool = False,
    ) -> dict[str, Any]:
        """Queue a request; its sequence id makes a retry harmless.

        An invalid request takes its place in the queue, where its future fails: later requests wait for every id.
        """
        self._require_model(owner, model, sequence_id)
        if sequence_id is None or not 0 <= sequence_id < 2**62:
            raise HTTPException(400, f"seq_id is {sequence_id}; expected the number of the request")
        future = f"{model}:{sequence_id}"
        if not self._known(owner, future):
            self.queues.check(model, sequence_id)
            try:
                work = prepare()
            except HTTPException as error:
                work = UserError(str(error.detail))
            except UserError as error:
                work = error
            self._pending(owner, future, model)
            self.queues.submit(model, sequence_id, Task(future, work, short))
        return {"request_id": future, "model_id": model}

    # Sampling

    def create_sampler(self, owner: str, request: types.CreateSamplingSessionRequest) -> dict[str, Any]:
        """Open a sampling session of a checkpoint or of the base model."""
        self._session(owner, request.session_id)
        if request.model_path is not None:
            self._checkpoint(owner, request.model_path)
        else:
            self._require_base(request.base_model or "")
        sampler = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self.store.create_sampler(sampler, request.session_id, owner, request.model_path)
        return {"sampling_session_id": sampler}

    def sampler_info(self, owner: str, sampler: str) -> dict[str, Any]:
        """Return a sampling session's `GetSamplerResponse`."""
        rows = self.store.query("SELECT path FROM samplers WHERE id=? AND owner=?", sampler, owner)
        if not rows:
            raise HTTPException(404, f"this API key has no sampling session {sampler!r:.120}")
        return {"sampler_id": sampler, "base_model": self.model, "model_path": rows[0]["path"]}

    def sample(self, owner: str, request: types.SampleRequest) -> dict[str, Any]:
        """Start to answer a sampling request."""
        future = f"sample:{secrets.token_hex(16)}"
        path = request.model_path
        if request.sampling_session_id is not None:
            path = self.sampler_info(owner, request.sampling_session_id)["model_path"]
            if request.seq_id is None:
                raise UserError("seq_id is missing; a sampling session numbers its requests")
            future = f"{request.sampling_session_id}:{request.seq_id}"
        elif path is None:
            self._require_base(request.base_model or "")
        if not self._known(owner, future):
            if self._samples >= MAX_SAMPLES:
                raise LimitError(f"{self._samples} sampling requests are unfinished, the maximum; try again")
            folder = None if path is None else self._folder(self._checkpoint(owner, path))
            requests = self._model_requests(request, future)
            last_n = request.prompt_logprobs_last_n
            wants_scores = request.prompt_logprobs or request.topk_prompt_logprobs
            top = request.topk_prompt_logprobs if wants_scores else None
            self._pending(owner, future, None)
            self._samples += 1
            self._spawn(self._sample(future, requests, folder, top, last_n))
        ids = [f"{future}:{number}" for number in range(request.num_samples)]
        return {"request_id": future, "sample_sequence_ids": ids}

    def cancel(self, owner: str, future: str) -> None:
        """Stop an unfinished sampling request; its future fails."""
        if self._known(owner, future):
            self.sampler.abort(future)

    async def _sample(
        self, future: str, requests: Sequence[ModelRequest], folder: Path | None, top: int | None, last_n: int | None
    ) -> None:
        try:
            answers, scores = await asyncio.wrap_future(self.sampler.sample(requests, folder, top))
            if any(answer.stop_reason == "abort" for answer in answers):
                raise UserError("the sampling request was canceled")
            self.queues.activity.sampled(sum(len(answer.output_tokens) for answer in answers))
            self._finish(future, sample_response(answers, scores, last_n), True)
        except Exception as error:
            if not isinstance(error, UserError):
                logger.exception("a sampling request failed")
            self._finish(future, failure(error), False)
        finally:
            self._samples -= 1

    def _model_requests(self, request: types.SampleRequest, rid: str) -> list[ModelRequest]:
        """Return a request of the generator for each answer.

        Raises:
            UserError: names the field.
        """
        params = request.sampling_params
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(request, name):
                raise UserError(f"{name} is not supported by this server; leave it out")
        if not 1 <= request.num_samples <= MAX_ANSWERS:
            raise UserError(f"num_samples is {request.num_samples}; expected 1 to {MAX_ANSWERS}")
        if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in request.prompt.chunks):
            raise UserError("the prompt has a chunk that is not text; this server takes text only")
        prompt = request.prompt.to_ints()
        limit = self.sampler.generator.max_seq_len
        require_prompt(prompt, self.trainer.vocab_size, limit - 1)
        last_n = request.prompt_logprobs_last_n
        if last_n is not None and not (request.prompt_logprobs and 1 <= last_n < len(prompt)):
            raise UserError(
                f"prompt_logprobs_last_n is {last_n}; expected 1 to {len(prompt) - 1}, with prompt_logprobs"
            )
        if not 0 <= request.topk_prompt_logprobs <= self.trainer.vocab_size:
            raise UserError(f"topk_prompt_logprobs is {request.topk_prompt_logprobs}; expected at most the vocabulary")
        stop = params.stop
        stops = [stop] if isinstance(stop, str) else list(stop or [])
        if len(stops) > MAX_STOPS:
            raise UserError(f"stop has {len(stops)} items; expected at most {MAX_STOPS}")
        stop_ids = [item for item in stops if not isinstance(item, str)]
        if stop_ids:
            require_tokens("stop", stop_ids, self.trainer.vocab_size)
        greedy = params.temperature == 0
        gconfig = GenerationHyperparameters(
            max_new_tokens=params.max_tokens if params.max_tokens is not None else limit - len(prompt),
            temperature=1.0 if greedy else params.temperature,
            greedy=greedy,
            top_k=None if params.top_k == -1 else params.top_k,
            top_p=params.top_p,
            stop=[item for item in stops if isinstance(item, str)],
            stop_token_ids=stop_ids,
            ignore_eos=stop is not None,  # the SDK: None keeps the end-of-text tokens, a list replaces them
            top_logprobs=request.topk_sample_logprobs,
        )
        seeds: list[int | None] = [None] * request.num_samples
        if params.seed is not None:
            seeds = [request_seed(params.seed, number) >> 1 for number in range(request.num_samples)]
        return [ModelRequest(prompt, gconfig.new(seed=seed), rid) for seed in seeds]

    # Futures

    async def retrieve(self, owner: str, future: str) -> tuple[bytes, bool] | None:
        """Return the body of a future and whether it is protobuf; None if it is still pending."""
        if not self._known(owner, future):
            raise HTTPException(404, f"this API key has no future {future!r:.160}, or its result has expired")
        event = self._events.get(future)
        if event is not None:
            try:
                await asyncio.wait_for(event.wait(), LONG_POLL_SECONDS)
            except TimeoutError:
                return None
        rows = self.store.query("SELECT body, proto FROM futures WHERE id=? AND state='done'", future)
        if not rows:
            return failure(UserError(LOST)), False
        self.store.mark_retrieved(future)
        return rows[0]["body"], bool(rows[0]["proto"])

    def _known(self, owner: str, future: str) -> bool:
        return bool(self.store.query("SELECT id FROM futures WHERE id=? AND owner=?", future, owner))

    def _pending(self, owner: str, future: str, model: str | None) -> None:
        self.store.create_future(future, owner, model)
        self._events[future] = asyncio.Event()

    def _finish(self, future: str, body: bytes, proto: bool) -> None:
        self.store.finish_future(future, body, proto=proto)
        self._events.pop(future).set()

    # Checkpoints

    def _checkpoint(self, owner: str, path: str) -> Checkpoint:
        found = self.store.find_checkpoint(owner, path)
        if found is None:
            raise HTTPException(404, f"this API key has no checkpoint {path!r:.200}")
        return found

    def _folder(self, checkpoint: Checkpoint) -> Path:
        return self.store.folder(checkpoint.model, checkpoint.kind, checkpoint.name)

    def weights_info(self, owner: str, path: str) -> dict[str, Any]:
        """Return a checkpoint's `WeightsInfoResponse`."""
        config = self._checkpoint(owner, path).config
        flags = {key: config[key] for key in ("train_attn", "train_mlp")}
        return {"base_model": self.model, "is_lora": True, "lora_rank": config["rank"], "train_unembed": False} | flags

    def delete_checkpoint(self, owner: str, path: str) -> None:
        """Delete a checkpoint."""
        self._forget(self._checkpoint(owner, path))

    def set_ttl(self, owner: str, path: str, ttl_seconds: int | None) -> None:
        """Set the time to live of a checkpoint."""
        checkpoint = self._checkpoint(owner, path)
        self.store.set_expiry(checkpoint, None if ttl_seconds is None else _checked_ttl(ttl_seconds))

    def download_urls(self, owner: str, path: str, base_url: str) -> dict[str, Any]:
        """Return a signed URL of each file of an external checkpoint, a LoRA in PEFT's format."""
        folder, expires = self._folder(self._checkpoint(owner, path)) / "adapter", time.time() + URL_SECONDS
        urls = {}
        for file in sorted(folder.iterdir()):
            name = f"{folder.relative_to(self.store.root)}/{file.name}"
            urls[file.name] = (
                f"{base_url}/api/v1/files/{name}?expires={int(expires)}&signature={self._sign(name, int(expires))}"
            )
        return {"urls": urls, "expires": expires}

    def signed_file(self, name: str, expires: int, signature: str) -> Path:
        """Return the file of a signed URL."""
        if time.time() > expires or not hmac.compare_digest(signature.encode(), self._sign(name, expires).encode()):
            raise HTTPException(403, "the download URL is invalid or has expired; request a new one")
        return self.store.root / name

    def _sign(self, name: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires} {name}".encode(), hashlib.sha256).hexdigest()

    def _forget(self, checkpoint: Checkpoint) -> None:
        folder = self.store.delete_checkpoint(checkpoint)
        self.sampler.forget(folder)

    # The page

    def status(self, owner: str | None) -> dict[str, Any]:
        """Return the data of the page for a client, or for all clients if `owner` is None."""
        now, activity = time.time(), self.queues.activity
        where = "ended=0 AND (? IS NULL OR owner=?) ORDER BY seen DESC LIMIT ?"
        sessions = self.store.query(f"SELECT * FROM sessions WHERE {where}", owner, owner, MAX_SHOWN)
        where = "live=1 AND (? IS NULL OR owner=?) ORDER BY seen DESC LIMIT ?"
        models = self.store.query(f"SELECT * FROM models WHERE {where}", owner, owner, MAX_SHOWN)
        batches = self.queues.batches
        return {
            "model": self.model,
            "sdk": SDK_VERSION,
            "everyone": owner is None,
            "sessions": [
                {
                    "name": (row["name"] or row["id"])[:64],
                    "client": row["owner"][:8],
                    "models": sum(model["session"] == row["id"] for model in models),
                    "silent_seconds": now - row["seen"],
                }
                for row in sessions
            ],
            "models": [
                {
                    "name": row["id"][:8] + row["id"][32:],  # the session's id is long
                    "client": row["owner"][:8],
                    "rank": json.loads(row["config"])["rank"],
                    "waiting": self.queues.waiting(row["id"]),
                    **activity.curve(row["id"]),
                }
                for row in models
            ],
            "queue": {
                "waiting": self.queues.waiting(),
                "samples": self._samples,
                "models_per_batch": sum(batches) / max(len(batches), 1),
            },
            "tokens_per_second": activity.rates(),
        }

    # Housekeeping

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self.queues.loop

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _housekeeping(self) -> None:
        """End silent sessions, and drop expired checkpoints and futures."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            silent = time.time() - SESSION_SECONDS
            for row in self.store.query("SELECT id FROM sessions WHERE ended=0 AND seen < ?", silent):
                self.end_session(row["id"], f"the session sent no heartbeat for {SESSION_SECONDS:g} s and has ended")
            for checkpoint in self.store.expired_checkpoints():
                self._forget(checkpoint)
            self.store.drop_old_futures()
            self.queues.fail_gaps()


def _adam_step(params: Any) -> AdamStep:
    """Return the settings of an optimizer step; UserError if one is out of range."""
    if not isinstance(params, types.AdamParams):
        raise UserError(f"optimizer {getattr(params, 'type', '?')!r:.80} is not supported; use AdamParams")
    ranges = {
        "learning_rate": 0 <= params.learning_rate < math.inf,
        "beta1": 0 <= params.beta1 < 1,
        "beta2": 0 <= params.beta2 < 1,
        "eps": 0 <= params.eps < math.inf,
        "weight_decay": 0 <= params.weight_decay < math.inf,
        "grad_clip_norm": params.grad_clip_norm < math.inf,
    }
    for name, valid in ranges.items():
        if not valid:
            raise UserError(f"{name} is {getattr(params, name)}; expected a finite number from 0, and betas below 1")
    return AdamStep(
        params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, max(params.grad_clip_norm, 0)
    )


def _checked_ttl(ttl: int) -> int:
    if not 3600 <= ttl <= 10 * 366 * 86400:
        raise UserError(f"ttl_seconds is {ttl}; expected 3600 (1 hour) to 10 years, or none")
    return ttl


def _require_small(*metadata: Any) -> None:
    size = sum(len(str(value)) for value in metadata)
    if size > MAX_METADATA:
        raise UserError(f"the metadata has {size:,} characters; expected at most {MAX_METADATA:,}")
