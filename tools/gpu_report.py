"""Joins what `tools/gpu_check.sh` found into one JSON report, and says which goals are reached.

Goals, as shares of the copy bandwidth measured in the same run: decode attention of grouped queries over at least 32k
tokens 80 %, merge kernels over at least 32 MiB 70 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

ATTEND_GOAL, MERGE_GOAL = 0.8, 0.7
LONG = 32 << 10  # keys
LARGE = 32 << 20  # bytes; a kernel over fewer takes as long as its start


def read_tests(path: Path) -> dict[str, Any]:
    """Counts by outcome, and the names of what failed."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    if not path.is_file():
        return counts
    for case in xml.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            counts["failures"].append(f"{case.get('classname')}::{case.get('name')}")
    return counts


def read_kernels(path: Path) -> dict[str, Any] | None:
    """The benchmark's JSON, its last line; ``None`` where it did not come to it."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None


def goals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Best back end for every context, and the slowest merge kernel, against the copy."""
    best: dict[str, float] = {}
    merges = []
    for row in rows:
        words, ratio = row["name"].split(), row.get("ratio_to_copy")
        if ratio is None:
            continue
        if words[:1] == ["attend"] and words[2] == "gqa" and row["keys"] >= LONG:
            what = " ".join(words[2:])
            best[what] = max(best.get(what, 0.0), ratio)
        elif words[0] in ("merge", "share", "pack") and row["bytes"] >= LARGE:
            merges.append(ratio)
    attend, merge = min(best.values(), default=None), min(merges, default=None)
    return {
        "attention": {
            "goal": ATTEND_GOAL,
            "least_of_best": attend,
            "reached": attend is not None and attend >= ATTEND_GOAL,
        },
        "merge": {"goal": MERGE_GOAL, "least": merge, "reached": merge is not None and merge >= MERGE_GOAL},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with env.json, tests.xml and kernels.txt")
    parser.add_argument("report", type=Path)
    parser.add_argument("--tests-status", type=int, required=True, help="exit code of the tests")
    parser.add_argument("--kernels-status", type=int, required=True, help="exit code of the benchmark")
    args = parser.parse_args()
    kernels = read_kernels(args.folder / "kernels.txt")
    report = {
        "environment": json.loads((args.folder / "env.json").read_text()),
        "tests": {"exit_code": args.tests_status, **read_tests(args.folder / "tests.xml")},
        "kernels": kernels,
        "goals": goals(kernels["rows"] if kernels else []),
    }
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    for name, goal in report["goals"].items():
        print(f"{name}: {goal}")
    print(f"report: {args.report}")
    return 0 if args.tests_status == 0 and args.kernels_status == 0 and kernels else 1


if __name__ == "__main__":
    sys.exit(main())
