#!/usr/bin/env python3
"""Kills one of the ranks and times how long it takes until the next step is finished, in Markdown:
our job goes on from the last checkpoint, from the ranks' memory, or with a spare that stands by;
PyTorch's goes on under torchrun with as much state. They take turns.

All train the same layers on CPUs and save every few steps. A rank is killed (SIGKILL) at the
beginning of a step, which then cannot end without it.
"""
import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile

from disturbed_job import Job

HERE = os.path.dirname(os.path.abspath(__file__))
LONG_SECONDS = 120


def recoveries(command, folder, spares, options):
    """Seconds from each kill to the next finished step, how many steps were lost to it, and how long
    a step takes without one."""
    times, lost, steps = [], [], []
    with Job(command, os.path.join(folder, "steps"), spares,
             {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
              "USE_LIBUV": "0"}) as job:  # Debian's PyTorch is built without it
        job.wait_for_step(LONG_SECONDS)
        for _ in range(options.kills):
            before = job.wait_for_step(LONG_SECONDS)
            for _ in range(options.settle):
                now = job.wait_for_step(LONG_SECONDS)
                steps.append(now - before)
                before = now
            job.wait_for_spares(options.ranks, LONG_SECONDS)
            job.wait_for_step(LONG_SECONDS)
            before = job.last_step
            killed = job.kill_one()
            times.append(job.wait_for_step(LONG_SECONDS) - killed)
            lost.append(before - job.last_step + 1)
    return times, lost, steps


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2, help="in each round")
    parser.add_argument("--width", type=int, default=1024, help="of four layers")
    parser.add_argument("--interval", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--settle", type=int, default=25, help="steps before each kill")
    parser.add_argument("--python", action="append", metavar="COMMAND",
                        help="a Python that has PyTorch; several times for several of them "
                             "(python3)")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    arguments = [str(10**9), str(options.interval), str(options.width)]
    jobs = {}
    spares = {"from the ranks' memory, with a spare": 1}
    for name, copy_every in [("from disk", 0), ("from the ranks' memory", 1),
                             ("from the ranks' memory, with a spare", 1)]:
        jobs[name] = lambda folder, name=name, copy_every=copy_every: [
            os.path.join(options.build, "cli", "lockstep"), "run", "--nproc-per-node",
            str(options.ranks), "--max-restarts", "100", "--spares", str(spares.get(name, 0)),
            os.path.join(options.build, "bench", "elastic_lockstep"), folder, *arguments,
            str(copy_every)]
    for python in options.python or ["python3"]:
        probe = subprocess.run([*shlex.split(python), "-c", "import torch; print(torch.__version__)"],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               check=False)
        if probe.returncode != 0:
            print(f"left out, as it has no PyTorch: {python}", file=sys.stderr)
            continue
        name = f"torchrun of PyTorch {probe.stdout.strip().split('+')[0]}, from disk"
        jobs[name] = lambda folder, python=python: [
            *shlex.split(python), "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", str(options.ranks), "--max_restarts", "100",
            # Without these PyTorch 1.13 does not start under Python 3.11; nothing is printed.
            "--redirects", "0:1", "--tee", "0:1", "--log_dir", folder,
            os.path.join(HERE, "pytorch.py"), folder, *arguments]
    times, lost, steps = ({name: [] for name in jobs} for _ in range(3))
    for _ in range(options.rounds):
        for name, command in jobs.items():
            with tempfile.TemporaryDirectory(dir=options.build) as folder:
                found = recoveries(command(folder), folder, spares.get(name, 0), options)
            for all_of_it, more in zip((times, lost, steps), found):
                all_of_it[name] += more
    megabytes = 4 * (options.width + 1) * options.width * 12 / 2**20
    print(f"\nFrom kill -9 of one of {options.ranks} ranks to the next finished step; "
          f"{megabytes:.0f} MiB of state, saved every {options.interval} steps\n")
    print("| job | kills | median, s | fastest | slowest | steps lost, at most | a step, ms |")
    print("|---|---|---|---|---|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {len(seconds)} | {statistics.median(seconds):.2f} "
              f"| {min(seconds):.2f} | {max(seconds):.2f} | {max(lost[name])} "
              f"| {1e3 * statistics.median(steps[name]):.0f} |")


if __name__ == "__main__":
    main()
