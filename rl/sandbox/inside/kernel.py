"""Linux calls that Python 3.11 lacks: namespaces, mounts, capabilities and system-call filters."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    *(0x00020000, 0x02000000, 0x04000000, 0x08000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
_NEW_ANY = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x80  # 0x80: CLONE_NEWTIME
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    *(1, 2, 4, 8),
    *(32, 4096, 16384, 1 << 18),
)
_MNT_DETACH = 2
_PDEATHSIG, _SET_DUMPABLE, _CAPBSET_DROP, _SET_SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 24, 22, 36, 38
_CAPABILITIES = 41
_MAP_SHARED, _MAP_ANONYMOUS = 1, 0x20

# Numbers on x86-64 and ARM64; None: ARM64 has no such call.
_CALLS = {
    "pivot_root": (155, 41),
    "mount_setattr": (442, 442),
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mmap": (9, 222),
    "kcmp": (312, 272),
}
# Calls with power over the kernel, other processes or memory that no limit counts.
_REFUSED = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": _CALLS["pivot_root"],
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": _CALLS["mount_setattr"],
    "setns": (308, 268),
    "unshare": (272, 97),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": _CALLS["kcmp"],
    "pidfd_getfd": (438, 438),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
}
# Calls that change another process of the user, with the place of its id among their arguments.
_CHANGING = {
    "prlimit64": ((302, 261), 0),
    "sched_setparam": ((142, 118), 0),
    "sched_setscheduler": ((144, 119), 0),
    "sched_setaffinity": ((203, 122), 0),
    "sched_setattr": ((314, 274), 0),
    "setpriority": ((141, 140), 1),
    "ioprio_set": ((251, 30), 1),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of classic BPF

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _system_call(name: str, *arguments: object) -> int:
    number = _CALLS[name][_MACHINES[platform.machine()][0]]
    return _call("syscall", ctypes.c_long(number), *arguments)


def unshare(flags: int) -> None:
    """Move this process, or its next children for NEWPID, into new namespaces."""
    _call("unshare", flags)


def enter_namespace(descriptor: int, kind: int) -> None:
    """Enter the namespace of an open /proc/…/ns file."""
    _call("setns", descriptor, kind)


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """Attach a file system to the folder `target`."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    try:
        _call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3])
    except OSError as error:
        raise OSError(error.errno, f"cannot mount {target}: {os.strerror(error.errno or 0)}") from None


def make_read_only(target: str) -> None:
    """Make a mount and everything below it read-only, without set-user-id programs and devices."""
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    recursive = 0x8000
    _system_call("mount_setattr", -100, os.fsencode(target), recursive, attributes, ctypes.c_size_t(len(attributes)))


def unmount(target: str) -> None:
    """Detach a mount and everything below it."""
    _call("umount2", os.fsencode(target), _MNT_DETACH)


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root of the file system and move the old root to `old`."""
    _system_call("pivot_root", os.fsencode(new), os.fsencode(old))


def end_with_parent() -> None:
    """Let the kernel kill this process when the parent thread ends."""
    _call("prctl", _PDEATHSIG, 9)


def share_memory(one: int, other: int) -> bool:
    """Return whether two processes have one address space; False if the kernel does not tell."""
    vm = 1
    number = _CALLS["kcmp"][_MACHINES[platform.machine()][0]]
    result: int = _libc.syscall(ctypes.c_long(number), one, other, vm, ctypes.c_ulong(0), ctypes.c_ulong(0))
    return result == 0


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end."""
    _call("prctl", _SUBREAPER, 1)


def make_dumpable() -> None:
    """Let this process read and write its own files in /proc after a change of its user id."""
    _call("prctl", _SET_DUMPABLE, 1)


def drop_bounding_set() -> None:
    """Give up for ever the capabilities that a program with file capabilities would get."""
    for number in range(_CAPABILITIES):
        if _libc.prctl(_CAPBSET_DROP, number) < 0 and ctypes.get_errno() not in (_EPERM, 22):
            raise OSError(ctypes.get_errno(), "cannot drop the capabilities")


def drop_capabilities() -> None:
    """Give up all capabilities, and the rights that a set-user-id program would get, for ever."""
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
    _call("capset", header, bytes(24))
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_system_calls() -> None:
    """Refuse calls with power over the kernel and over others, and sockets other than Unix sockets, for ever."""
    column, machine = _MACHINES[platform.machine()]
    number_of = {name: numbers[column] for name, numbers in _CALLS.items()}
    refused = [number for numbers in _REFUSED.values() if (number := numbers[column]) is not None]
    refuse, unknown = _ERRNO | _EPERM, _ERRNO | _ENOSYS
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),  # the machine: 32-bit programs have other numbers
        (_JUMP_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
    ]
    if column == 0:
        code += [(_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, refuse)]  # the x32 numbers
    for number in refused:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    for name in ("clone3", "memfd_create", "memfd_secret"):  # C libraries fall back where there is no such call
        code += [(_JUMP_EQUAL, 0, 1, number_of[name]), (_RETURN, 0, 0, unknown)]
    for numbers, place in _CHANGING.values():  # a slow or broken supervisor, process 1, enforces no limit
        code += [(_JUMP_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, 16 + 8 * place)]
        code += [(_JUMP_EQUAL, 0, 1, 1), (_RETURN, 0, 0, refuse), (_RETURN, 0, 0, _ALLOW)]
    code += [
        (_JUMP_EQUAL, 0, 4, number_of["clone"]),
        *((_LOAD, 0, 0, 16), (_JUMP_SET, 0, 1, _NEW_ANY & ~0x80), (_RETURN, 0, 0, refuse), (_RETURN, 0, 0, _ALLOW)),
        # A shared mapping without a file keeps memory that is not mapped, so that no process has it.
        *((_JUMP_EQUAL, 0, 5, number_of["mmap"]), (_LOAD, 0, 0, 40)),  # 40: the flags
        *((_JUMP_SET, 0, 2, _MAP_ANONYMOUS), (_JUMP_SET, 0, 1, _MAP_SHARED)),
        *((_RETURN, 0, 0, refuse), (_RETURN, 0, 0, _ALLOW)),
        (_JUMP_EQUAL, 1, 0, number_of["socket"]),
        (_JUMP_EQUAL, 0, 3, number_of["socketpair"]),
        *((_LOAD, 0, 0, 16), (_JUMP_EQUAL, 1, 0, 1), (_RETURN, 0, 0, refuse)),  # 1: AF_UNIX
        (_RETURN, 0, 0, _ALLOW),
    ]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
    _call("prctl", _SET_SECCOMP, 2, program, 0, 0)
