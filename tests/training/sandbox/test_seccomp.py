"""The filter's verdicts, worked out by a BPF machine of the test's own, and the numbers against the system's headers."""

import platform
import re
import struct
from pathlib import Path

import pytest

from training.sandbox.seccomp import _ALLOWED, filter_program

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = "allow", "kill", 1, 38
SIGCHLD, THREAD, NEWUSER = 17, 0x003D0F00, 0x10000000


def verdict(program: bytes, arch: int, number: int, argument: int = 0) -> str | int:
    """What the kernel would do: linux/filter.h's loads, jumps and returns on struct seccomp_data."""
    data = struct.pack("<iIQ6Q", number, arch, 0, argument, *[0] * 5)
    steps = list(struct.iter_unpack("<HBBI", program))
    at = accumulator = 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(k, k & 0xFFFF)
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            at += yes if holds else no


@pytest.mark.parametrize(
    ("machine", "read", "clone", "others"),
    [
        (
            "x86_64",
            0,
            56,
            {"socket": 41, "fork": 57, "vfork": 58, "ptrace": 101, "mount": 165, "clone3": 435},
        ),
        ("aarch64", 63, 220, {"socket": 198, "ptrace": 117, "mount": 40, "unshare": 97, "clone3": 435}),
    ],
)
def test_what_is_allowed(machine: str, read: int, clone: int, others: dict[str, int]) -> None:
    strict, server = filter_program(machine=machine), filter_program(may_fork=True, machine=machine)
    arch = ARCH[machine]
    assert verdict(strict, arch, read) == ALLOW
    assert verdict(strict, arch, clone, THREAD) == ALLOW
    assert verdict(strict, arch, clone, SIGCHLD) == EPERM
    assert verdict(server, arch, clone, SIGCHLD) == ALLOW
    assert verdict(server, arch, clone, NEWUSER | SIGCHLD) == EPERM
    for number in others.values():
        assert verdict(strict, arch, number) == verdict(server, arch, number) == ENOSYS
    assert verdict(strict, arch, read | 0x40000000) == ENOSYS  # x32's numbers
    assert verdict(strict, 0x40000003, 11) == KILL  # 32-bit calls: another table


def test_another_machine_is_refused() -> None:
    with pytest.raises(KeyError):
        filter_program(machine="riscv64")


def test_the_numbers_are_the_systems() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if platform.machine() != "x86_64" or not header.is_file():
        pytest.skip(f"no header {header}")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    for entry in _ALLOWED.replace("\n", " ").split(","):
        name, number, _ = entry.split()
        assert numbers[name] == number
