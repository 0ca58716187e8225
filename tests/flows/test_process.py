"""Commands end whole: on time-out, on an exception, when their caller is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows import process
from tests.project import REPOSITORY, wait_for

STUBBORN_FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("pids", "w").write(f"{os.getpid()} {stray.pid}")
print("ready", flush=True)
time.sleep(600)
"""


def pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(pid) for pid in file.read_text().split()] if file.is_file() else []


def gone(folder: Path) -> bool:
    return bool(pids(folder)) and not any(psutil.pid_exists(pid) for pid in pids(folder))


def test_lines_arrive_and_the_exit_code_comes_back(tmp_path: Path) -> None:
    lines: list[str] = []
    code = process.run(
        [sys.executable, "-c", "import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)"],
        tmp_path,
        os.environ,
        lines.append,
    )
    assert (code, lines) == (7, ["one", "two"])


def test_a_command_that_dies_by_a_signal_gives_128_plus_its_number(tmp_path: Path) -> None:
    code = process.run(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path, os.environ, print
    )
    assert code == 128 + signal.SIGKILL


def test_time_out_ends_the_whole_family(tmp_path: Path) -> None:
    with pytest.raises(process.TimedOut, match="still running after 3 s"):
        process.run(
            [sys.executable, "-c", STUBBORN_FAMILY], tmp_path, os.environ, print, timeout=3, grace=0.5
        )
    assert gone(tmp_path)


def test_time_out_holds_while_lines_keep_coming(tmp_path: Path) -> None:
    chatter = "while True: print('x' * 100)"
    with pytest.raises(process.TimedOut):
        process.run(
            [sys.executable, "-c", chatter], tmp_path, os.environ, lambda line: None, timeout=1, grace=0.5
        )


def test_an_exception_in_the_caller_ends_the_family(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.run([sys.executable, "-c", STUBBORN_FAMILY], tmp_path, os.environ, interrupt, grace=0.5)
    assert gone(tmp_path)


def test_what_a_finished_command_left_running_is_ended(tmp_path: Path) -> None:
    leaves = "import subprocess, sys; child = subprocess.Popen(['sleep', '600'], start_new_session=True); open('pids', 'w').write(str(child.pid))"
    assert process.run([sys.executable, "-c", leaves], tmp_path, os.environ, print, grace=5) == 0
    assert gone(tmp_path)


def test_sigterm_comes_once_and_there_is_time_to_clean_up(tmp_path: Path) -> None:
    tidy = """
import signal, sys, time
count = 0
def told(*_):
    global count
    count += 1
    time.sleep(1)
    open("told", "w").write(str(count))
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
print("ready", flush=True)
time.sleep(600)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {tidy!r}])"

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.run([sys.executable, "-c", parent], tmp_path, os.environ, stop, grace=20)
    assert (tmp_path / "told").read_text() == "1"


def test_a_caller_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    caller = f"""
import os, sys
from pathlib import Path
from flows import process
process.run([sys.executable, "-c", {STUBBORN_FAMILY!r}], Path({str(tmp_path)!r}), os.environ, print, grace=0.5)
"""
    running = subprocess.Popen([sys.executable, "-c", caller], cwd=REPOSITORY)
    wait_for(lambda: len(pids(tmp_path)) == 2, "the command's start")
    running.kill()
    running.wait()
    wait_for(lambda: gone(tmp_path), "the end of the command's processes")
