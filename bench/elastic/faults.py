#!/usr/bin/env python3
"""Disturbs a job again and again, and tells how much of its speed is left, in Markdown.

    bench/elastic/faults.py --progress FILE [--clean FOLDER] -- lockstep run --max-restarts 1000 …

FILE is what the job tells its steps in: a line for each that begins with its number (metrics.csv of a
run of `lockstep train`). The job must be one that takes longer than this. It runs undisturbed for a
while, is ended, and runs again (anew, where --clean names the folder that it goes on from), now with
kill -9 of one rank every so many seconds. Counted are steps that the job is further, not those that it
made twice.
"""
import argparse
import os
import shutil
import sys
import time

from disturbed_job import Job, JobFailed


def measure(options, command, fault_every):
    """Steps a second that the job came further, how many faults there were, and how long each took."""
    if options.clean:
        shutil.rmtree(options.clean, ignore_errors=True)
    recoveries = []
    seconds = 60 * (options.minutes if fault_every else options.undisturbed_minutes)
    with Job(command, options.progress, options.spares) as job:
        job.wait_for_step(options.longest)
        # Not the start, which a long run has once.
        for _ in range(options.warm_up):
            job.wait_for_step(options.longest)
        begin, first = time.monotonic(), job.furthest
        next_fault = begin + fault_every if fault_every else float("inf")
        while (now := time.monotonic()) < begin + seconds:
            job.wait_for_step(options.longest)
            if now < next_fault:
                continue
            killed = job.kill_one()
            recoveries.append(job.wait_for_step(options.longest) - killed)
            print(f"fault {len(recoveries)}: {recoveries[-1]:.2f} s until a step was finished "
                  f"(step {job.last_step})", file=sys.stderr, flush=True)
            next_fault += fault_every
        return (job.furthest - first) / (time.monotonic() - begin), recoveries


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--progress", required=True, metavar="FILE")
    parser.add_argument("--clean", metavar="FOLDER", help="removed before each of the two runs")
    parser.add_argument("--spares", type=int, default=0,
                        help="how many the command has stand by, which are not killed")
    parser.add_argument("--every", type=float, default=30, metavar="SECONDS",
                        help="from one fault to the next")
    parser.add_argument("--minutes", type=float, default=30, help="with faults")
    parser.add_argument("--undisturbed-minutes", type=float, default=5)
    parser.add_argument("--warm-up", type=int, default=5, help="steps before counting")
    parser.add_argument("--longest", type=float, default=120, metavar="SECONDS",
                        help="without a finished step, before this gives up")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        undisturbed, _ = measure(options, options.command, None)
        disturbed, recoveries = measure(options, options.command, options.every)
    except JobFailed as failure:
        sys.exit(str(failure))
    print(f"\nOne fault every {options.every:g} s for {options.minutes:g} minutes\n")
    print("| faults | steps/s undisturbed | steps/s | of it | median, s to the next step "
          "| slowest |")
    print("|---|---|---|---|---|---|")
    ordered = sorted(recoveries)
    print(f"| {len(recoveries)} | {undisturbed:.2f} | {disturbed:.2f} "
          f"| {100 * disturbed / undisturbed:.1f} % "
          + (f"| {ordered[len(ordered) // 2]:.2f} | {ordered[-1]:.2f} |" if ordered else "| | |"))


if __name__ == "__main__":
    main()
