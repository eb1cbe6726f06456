"""Benchmarks. Each prints a table; the last line of stdout is the same as JSON.

    python tools/bench.py decode --quick

No benchmark asserts a duration: they measure, side by side in one run, and leave the judgement to the reader.
"""

from __future__ import annotations

import argparse

import bench_convert
import bench_decode
import bench_driver
import bench_kernels
import bench_mla
import bench_plan
import bench_prefill
import bench_serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    bench_convert.add_command(commands)
    bench_decode.add_command(commands)
    bench_driver.add_command(commands)
    bench_kernels.add_command(commands)
    bench_mla.add_command(commands)
    bench_plan.add_command(commands)
    bench_prefill.add_command(commands)
    bench_serve.add_command(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":  # the processes that a benchmark starts import this file again
    main()
