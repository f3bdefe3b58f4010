"""Rendezvous check: a store that only the ranks of one start of a run use.

The store of torchrun outlives the ranks and keeps keys of earlier starts. Restarted ranks would read the addresses of
dead ranks and wait for them (PyTorch 2.13 with gloo; PyTorch issue 135712). The restart count of torchrun cannot
distinguish starts, because each machine counts for itself.
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
    """Return a new connection to the store of torchrun; None for a single process or a launcher without a store.

    After `join_rendezvous` it holds only keys of this start; before, keys of starts with the same restart count.
    """
    store = _torchrun_store(limit)
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return None if store is None else dist.PrefixStore(_name or f"start-{count}", store)


def join_rendezvous(rank: int, size: int, limit: timedelta) -> dist.Store | None:
    """Agree on this start with the other ranks and return its store. A collective.

    Raises:
        DistStoreError: the other ranks do not join within `limit`.
    """
    global _name
    store = _torchrun_store(limit)
    if store is not None:
        _name = agree_on_name(store, rank, size, limit)
    return open_store(limit)


def agree_on_name(store: dist.Store, rank: int, size: int, limit: timedelta) -> str:
    """Return a name that the ranks of this start share with no other start.

    Every rank sends a nonce to rank 0; a live rank 0 echoes it.
    """
    if rank:
        nonce = uuid.uuid4().hex
        store.set(f"greeting/{rank}", nonce)
        store.wait([f"answer/{nonce}"], limit)
        name = store.get(f"answer/{nonce}").decode()
        store.set(f"joined/{name}/{rank}", "")
        return name
    name, until, answered = uuid.uuid4().hex, time.monotonic() + limit.total_seconds(), set[str]()
    greetings = [f"greeting/{peer}" for peer in range(1, size)]
    store.wait(greetings, limit)
    while not store.check([f"joined/{name}/{peer}" for peer in range(1, size)]):
        for nonce in {value.decode() for value in store.multi_get(greetings)} - answered:  # dead ranks included
            store.set(f"answer/{nonce}", name)
            answered.add(nonce)
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
