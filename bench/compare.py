#!/usr/bin/env python3
"""Runs our collectives and our peers' side by side and prints the ratios, in Markdown.

    bench/compare.py [--build build/release] [--ranks 2] [--rounds 3] [--tcp]

Each program runs several times in turn, and each figure is the median of its rounds: the machine's
mood then weighs on all of them alike.
"""
import argparse
import collections
import json
import os
import shutil
import statistics
import subprocess
import sys


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        sys.exit(f"failed with {done.returncode}: {' '.join(command)}")
    for line in done.stdout.splitlines():
        line = line[line.find("{"):] if "{" in line else ""
        if line.startswith('{"who"'):
            yield json.loads(line)


def size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tcp", action="store_true", help="TCP on loopback instead of shared memory")
    options = parser.parse_args()
    bench = os.path.join(options.build, "bench")
    launch = [os.path.join(options.build, "cli", "lockstep"), "run", "--nproc-per-node",
              str(options.ranks)]
    ours = os.path.join(bench, "collectives_lockstep")
    programs = [launch + [ours, "tcp" if options.tcp else "auto", "lockstep"]]
    if not options.tcp:
        programs.append(launch + [ours, "auto", "allocated", "allocated"])
    gloo = os.path.join(bench, "collectives_gloo")
    if os.path.exists(gloo):
        programs.append(launch + [gloo])
    mpi = os.path.join(bench, "collectives_mpi")
    if os.path.exists(mpi) and shutil.which("mpirun") and not options.tcp:
        programs.append(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n",
                         str(options.ranks), mpi])

    times = collections.defaultdict(list)
    for _ in range(options.rounds):
        for program in programs:
            for row in run(program):
                times[row["op"], row["bytes"], row["who"]].append(row["us"])
    median = {key: statistics.median(values) for key, values in times.items()}
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        rows = sorted({size for op, size, _ in median if op == operation})
        print(f"\n{operation}, {options.ranks} ranks, "
              f"{'TCP on loopback' if options.tcp else 'shared memory'}\n")
        print("| size | Lockstep µs | GB/s | Gloo µs | × Gloo | Open MPI µs | × Open MPI "
              "| allocated µs | ÷ memcpy |")
        print("|---|---|---|---|---|---|---|---|---|")
        for size in rows:
            cells = {who: median.get((operation, size, who))
                     for who in ("lockstep", "gloo", "openmpi", "allocated", "memcpy")}
            mine = cells["lockstep"]

            def ratio(top, bottom):
                return f"{top / bottom:.2f}" if top and bottom else ""

            def number(value):
                return f"{value:.1f}" if value else ""

            print(f"| {size_text(size)} | {number(mine)} | {size / mine / 1e3:.2f} "
                  f"| {number(cells['gloo'])} | {ratio(cells['gloo'], mine)} "
                  f"| {number(cells['openmpi'])} | {ratio(cells['openmpi'], mine)} "
                  f"| {number(cells['allocated'])} | {ratio(cells['memcpy'], cells['allocated'])} |")


if __name__ == "__main__":
    main()
