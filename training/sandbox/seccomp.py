"""The system calls that a sandboxed program may make, as a seccomp filter (classic BPF).

Everything not listed fails with ENOSYS, so that the C library falls back where it can: no sockets beyond a
pair within the process, no new processes, namespaces, mounts, tracing, keys, shared memory, io_uring or BPF.
`clone` is allowed for threads only. `execve` must stay, for the filter is in force before Python starts; a
program that calls it replaces itself and keeps the filter, its limits and its namespaces.
"""

from __future__ import annotations

import platform
import struct

_ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
    pwritev 296 70, open 2 -, openat 257 56, close 3 57, close_range 436 436, fstat 5 80, stat 4 -, lstat
    6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, lseek 8 62, mmap 9 222, munmap
    11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, rt_sigaction 13 134,
    rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
    rt_sigsuspend 130 133, sigaltstack 131 132, ioctl 16 29, access 21 -, faccessat 269 48, faccessat2 439
    439, pipe 22 -, pipe2 293 59, select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create 213
    -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19,
    sched_yield 24 124, sched_getaffinity 204 123, nanosleep 35 101, clock_nanosleep 230 115,
    clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -, getitimer 36 102,
    setitimer 38 103, alarm 37 -, pause 34 -, times 100 153, getpid 39 172, gettid 186 178, getppid 110
    173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getpgrp 111
    -, getpgid 121 155, getsid 124 156, getresuid 118 148, getresgid 120 150, setuid 105 146, setgid 106
    144, setgroups 116 159, getrandom 318 278, getcwd 79 17, chdir 80 49, fchdir 81 50, getdents64 217 61,
    readlink 89 -, readlinkat 267 78, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat
    258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36, link 86 -, linkat
    265 37, chmod 90 -, fchmod 91 52, fchmodat 268 53, truncate 76 45, ftruncate 77 46, utimensat 280 88,
    umask 95 166, dup 32 23, dup2 33 -, dup3 292 24, fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75
    83, fadvise64 221 223, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, kill 62 129, tkill
    200 130, tgkill 234 131, futex 202 98, set_robust_list 273 99, set_tid_address 218 96, arch_prctl 158
    -, rseq 334 293, membarrier 324 283, prlimit64 302 261, getrlimit 97 163, setrlimit 160 164, getrusage
    98 165, sysinfo 99 179, uname 63 160, restart_syscall 219 128, execve 59 221, socketpair 53 199,
    sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockopt 55 209,
    getsockname 51 204
"""
"""Name, number on x86_64, number on aarch64."""

_ARCHITECTURES = {"x86_64": (1, 0xC000003E, 56), "aarch64": (2, 0xC00000B7, 220)}
"""Machine: column of the table, AUDIT_ARCH value, number of `clone`."""

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020080
"""All flags that make a namespace."""


def filter_program(may_fork: bool = False, machine: str | None = None) -> bytes:
    """The filter for `machine` (default: this one) as an array of struct sock_filter, for `bwrap --seccomp`.

    `may_fork` allows processes too, for the server that runs tests. Raises KeyError for another architecture.
    """
    column, architecture, clone = _ARCHITECTURES[machine or platform.machine()]
    numbers = [
        int(entry.split()[column])
        for entry in _ALLOWED.replace("\n", " ").split(",")
        if entry.split()[column] != "-"
    ]
    flags = [_step(_LOAD, _FIRST_ARGUMENT)]
    if may_fork:
        flags += [_step(_JUMP_ANY_BIT, _CLONE_NEW, 0, 1), _step(_RETURN, _REFUSE | _EPERM)]
    else:
        flags += [_step(_JUMP_ANY_BIT, _CLONE_THREAD, 1, 0), _step(_RETURN, _REFUSE | _EPERM)]
    flags.append(_step(_RETURN, _ALLOW))
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_AT_LEAST, _X32, 0, 1),
        _step(_RETURN, _REFUSE | _ENOSYS),
        _step(_JUMP_EQUAL, clone, 0, len(flags)),
        *flags,
    ]
    for number in numbers:
        program += [_step(_JUMP_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    program.append(_step(_RETURN, _REFUSE | _ENOSYS))
    return b"".join(program)


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)
