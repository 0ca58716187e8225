"""How many programs a second the code reward grades here: `python -m benchmarks.code [--programs N] [--workers N]`."""

from __future__ import annotations

import argparse
import json
import os
import time

from training.config import CodeRewardConfig
from training.sandbox.grader import Grader

ASSERTIONS = json.dumps(
    ["assert sum_to(0) == 0", "assert sum_to(4) == 10", "assert sum_to(100) == 5050", "assert sum_to(2) == 3"]
)
CASES = json.dumps({"cases": [{"stdin": "100\n", "stdout": "5050\n"}]})
FUNCTION = "def sum_to(n):\n    total = 0\n    for i in range(n + 1):\n        total += i\n    return total\n"
PROGRAMS = {
    "assertions": (FUNCTION, ASSERTIONS),
    "assertions, with typing": (f"from typing import List\n{FUNCTION}", ASSERTIONS),
    "a case of input and output": (f"{FUNCTION}print(sum_to(int(input())))", CASES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200, help="programs of each kind")
    parser.add_argument("--workers", type=int, default=0, help="as rewards.code.workers")
    options = parser.parse_args()
    grader = Grader(CodeRewardConfig(workers=options.workers))
    load = os.getloadavg()[0]
    print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} before the start")
    for name, pair in PROGRAMS.items():
        grader.grade_all([pair] * 8)
        began = time.perf_counter()
        verdicts = grader.grade_all([pair] * options.programs)
        seconds = time.perf_counter() - began
        right = sum(verdict.score == 1.0 for verdict in verdicts)
        print(f"{name}: {len(verdicts) / seconds:.1f} programs a second ({right} of {len(verdicts)} right)")
    grader.close()


if __name__ == "__main__":
    main()
