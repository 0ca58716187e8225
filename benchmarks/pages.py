"""What measurements share: where and when they were made, and the part of a document between a measurement's markers."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from training.storage import write_text

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> str:
    """Processor, cores and memory in words."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {cpu}, {memory:.0f} GiB of memory"


def today() -> str:
    """The date of a measurement."""
    return datetime.date.today().isoformat()


def put(page: Path, name: str, text: str) -> None:
    """Make `text` what stands between the page's markers `name: begin` and `name: end`."""
    before, _, after = _parts(page, name)
    write_text(page, f"{before}\n{text.strip()}\n{after}")


def shown(page: Path, name: str) -> str:
    """What stands between the page's markers."""
    return _parts(page, name)[1].strip()


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    inner, after = rest.split(end)
    return before + begin, inner, end + after
