"""Honest and hostile programs for the sandbox.

A hostile program prints `ESCAPED …` if its attack succeeds. `ends` names the ends that are right for a program: exit
codes or limits; none: any end. `{token}`, `{secret}`, `{port}` and `{socket}` in a program are replaced: a mark for
leftovers, a file of the host, and listening sockets of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from archon.rl.sandbox.programs import Limits, Result

MIB = 1 << 20
TIGHT = Limits(
    wall_seconds=1.0, cpu_seconds=1.0, memory_bytes=128 * MIB, processes=24, output_bytes=1 << 16, file_bytes=8 * MIB
)
ENDLESS = replace(TIGHT, wall_seconds=0.4, cpu_seconds=0.4)
SECRET = "the-secret-of-the-host"


@dataclass(frozen=True)
class Program:
    """A program, and how it may end."""

    source: str
    ends: tuple[int | str, ...] = ()
    output: str | None = None
    language: str = "python"
    stdin: str = ""
    limits: Limits = TIGHT

    def fault(self, result: Result) -> str | None:
        """Return what is wrong with a result, else None."""
        if "ESCAPED" in result.stdout + result.stderr or SECRET in result.stdout + result.stderr:
            return f"escaped: {(result.stdout + result.stderr)[:300]}"
        end = result.exit_code if result.limit is None else result.limit
        if self.ends and end not in self.ends:
            return f"ended with {end!r}, expected {self.ends}: {result.stderr[-300:]}"
        if self.output is not None and result.stdout != self.output:
            return f"printed {result.stdout[:200]!r}, expected {self.output!r}: {result.stderr[-300:]}"
        return None


def _attempts(*expressions: str, setup: str = "") -> str:
    """Return a program that evaluates each expression and reports one that succeeds with a true value."""
    lines = ["import ctypes, os, signal, socket", "libc = ctypes.CDLL(None)", setup]
    for expression in expressions:
        lines += ["try:", f"    found = {expression}", "    if found: print('ESCAPED', found)"]
        lines += ["except (OSError, ValueError, PermissionError): pass"]
    return "\n".join([*lines, "print('held')"])


def _hides_memory(opened: str, flags: int, file: str) -> str:
    """Return a program that fills shared mappings of `file` and unmaps all but one page of each."""
    return (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "libc.madvise.argtypes = libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t\n"
        f"{opened}\nsize = 10 << 20\nfor _ in range(40):\n"
        f"    start = libc.mmap(None, size, 3, {flags}, {file}, 0)\n    if start == 2**64 - 1: os._exit(0)\n"
        "    ctypes.memset(start, 1, size)\n    libc.madvise(start, size, 4)\n"
        "    libc.munmap(start + 4096, size - 4096)\nprint('ESCAPED')"
    )


# A process whose first thread has ended, and whose second thread works on.
_HEADLESS = (
    "import ctypes, os, threading, time\ndef headless(work):\n    if os.fork() == 0:\n"
    "        threading.Thread(target=work, daemon=True).start()\n        ctypes.CDLL(None).syscall({exit}, 0)\n"
).replace("{exit}", "60 if os.uname().machine == 'x86_64' else 93")
_ALLOCATE = "    time.sleep(0.1); a = bytearray(b'x') * (40 << 20); time.sleep(9)\n"

HONEST = {
    "print": Program("print(1)", (0,), "1\n"),
    "sum": Program("print(sum(map(int, input().split())))", (0,), "6\n", stdin="1 2 3\n"),
    "sort": Program("print(sorted({3, 1, 2}))", (0,), "[1, 2, 3]\n"),
    "exit_code": Program("import sys; sys.exit(3)", (3,), ""),
    "assertion": Program("assert 1 + 1 == 3", (1,), ""),
    "unicode": Program("print('日本 ½')", (0,), "日本 ½\n"),
    "files": Program("open('a.txt', 'w').write('x'); print(open('a.txt').read())", (0,), "x\n"),
    "threads": Program(
        "import threading\nfound = []\nts = [threading.Thread(target=found.append, args=[n]) for n in range(4)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]; print(sorted(found))",
        (0,),
        "[0, 1, 2, 3]\n",
    ),
    "subprocess": Program("import subprocess; subprocess.run(['echo', 'hi'])", (0,), "hi\n"),
    "shell": Program("echo a b | wc -w", (0,), "2\n", "bash"),
    "new_interpreter": Program("python3 -c 'print(2)'", (0,), "2\n", "bash", limits=replace(TIGHT, wall_seconds=10)),
    "programs_of_a_large_program": Program(
        "import subprocess\na = bytearray(b'x') * (90 << 20)\nfor _ in range(99): subprocess.run('true')", (0,), ""
    ),
    "killed_by_itself": Program("import os; os.kill(os.getpid(), 9)", (-9,), ""),
}

FAST_HOSTILE = {
    "host_file": Program(
        _attempts(
            *(f"open({path!r} + '{{secret}}').read()" for path in ("", "/proc/1/root", "/old", "/../..", "/tmp"))
        ),
        (0,),
    ),
    "system_secrets": Program(
        _attempts("open('/etc/shadow').read()", "os.listdir('/home')", "os.listdir('/sys')"), (0,)
    ),
    "symlinks_out": Program(
        _attempts(
            "os.symlink('{secret}', 'a') or open('a').read()",
            "os.symlink('/', 'b') or open('b/{secret}').read()",
            "os.symlink('/usr', 'c') or open('c/{token}', 'w')",
            "os.link('{secret}', 'd') or 1",
        ),
        (0,),
    ),
    "environment": Program(
        _attempts(
            "[name for name in os.environ if 'ARCHON' in name or 'SECRET' in name]",
            f"b'{SECRET}' in open('/proc/self/environ', 'rb').read()",
            "open('/proc/1/environ', 'rb').read()",
        ),
        (0,),
    ),
    "network": Program(
        _attempts(
            "socket.create_connection(('127.0.0.1', {port}), 0.2)",
            "socket.create_connection(('1.1.1.1', 53), 0.2)",
            "socket.getaddrinfo('example.com', 80)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socket(socket.AF_UNIX).connect('{socket}') or 1",
            "socket.socket(socket.AF_UNIX).connect(chr(0) + '{token}') or 1",
        ),
        (0,),
    ),
    "writes_outside": Program(
        _attempts(
            *(
                f"open('{path}/{{token}}', 'w')"
                for path in (
                    "",
                    "/usr",
                    "/bin",
                    "/lib",
                    "/etc",
                    "/var/tmp",
                    "/run",
                    "/run/archon",
                    "/dev",
                    "/root",
                    "/proc",
                )
            ),
            "open('/run/archon/inside/worker.py', 'a')",
            "os.unlink('/run/archon/bin/python') or 1",
            "os.chmod('/usr/bin', 0o777) or 1",
        ),
        (0,),
    ),
    "files_left": Program(
        "import os\nfor n in range(200): open(f'/tmp/{token}-{n}', 'w').write('x' * 100)\n"
        "open('/dev/shm/{token}-s', 'w').write('x'); os.mkdir('/tmp/{token}'); os.chmod('/tmp/{token}', 0)\n"
        "print('held')",
        (0,),
    ),
    "odd_files": Program(
        "import os\nfor n in range(200): os.mkdir('{token}'); os.chdir('{token}')\n"
        "os.mkfifo('a'); open('b\\n\\udcff', 'w'); print('held')",
        (0,),
    ),
    "children_left": Program(
        "import os\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            os.execvp('sleep', ['sleep', '987', '{token}'][:2])\n        os._exit(0)\nprint('held')",
        (0,),
    ),
    "deaf_children_left": Program(
        "import os, signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(987)\n"
        "print('held')",
        (0,),
    ),
    "kills": Program(
        _attempts(
            *("os.kill(1, 9)", "os.kill(os.getppid(), 9)", "os.kill(1, signal.SIGSTOP)", "os.kill(1, signal.SIGTERM)"),
            *("os.killpg(1, 9)", "os.setpriority(os.PRIO_PROCESS, 0, -5) or 1"),
        ),
        (0,),
    ),
    "changes_its_supervisor": Program(
        _attempts(
            *("resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1))", "resource.prlimit(1, resource.RLIMIT_AS, (1, 1))"),
            *("os.sched_setaffinity(1, [0]) or 1", "os.setpriority(os.PRIO_PROCESS, 1, 19) or 1"),
            "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)) or 1",
            *("os.kill(1, signal.SIGINT)", "__import__('time').sleep(0.1)"),
            setup="import resource",
        ),
        (0,),
        "held\n",
    ),
    "interrupts_itself": Program("import os, signal; os.kill(os.getpid(), signal.SIGINT)", (1, -2)),
    "kills_everything": Program("import os\nos.kill(-1, 9)", (0, 1, -9)),
    "ptrace": Program(
        _attempts(
            *("libc.ptrace(16, 1, 0, 0) == 0", "libc.ptrace(16, os.getppid(), 0, 0) == 0"),
            *("open('/proc/1/mem', 'rb')", "os.readlink('/proc/1/fd/0')", "os.readlink('/proc/1/exe')"),
            "os.readlink('/proc/1/root')",
        ),
        (0,),
    ),
    "open_files": Program(
        "import os\nfor n in range(3, 999):\n    try: os.write(n, b'{{}}'); print('ESCAPED', n)\n"
        "    except OSError: pass\nprint('held')",
        (0,),
    ),
    "closed_files": Program("import os\nos.closerange(0, 999)", (0, 1, 120)),
    "namespaces": Program(
        _attempts(
            *("libc.unshare(0x10000000) == 0", "libc.unshare(0x20000) == 0", "libc.chroot(b'/') == 0"),
            *("libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0", "libc.umount2(b'/proc', 2) == 0"),
            *("libc.mount(b'', b'/', 0, 32, 0) == 0", "libc.setns(0, 0) == 0", "libc.sethostname(b'a', 1) == 0"),
        ),
        (0,),
    ),
    "rights": Program(
        _attempts(
            *("os.setuid(0) or 1", "os.setgroups([0]) or 1", "libc.prctl(24, 0) == 0"),
            *("__import__('resource').setrlimit(6, (9999, 9999)) or 1", "os.mknod('m', 0o60600, 0xfe00) or 1"),
            *("libc.capset(b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24) == 0", "os.chown('.', 0, 0) or 1"),
        ),
        (0,),
    ),
    "kernel_objects": Program(
        _attempts(
            *("libc.shmget(0, 1 << 20, 0o1600) >= 0", "libc.msgget(0, 0o1600) >= 0", "libc.semget(0, 1, 0o1600) >= 0"),
            *("os.memfd_create('a') > 0", "libc.syscall(250, 0, -4, 1) > 0", "libc.syscall(321, 0, 0, 0) >= 0"),
            *("libc.syscall(425, 8, bytes(120)) >= 0", "libc.syscall(298, bytes(120), 0, -1, -1, 0) >= 0"),
        ),
        (0,),
    ),
    "proc": Program(
        _attempts(
            *(
                "open('/proc/sys/kernel/core_pattern', 'w')",
                "open('/proc/sysrq-trigger', 'w')",
                "open('/proc/kcore', 'rb')",
            ),
            *(
                "open('/proc/self/oom_score_adj', 'w').write('-999') and 0",
                "open('/proc/sys/user/max_user_namespaces', 'w')",
            ),
            *(
                "open('/proc/self/uid_map', 'w').write('0 0 1') and 0",
                "[p for p in os.listdir('/proc') if p.isdigit() and int(p) > 99]",
            ),
        ),
        (0,),
    ),
    "huge_file": Program(
        _attempts("open('a', 'wb').write(bytes(9 << 20)) and 1", "os.truncate('b', 1 << 40)", setup="open('b', 'w')"),
        (0, "file_bytes"),
    ),
    "full_disk": Program(
        "import os\ntry:\n    for n in range(64): open(f'f{n}', 'wb').write(bytes(1 << 20))\n    print('ESCAPED')\n"
        "except OSError: print('held')",
        (0, "file_bytes"),
    ),
    "memory": Program("a = []\nwhile True: a.append(bytearray(1 << 22))", (1, "memory_bytes")),
    "endless_output": Program("while True: print('x' * 999)", ("output_bytes",)),
    "endless_errors_of_a_child": Program("yes >&2 & sleep 1", ("output_bytes",), language="bash"),
    "hidden_shared_memory": Program(_hides_memory("", 0x21, "-1"), (0,)),
    "hidden_zeros": Program(_hides_memory("zero = os.open('/dev/zero', os.O_RDWR)", 1, "zero"), (0,)),
    "damaged_output": Program("import os; os.write(1, bytes(range(256)))", (0,)),
    "deep_recursion": Program("import sys; sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nf(0)"),
    "segmentation_fault": Program("import ctypes; ctypes.string_at(0)", (-11,)),
    "poisoned_interpreter": Program(
        "import builtins, sys, json, os\nbuiltins.open = builtins.print = builtins.exec = None\n"
        "sys.modules.clear()\njson.loads = json.dumps = None\nos._exit = None",
        (0, 1),
    ),
}

SLOW_HOSTILE = {
    "fork_bomb": Program(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        ("cpu_seconds", "wall_seconds", "processes"),
        limits=ENDLESS,
    ),
    "shell_fork_bomb": Program(":(){ :|:& };: ; sleep 0.3; :", language="bash", limits=ENDLESS),
    "thread_bomb": Program(
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=[99]).start()\n"
        "    except RuntimeError: pass",
        ("cpu_seconds", "wall_seconds", "processes"),
        limits=ENDLESS,
    ),
    "memory_of_children": Program(
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        a = bytearray(os.urandom(1 << 20)) * 40\n"
        "        time.sleep(9)\ntime.sleep(9)",
        ("memory_bytes",),
    ),
    "memory_of_orphans": Program(
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        if os.fork(): os._exit(0)\n"
        "        time.sleep(0.1); a = bytearray(b'x') * (40 << 20); time.sleep(9)\n    os.wait()\ntime.sleep(9)",
        ("memory_bytes",),
    ),
    "memory_behind_an_ended_thread": Program(
        f"{_HEADLESS}def work():\n{_ALLOCATE}for _ in range(8): headless(work)\ntime.sleep(9)", ("memory_bytes",)
    ),
    "process_behind_an_ended_thread_left": Program(
        f"{_HEADLESS}headless(lambda: time.sleep(987))\ntime.sleep(0.2); print('held')", (0,), "held\n"
    ),
    "shared_memory": Program(
        "import mmap\na = mmap.mmap(-1, 1 << 30)\nfor n in range(0, 1 << 30, 4096): a[n] = 1\nprint('ESCAPED')",
        ("memory_bytes", 1),
    ),
    "endless_loop": Program("while True: pass", ("cpu_seconds", "wall_seconds"), limits=ENDLESS),
    "sleep": Program("import time; time.sleep(99)", ("wall_seconds",), limits=ENDLESS),
    "deaf_sleep": Program(
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(9)",
        ("wall_seconds",),
        limits=ENDLESS,
    ),
    "stopped": Program("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ("wall_seconds",), limits=ENDLESS),
    "waits_for_input": Program("import os\nr, w = os.pipe()\nos.read(r, 1)", ("wall_seconds",), limits=ENDLESS),
}

HOSTILE = FAST_HOSTILE | SLOW_HOSTILE
PROGRAMS = HONEST | HOSTILE


def command_of(program: Program, values: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and files of a program."""
    source = program.source
    for name, value in values.items():
        source = source.replace("{" + name + "}", value)
    name = "main.py" if program.language == "python" else "main.sh"
    return [program.language, name], {name: source}
