#!/usr/bin/env python3
"""Kills one of the ranks and times how long it takes until the next step is finished, in Markdown:
our job and PyTorch's under torchrun, with as much state, in turn.

Both jobs train the same layers on CPUs, save every few steps and go on from the last checkpoint. A
rank is killed (SIGKILL) at the begin of a step, which then cannot end without it.
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


def recoveries(command, folder, kills, settle):
    """Seconds from each kill to the next finished step, and how long a step takes without one."""
    times, steps = [], []
    with Job(command, os.path.join(folder, "steps"),
             {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
              "USE_LIBUV": "0"}) as job:  # which Debian's PyTorch has not
        job.wait_for_step(LONG_SECONDS)
        for _ in range(kills):
            before = job.wait_for_step(LONG_SECONDS)
            for _ in range(settle):
                now = job.wait_for_step(LONG_SECONDS)
                steps.append(now - before)
                before = now
            _, killed = job.kill_one()
            times.append(job.wait_for_step(LONG_SECONDS) - killed)
    return times, steps


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
    parser.add_argument("--launch", action="append", metavar="OPTIONS", default=None,
                        help="options of `lockstep run`, several times to compare them "
                             "('--max-restarts 100')")
    parser.add_argument("--python", action="append", metavar="COMMAND",
                        help="a Python that has PyTorch; several times for several of them "
                             "(python3)")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    arguments = [str(10**9), str(options.interval), str(options.width)]
    jobs = {}
    for launch in options.launch or ["--max-restarts 100"]:
        jobs[f"lockstep run {launch}"] = lambda folder, launch=launch: [
            os.path.join(options.build, "cli", "lockstep"), "run", "--nproc-per-node",
            str(options.ranks), *shlex.split(launch),
            os.path.join(options.build, "bench", "elastic_lockstep"), folder, *arguments]
    for python in options.python or ["python3"]:
        probe = subprocess.run([*shlex.split(python), "-c", "import torch; print(torch.__version__)"],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               check=False)
        if probe.returncode != 0:
            print(f"left out, as it has no PyTorch: {python}", file=sys.stderr)
            continue
        name = f"torchrun of PyTorch {probe.stdout.strip().split('+')[0]}"
        jobs[name] = lambda folder, python=python: [
            *shlex.split(python), "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", str(options.ranks), "--max_restarts", "100",
            # Without these PyTorch 1.13 does not start under Python 3.11; nothing is printed.
            "--redirects", "0:1", "--tee", "0:1", "--log_dir", folder,
            os.path.join(HERE, "pytorch.py"), folder, *arguments]
    times = {name: [] for name in jobs}
    steps = {name: [] for name in jobs}
    for _ in range(options.rounds):
        for name, command in jobs.items():
            with tempfile.TemporaryDirectory(dir=options.build) as folder:
                killed, undisturbed = recoveries(command(folder), folder, options.kills,
                                                 options.settle)
            times[name] += killed
            steps[name] += undisturbed
    megabytes = 4 * (options.width + 1) * options.width * 12 / 2**20
    print(f"\nFrom kill -9 of one of {options.ranks} ranks to the next finished step; "
          f"{megabytes:.0f} MiB of state, saved every {options.interval} steps\n")
    print("| job | kills | median, s | fastest | slowest | a step, ms |")
    print("|---|---|---|---|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {len(seconds)} | {statistics.median(seconds):.2f} "
              f"| {min(seconds):.2f} | {max(seconds):.2f} "
              f"| {1e3 * statistics.median(steps[name]):.0f} |")


if __name__ == "__main__":
    main()
