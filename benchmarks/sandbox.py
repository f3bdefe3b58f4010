"""Run thousands of hostile and honest programs in the sandbox, and count escapes, leftovers and programs per second.

    python -m benchmarks.sandbox --record benchmarks/records/sandbox.jsonl
    python -m benchmarks.sandbox --record trial.jsonl --programs 200 --isolation namespaces

Each isolation runs `--programs` programs of `benchmarks.sandbox_programs` on two workers: every hostile program at
least once, endless ones seldom, as they take a second. Then it times trivial Python programs. A program escapes if it
reads, writes, signals or reaches something outside, or if a limit does not hold. Leftovers are processes, files in
shared folders, and mounts. The exit code is 1 if there is one of either, or an isolation does not work here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from archon.rl.sandbox import Sandbox
from archon.rl.sandbox.inside.supervisor import descendants
from archon.schema.errors import SandboxError
from benchmarks.harness import say
from benchmarks.sandbox_programs import FAST_HOSTILE, HONEST, PROGRAMS, SECRET, SLOW_HOSTILE, command_of

WORKERS = 2
SLOW_SHARE, HOSTILE_SHARE = 0.06, 0.5
TRIVIAL, SECONDS = {"main.py": "print(1)"}, 10.0
AIM = 50.0  # trivial programs per second
_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def leftovers(own: int, token: str) -> list[str]:
    """Return descendants that are no process of a sandbox, and files with `token` in their names.

    Args:
        own: process id of the sandboxes' owner.
        token: the mark in names of files.
    """
    found = []
    for pid in descendants(own):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"987" in words or token.encode() in b" ".join(words):
            found.append(f"process {pid}: {words}")
    for folder in _FOLDERS:
        found += [str(path) for path in Path(folder).glob(f"*{token}*")]
    return found


def mix(count: int, seed: int) -> list[str]:
    """Return names of programs: each at least once, then drawn by their shares, in random order."""
    source = random.Random(seed)
    names = list(PROGRAMS)[:count]
    for _ in range(count - len(names)):
        draw = source.random()
        kind = SLOW_HOSTILE if draw < SLOW_SHARE else FAST_HOSTILE if draw < SLOW_SHARE + HOSTILE_SHARE else HONEST
        names.append(source.choice(list(kind)))
    source.shuffle(names)
    return names


def hold(isolation: Any, count: int) -> dict[str, Any]:
    """Run the programs in one isolation and return what happened."""
    token = f"archon-hostile-{os.urandom(6).hex()}"
    os.environ["SECRET"] = SECRET
    mounts = Path("/proc/self/mountinfo").read_text()
    names, faults, ends = mix(count, seed=0), Counter[str](), Counter[str]()
    shown: list[str] = []
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
        Sandbox(isolation=isolation, workers=WORKERS) as sandbox,
        ThreadPoolExecutor(WORKERS) as threads,
    ):
        secret = Path(folder, "secret.txt")
        secret.write_text(SECRET)
        os.chmod(folder, 0o755)
        unix.bind(f"{folder}/socket")
        unix.listen()
        abstract.bind(f"\0{token}")
        abstract.listen()
        port = str(server.getsockname()[1])
        values = {"token": token, "secret": str(secret), "port": port, "socket": f"{folder}/socket"}

        def run(name: str) -> None:
            program = PROGRAMS[name]
            try:
                result = sandbox.run(*command_of(program, values), stdin=program.stdin, limits=program.limits)
            except SandboxError as error:
                faults[name] += 1
                shown.append(f"{name}: {error}")
                return
            ends[result.limit or ("exit 0" if result.ok else "other exits")] += 1
            if fault := program.fault(result):
                faults[name] += 1
                shown.append(f"{name}: {fault}")

        started = time.monotonic()
        list(threads.map(run, names))
        seconds = time.monotonic() - started
        left = leftovers(os.getpid(), token)

        def trivial(until: float) -> int:
            done = 0
            while time.monotonic() < until:
                done += sandbox.run(["python", "main.py"], TRIVIAL).stdout == "1\n"
            return done

        until = time.monotonic() + SECONDS
        per_second = sum(threads.map(trivial, [until] * WORKERS)) / SECONDS
    left += [f"process {pid}" for pid in descendants(os.getpid()) if Path(f"/proc/{pid}/ns/user").exists()]
    left += ["mounts"] if Path("/proc/self/mountinfo").read_text() != mounts else []
    for line in shown[:20]:
        say(line)
    return {
        "isolation": isolation,
        "programs": len(names),
        "hostile": sum(name not in HONEST for name in names),
        "kinds": len(set(names)),
        "seconds": round(seconds, 1),
        "ends": dict(sorted(ends.items())),
        "escapes": sum(faults.values()),
        "escaped": dict(faults),
        "leftovers": left,
        "workers": WORKERS,
        "trivial_per_second": round(per_second, 1),
        "passed": not faults and not left and per_second >= AIM,
    }


def sentence(rows: list[dict[str, Any]]) -> str:
    """Return what a record says, for the guide."""
    one, two = (f"{row['trivial_per_second']:.0f}" for row in rows)
    (programs,) = {row["programs"] for row in rows}
    (workers,) = {row["workers"] for row in rows}
    escapes, left = sum(row["escapes"] for row in rows), sum(len(row["leftovers"]) for row in rows)
    return (
        f"In each of {' and '.join(row['isolation'] for row in rows)}, {programs:,} honest and hostile programs "
        f"(`make test-sandbox`) had {escapes} escapes and left {left} processes, files and mounts. On {workers} "
        f"workers it ran {one} trivial Python programs per second with {rows[0]['isolation']}, and {two} with "
        f"{rows[1]['isolation']}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, overwritten")
    parser.add_argument("--programs", type=int, default=5000, help="of each isolation")
    parser.add_argument("--isolation", nargs="+", default=["bubblewrap", "namespaces"])
    options = parser.parse_args()
    rows = []
    for isolation in options.isolation:
        rows.append(hold(isolation, options.programs))
        say(json.dumps(rows[-1], indent=2))
        options.record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


if __name__ == "__main__":
    main()
