"""The sandbox: results, limits, privacy between programs, and what remains when its owner ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archon.rl.sandbox import Limits, Result, Sandbox, local
from archon.rl.sandbox.inside.supervisor import descendants
from archon.schema.errors import SandboxError
from tests.rl.sandbox.sandboxes import use_readable_python
from tests.test_readme import ROOT

SHORT = Limits(wall_seconds=5.0)


def python(sandbox: Sandbox, source: str, **options: Any) -> Result:
    return sandbox.run(["python", "main.py"], {"main.py": source} | options.pop("files", {}), **options)


def test_a_program_gets_files_arguments_and_input(any_sandbox: Sandbox) -> None:
    files: dict[str, str | bytes] = {"a/b.py": "x = 7", "c.bin": b"\xff\0", "main.py": ""}
    files["main.py"] = "import sys, a.b\nprint(sys.argv, a.b.x, open('c.bin', 'rb').read(), sys.stdin.read())\nexit(4)"
    result = any_sandbox.run(["python", "main.py", "1", "ü"], files, "in\nput")
    assert result == Result(4, None, "['main.py', '1', 'ü'] 7 b'\\xff\\x00' in\nput\n", "", result.seconds)
    assert not result.ok and 0 < result.seconds < 10
    assert any_sandbox.run(["cat", ".stdin", "-"], {".stdin": "a file"}, " and input").stdout == "a file and input"


def test_an_exception_is_printed_as_python_prints_it(any_sandbox: Sandbox) -> None:
    result = python(any_sandbox, "def f():\n    1/0\nf()")
    trace = (
        'Traceback (most recent call last):\n  File "main.py", line 3, in <module>\n    f()\n  File "main.py", line 2'
    )
    assert result.exit_code == 1 and result.stderr.startswith(trace) and "worker" not in result.stderr
    assert python(any_sandbox, "x = (").stderr.endswith("SyntaxError: '(' was never closed\n")


def test_a_missing_program_has_the_codes_of_a_shell(any_sandbox: Sandbox) -> None:
    result = any_sandbox.run(["no-such-program"])
    assert (result.exit_code, result.stderr) == (127, "no-such-program: No such file or directory\n")
    assert any_sandbox.run(["./a"], {"a": "text"}).exit_code == 126


def test_threads_and_exit_handlers_of_a_program_end_before_it(any_sandbox: Sandbox) -> None:
    source = "import atexit, threading, time\natexit.register(print, 'bye')\n"
    source += "threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()\nprint('main')"
    assert python(any_sandbox, source).stdout == "main\nlate\nbye\n"


@pytest.mark.parametrize(
    ("source", "limits", "name"),
    [
        ("while True: pass", Limits(cpu_seconds=0.2), "cpu_seconds"),
        ("import time; time.sleep(9)", Limits(wall_seconds=0.2), "wall_seconds"),
        ("while True: print('x' * 99)", Limits(output_bytes=5000), "output_bytes"),
        (
            "import os, time\nos.fork(); os.fork()\nx = bytearray(os.urandom(9)) * 7_000_000\ntime.sleep(9)",
            Limits(memory_bytes=100 << 20, wall_seconds=5),
            "memory_bytes",
        ),
    ],
)
def test_a_limit_ends_a_program_and_is_named(any_sandbox: Sandbox, source: str, limits: Limits, name: str) -> None:
    started_at = time.monotonic()
    result = python(any_sandbox, source, limits=limits)
    assert (result.exit_code, result.limit) == (None, name)
    assert len(result.stdout) <= limits.output_bytes and time.monotonic() - started_at < 3


def test_children_count_for_the_limits_of_their_program(any_sandbox: Sandbox) -> None:
    source = (
        "import os, time\nfor _ in range(30):\n    pid = os.fork()\n    if not pid:\n        sum(range(2 * 10**6))\n"
    )
    source += "        os._exit(0)\n    os.waitpid(pid, 0)\ntime.sleep(9)"
    assert python(any_sandbox, source, limits=Limits(cpu_seconds=0.4, wall_seconds=6)).limit == "cpu_seconds"


def test_processes_are_counted_by_the_kernel(sandbox: Sandbox) -> None:
    source = "import os, time\nn = 1\ntry:\n    while True:\n        if not os.fork(): time.sleep(9)\n        n += 1\n"
    source += "except BlockingIOError: print(n)"
    assert python(sandbox, source, limits=replace(SHORT, processes=9)).stdout == "9\n"


def test_files_are_counted_by_the_kernel(sandbox: Sandbox) -> None:
    source = "n = 0\ntry:\n    while True:\n        open(f'{n}', 'wb').write(bytes(1 << 16)); n += 1\n"
    source += "except OSError as error: print(14 <= n <= 17, error.errno)"
    assert python(sandbox, source, limits=replace(SHORT, file_bytes=1 << 20)).stdout == "True 28\n"


SCAN = r"""
import re
found = set()
for line in open("/proc/self/maps"):
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    if "rw" in line:
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(start)
            found.update(re.findall(rb"token-[0-9a-f]{32}", memory.read(end - start)))
print(len(found))
"""


def test_a_program_finds_nothing_of_the_programs_before_it(sandbox: Sandbox) -> None:
    token = f"token-{os.urandom(16).hex()}"
    first = f"import builtins, sys, os\nbuiltins.x = sys.x = os.x = {token!r}\nopen('/tmp/left', 'w').write('x')\n"
    first += "os.environ['X'] = '1'; sys.path.append('/tmp/x'); sys.modules['json'] = None\n"
    assert python(sandbox, first + SCAN, stdin=token).stdout == "1\n"  # the scan of its memory finds it
    second = (
        "import builtins, sys, os, json\nprint([hasattr(m, 'x') for m in (builtins, sys, os)], os.listdir('/tmp'))\n"
    )
    second += "print('X' in os.environ, '/tmp/x' in sys.path)\n"
    result = python(sandbox, second + SCAN)
    assert result.stdout == "[False, False, False] ['main.py']\nFalse False\n0\n", result.stderr


def test_concurrent_programs_have_a_worker_each_and_see_only_themselves(sandbox: Sandbox) -> None:
    source = "import os, time\ntime.sleep(0.2)\nprint(sorted(n for n in os.listdir('/proc') if n.isdigit()))"
    with Sandbox(isolation=sandbox.isolation, workers=3) as three:
        results: list[Result] = []
        started_at = time.monotonic()
        threads = [threading.Thread(target=lambda: results.append(python(three, source))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {result.stdout for result in results} == {"['1', '2']\n"}
        assert time.monotonic() - started_at < 3


def test_a_readable_folder_is_read_only(sandbox: Sandbox) -> None:
    folder = ROOT / "docs"
    assert not python(sandbox, f"open('{folder}/index.md')").ok
    with Sandbox(isolation=sandbox.isolation, workers=1, readable=[folder]) as reading:
        source = f"print(open('{folder}/index.md').readline().strip())\nopen('{folder}/b.txt', 'w')"
        result = python(reading, source)
    with (folder / "index.md").open() as file:
        assert result.stdout == file.readline()
    assert "Read-only file system" in result.stderr


def test_a_sandbox_whose_protection_fails_runs_nothing(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(local._INSIDE, tmp_path / "inside")
    with (tmp_path / "inside" / "kernel.py").open("a") as file:
        file.write("\ndef filter_system_calls():\n    raise OSError('this kernel has no filters')\n")
    monkeypatch.setattr(local, "_INSIDE", tmp_path / "inside")
    with pytest.raises(SandboxError, match="this kernel has no filters"):
        Sandbox(isolation=sandbox.isolation, workers=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Limits(wall_seconds=0), "limit wall_seconds: got 0, expected a positive number"),
        (lambda: Limits(processes=1.5), "limit processes: got 1.5, expected a positive integer"),  # type: ignore[arg-type]
        (lambda: Limits(cpu_seconds=float("nan")), "limit cpu_seconds: got nan"),
        (lambda: Sandbox(isolation="docker"), "isolation: got 'docker', expected one of bubblewrap, namespaces"),  # type: ignore[arg-type]
        (lambda: Sandbox(workers=0), "workers: got 0, expected at least 1"),
        (lambda: Sandbox(readable=["a"]), "readable: 'a' is no folder with an absolute path"),
        (lambda: Sandbox(readable=["/tmp"]), "readable: '/tmp' is in /tmp, which is empty in the sandbox; move it"),
    ],
)
def test_an_invalid_option_is_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        call()


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match=r"needs Linux on x86_64 or aarch64, this is Linux on riscv64; run programs"):
        Sandbox()


@pytest.mark.parametrize(
    ("argv", "files", "message"),
    [
        ([], {}, "argv: got .*, expected a non-empty list"),
        ("ls", {}, "argv: got 'ls', expected a non-empty list"),
        ([""], {}, "argv: the program has no name"),
        (["a", "\ud800"], {}, "argv: got .* expected a non-empty list of UTF-8 strings without NUL"),
        (["a"], {"\ud800": ""}, "files: got the name '.ud800', expected a relative path"),
        (["a"], {"": ""}, "files: got the name '', expected a relative path"),
        (["a"], {"a": "ü" * (33 << 20)}, "bytes, expected at most 67,108,864"),
        (["a"], {"../a": ""}, "files: got the name '../a', expected a relative path"),
        (["a"], {"/a": ""}, "files: got the name '/a', expected a relative path"),
        (["a"], {"a": 1}, "files: 'a' is a int, expected str or bytes"),
        (["a"], {"a": bytes(65 << 20)}, "bytes, expected at most 67,108,864"),
        (["a"], dict.fromkeys(map(str, range(5000)), ""), "files: got 5,000, expected at most 4,096"),
        (["cat"], {"a": "", "a/b": ""}, "a program could not start"),
    ],
)
def test_an_invalid_program_is_one_line(sandbox: Sandbox, argv: Any, files: Any, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        sandbox.run(argv, files)


def test_a_killed_worker_costs_one_program_and_is_replaced(sandbox: Sandbox) -> None:
    with Sandbox(isolation=sandbox.isolation, workers=1) as one:
        before = set(descendants(os.getpid()))
        thread = threading.Timer(0.2, lambda: [os.kill(pid, signal.SIGKILL) for pid in before])
        before = {pid for pid in before if _starts(pid, one)}
        thread.start()
        with pytest.raises(SandboxError, match=r"ended without a report|worker ended"):
            python(one, "import time; time.sleep(5)")
        assert python(one, "print(1)").stdout == "1\n"


def _starts(pid: int, sandbox: Sandbox) -> bool:
    """Whether `pid` is the launcher of the sandbox's only worker."""
    return pid == sandbox._idle[0]._process.pid


def test_a_closed_sandbox_has_no_processes_and_runs_nothing(any_sandbox: Sandbox) -> None:
    before = set(descendants(os.getpid()))
    with pytest.MonkeyPatch.context() as patch:
        if any_sandbox.isolation == "rlimits":
            use_readable_python(patch)
        sandbox = Sandbox(isolation=any_sandbox.isolation, workers=1)
    assert set(descendants(os.getpid())) > before
    sandbox.close()
    assert set(descendants(os.getpid())) == before
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        sandbox.run(["true"])


def test_nothing_remains_when_the_owner_is_killed(sandbox: Sandbox) -> None:
    source = "from archon.rl.sandbox import Sandbox\nimport os, threading\n"
    source += "from archon.rl.sandbox.inside.supervisor import descendants\n"
    source += f"s = Sandbox(isolation={sandbox.isolation!r}, workers=1)\n"
    source += "threading.Thread(target=s.run, args=[['sleep', '88']], daemon=True).start()\n"
    source += "import time\nwhile not any(b'88' in open(f'/proc/{p}/cmdline', 'rb').read().split(b'\\0') for p in\n"
    source += (
        "    descendants(os.getpid())): time.sleep(0.01)\nprint(*descendants(os.getpid()), flush=True)\ntime.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    process.kill()
    process.communicate()
    end = time.monotonic() + 5
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)
    assert len(pids) >= 5 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.usefixtures("rlimits")
def test_without_isolation_it_warns_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_readable_python(monkeypatch)
    monkeypatch.setattr(local, "_warned", False)
    real = local._Worker

    def refuse(isolation: Any, readable: Any) -> Any:
        if isolation != "rlimits":
            raise SandboxError(f"isolation {isolation} does not work here: refused by the test")
        return real(isolation, readable)

    monkeypatch.setattr(local, "_Worker", refuse)
    for _ in range(2):
        Sandbox(workers=1).close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("archon: warning: programs of the sandbox can read this machine's files")
    assert "isolation bubblewrap does not work here: refused by the test" in line


def test_importing_archon_imports_no_sandbox() -> None:
    source = "import sys, archon, archon.rl; print([n for n in sys.modules if 'sandbox' in n and 'template' not in n])"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True).stdout == "[]\n"
