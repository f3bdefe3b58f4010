"""A store for the ranks of one start of a run. torchrun's own outlives them, and has what those before left in it.

Ranks that torchrun starts again would take the addresses of dead ones for those of each other, and wait for them
(PyTorch 2.13 with gloo; PyTorch issue 135712). torchrun's count of restarts does not tell starts apart, for it is one
of each machine's own.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLL_SECONDS = 0.02

_name: str | None = None  # of this start, once its ranks have agreed on it


def open_store(limit: timedelta) -> dist.Store | None:
    """Returns a new connection to torchrun's store; None for a single process, or where the launcher keeps no store.

    It has the keys of this start alone once `join_rendezvous` has returned, before of those that torchrun counts as
    one.
    """
    store = _torchrun_store(limit)
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return None if store is None else dist.PrefixStore(_name or f"start-{count}", store)


def join_rendezvous(rank: int, size: int, limit: timedelta) -> dist.Store | None:
    """Returns a store of this start alone, as `open_store` does from now on. A collective.

    Raises DistStoreError where the other ranks do not come within `limit`.
    """
    global _name
    store = _torchrun_store(limit)
    if store is not None:
        _name = agree_on_name(store, rank, size, limit)
    return open_store(limit)


def agree_on_name(store: dist.Store, rank: int, size: int, limit: timedelta) -> str:
    """Returns a name that the ranks of one start have in common, and those of no other start.

    Each rank greets the first with a word of its own, which only a first rank that lives can answer.
    """
    if rank:
        word = uuid.uuid4().hex
        store.set(f"greeting/{rank}", word)
        store.wait([f"answer/{word}"], limit)
        name = store.get(f"answer/{word}").decode()
        store.set(f"joined/{name}/{rank}", "")
        return name
    name, until, answered = uuid.uuid4().hex, time.monotonic() + limit.total_seconds(), set[str]()
    greetings = [f"greeting/{other}" for other in range(1, size)]
    store.wait(greetings, limit)
    while not store.check([f"joined/{name}/{other}" for other in range(1, size)]):
        for word in {found.decode() for found in store.multi_get(greetings)} - answered:  # also of ranks that are dead
            store.set(f"answer/{word}", name)
            answered.add(word)
        if time.monotonic() > until:
            raise dist.DistStoreError(f"not all of {size} ranks have joined after {limit.total_seconds():g} s")
        time.sleep(POLL_SECONDS)
    return name


def _torchrun_store(limit: timedelta) -> dist.Store | None:
    env = os.environ
    if env.get("WORLD_SIZE", "1") == "1" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    except (KeyError, ValueError, RuntimeError):
        return None
    return dist.PrefixStore(f"archon/{env.get('TORCHELASTIC_RUN_ID', '')}", store)
