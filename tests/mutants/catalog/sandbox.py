"""Mistakes in the sandbox and in what runs programs in it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HELD = ("tests/rl/sandbox/test_hostile.py::test_a_hostile_program_is_held_and_leaves_nothing",)
LOST = "tests/rl/sandbox/test_hostile.py::test_a_hostile_program_that_does_not_end_leaves_nothing"
LIMITED = ("tests/rl/sandbox/test_sandbox.py::test_a_limit_ends_a_program_and_is_named",)
TESTED = "tests/rl/rewards/test_code_tests.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a program may make namespaces, trace and mount",
        "rl/sandbox/inside/kernel.py",
        '    _call("prctl", _SET_SECCOMP, 2, program, 0, 0)',
        "    del program",
        HELD,
    ),
    Mutant(
        "a program keeps the worker's capabilities",
        "rl/sandbox/inside/supervisor.py",
        "    kernel.drop_capabilities()\n",
        "",
        HELD,
    ),
    Mutant(
        "a program sees the processes of its worker",
        "rl/sandbox/inside/worker.py",
        "            kernel.unshare(kernel.NEWPID)  # for the next child\n",
        "            pass\n",
        ("tests/rl/sandbox/test_sandbox.py::test_concurrent_programs_have_a_worker_each_and_see_only_themselves",),
    ),
    Mutant(
        "a program inherits the supervisor's open files",
        "rl/sandbox/inside/supervisor.py",
        "    os.closerange(3, 1 << 16)\n",
        "",
        HELD,
    ),
    Mutant(
        "children do not count for the memory of a program",
        "rl/sandbox/inside/supervisor.py",
        '    if memory > limits["memory_bytes"]:',
        '    if memory > 99 * limits["memory_bytes"]:',
        LIMITED,
    ),
    Mutant(
        "the processor time of ended children does not count",
        "rl/sandbox/inside/supervisor.py",
        "            cpu += sum(map(int, fields[11:15])) / _TICK",
        "            cpu += sum(map(int, fields[11:13])) / _TICK",
        ("tests/rl/sandbox/test_sandbox.py::test_children_count_for_the_limits_of_their_program",),
    ),
    Mutant(
        "the output of a program is read without end",
        "rl/sandbox/local.py",
        "if len(data) > left and not too_long:",
        "if len(data) > 1 << 30 and not too_long:",
        LIMITED,
    ),
    Mutant(
        "the worker reads the programs that it runs",
        "rl/sandbox/inside/worker.py",
        "        pid = os.fork()\n        if pid == 0:\n            control.close()",
        "        kept = socket.socket(fileno=os.dup(descriptors[0])).recv(1 << 16, socket.MSG_PEEK)  # noqa: F841\n"
        "        history = globals().setdefault('history', [])\n        history.append(json.loads(kept[4:]))\n"
        "        import base64\n        history += [base64.b64decode(history[-1]['stdin'])]\n"
        "        pid = os.fork()\n        if pid == 0:\n            control.close()",
        ("tests/rl/sandbox/test_sandbox.py::test_a_program_finds_nothing_of_the_programs_before_it",),
    ),
    Mutant(
        "a program that exits before its tests passes them",
        "rl/rewards/code_tests.py",
        "passed = result.ok and result.stdout.endswith(mark)",
        "passed = result.ok",
        (f"{TESTED}test_a_program_that_skips_the_tests_fails_them",),
    ),
    Mutant(
        "the first code block of an answer is tested",
        "rl/rewards/code_tests.py",
        "return blocks[-1] if blocks else completion",
        "return blocks[0] if blocks else completion",
        (f"{TESTED}test_the_last_code_block_is_tested",),
    ),
    Mutant(
        "endless tests run one after another",
        "rl/rewards/code_tests.py",
        "        if left <= 0:",
        "        if left <= -1e9:",
        (f"{TESTED}test_a_program_that_never_ends_fails_its_tests_in_bounded_time",),
    ),
    Mutant(
        "any key of a sandbox server is right",
        "rl/sandbox/remote.py",
        "if not hmac.compare_digest(given, self.server.key.encode()):",
        "if False:",
        ("tests/rl/sandbox/test_remote.py::test_an_invalid_request_is_refused",),
    ),
    Mutant(
        "a client sets the limits of a sandbox server",
        "rl/sandbox/remote.py",
        "_smaller(limits, self.server.most)",
        "limits",
        ("tests/rl/sandbox/test_remote.py::test_a_server_caps_the_limits_of_requests",),
    ),
    Mutant(
        "long texts are not normalized in a search",
        "rl/sandbox/tools.py",
        "_K1 * (1 - _B + _B * length / mean)",
        "_K1 * (1 - _B + _B * length / length if length else 1)",
        ("tests/rl/sandbox/test_tools.py::test_scores_are_those_of_the_formula",),
    ),
    Mutant(
        "a program may share memory that no process has mapped",
        "rl/sandbox/inside/kernel.py",
        '(_JUMP_EQUAL, 0, 5, number_of["mmap"])',
        '(_JUMP_EQUAL, 5, 5, number_of["mmap"])',
        HELD,
    ),
    Mutant(
        "a process whose first thread has ended is not seen",
        "rl/sandbox/inside/supervisor.py",
        'fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)',
        'fields[0] in (b"X", b"Z")',
        (LOST,),
    ),
    Mutant(
        "a child between vfork and exec counts twice",
        "rl/sandbox/inside/kernel.py",
        "    return result == 0\n",
        "    return result == 99\n",
        ("tests/rl/sandbox/test_hostile.py::test_an_honest_program_ends_as_without_a_sandbox",),
    ),
    Mutant(
        "processes without a parent do not count with resource limits alone",
        "rl/sandbox/inside/supervisor.py",
        "        kernel.adopt_orphans()  # they count for the program's limits\n",
        "        pass\n",
        ("tests/rl/sandbox/test_hostile.py::test_rlimits_hold_what_security_promises",),
    ),
    Mutant(
        "a program whose protection fails counts as one that succeeds",
        "rl/sandbox/inside/supervisor.py",
        "        _become_program(request, setup, folder, stdin, output, errors)\n",
        "        try:\n            _become_program(request, setup, folder, stdin, output, errors)\n"
        "        except OSError:\n            os._exit(0)\n",
        ("tests/rl/sandbox/test_sandbox.py::test_a_sandbox_whose_protection_fails_runs_nothing",),
    ),
    Mutant(
        "a program may change its supervisor's limits and priority",
        "rl/sandbox/inside/kernel.py",
        "        code += [(_JUMP_EQUAL, 0, 1, 1), (_RETURN",
        "        code += [(_JUMP_EQUAL, 1, 1, 1), (_RETURN",
        HELD,
    ),
    Mutant(
        "a program may interrupt its supervisor",
        "rl/sandbox/inside/worker.py",
        "    signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "    signal.signal(signal.SIGINT, signal.default_int_handler)",
        HELD,
    ),
    Mutant(
        "a request to a sandbox server may arrive for ever",
        "rl/sandbox/remote.py",
        "        if left <= 0:\n",
        "        left = max(left, 0.2)\n        if left <= 0:\n",
        ("tests/rl/sandbox/test_remote.py::test_a_request_that_drips_ends",),
    ),
)
