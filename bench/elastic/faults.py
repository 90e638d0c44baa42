#!/usr/bin/env python3
"""Disturbs a job again and again, and tells how much of its speed is left, in Markdown.

    bench/elastic/faults.py --progress FILE -- lockstep run --max-restarts 1000 …

The job writes its progress to FILE: a line for each step, which begins with the step's number (such as
metrics.csv of `lockstep train`). The job must take longer than this program. Stretches without faults
and stretches in which one rank is killed at regular intervals take turns, because the machine's speed
varies. Steps that the job makes twice count once.
"""
import argparse
import sys
import time

from disturbed_job import Job, JobFailed


class Stretch:
    """The steps by which the job advanced, and the seconds that it took."""

    def __init__(self):
        self.steps, self.seconds = 0, 0.0

    def rate(self):
        return self.steps / self.seconds


def go_on(job, stretch, options, minutes, fault_every=None):
    """Adds to the stretch, and returns how long the recovery from each fault took."""
    recoveries = []
    begin, first = job.wait_for_step(options.longest), job.furthest
    # The first fault comes in the middle, so that a stretch has faults in proportion to its length.
    next_fault = begin + fault_every / 2 if fault_every else float("inf")
    end = begin + 60 * minutes
    while (now := time.monotonic()) < end:
        job.wait_for_step(options.longest)
        if now < next_fault:
            continue
        killed = job.kill_one()
        recoveries.append(job.wait_for_step(options.longest) - killed)
        print(f"{recoveries[-1]:.2f} s until a step was finished (step {job.last_step})",
              file=sys.stderr, flush=True)
        next_fault += fault_every
    stretch.steps += job.furthest - first
    stretch.seconds += time.monotonic() - begin
    return recoveries


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--progress", required=True, metavar="FILE")
    parser.add_argument("--spares", type=int, default=0,
                        help="how many the command has stand by, which are not killed")
    parser.add_argument("--every", type=float, default=30, metavar="SECONDS",
                        help="from one fault to the next")
    parser.add_argument("--minutes", type=float, default=30, help="with faults")
    parser.add_argument("--undisturbed-minutes", type=float, default=6)
    parser.add_argument("--turns", type=int, default=6, help="of both")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before counting")
    parser.add_argument("--longest", type=float, default=120, metavar="SECONDS",
                        help="without a finished step, before this gives up")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    undisturbed, disturbed, recoveries = Stretch(), Stretch(), []
    try:
        with Job(options.command, options.progress, options.spares) as job:
            for _ in range(options.warm_up):
                job.wait_for_step(options.longest)
            for _ in range(options.turns):
                go_on(job, undisturbed, options, options.undisturbed_minutes / options.turns)
                recoveries += go_on(job, disturbed, options, options.minutes / options.turns,
                                    options.every)
    except JobFailed as failure:
        sys.exit(str(failure))
    print(f"\nOne fault every {options.every:g} s for {options.minutes:g} minutes\n")
    print("| faults | steps/s undisturbed | steps/s | of it | median, s to the next step "
          "| slowest |")
    print("|---|---|---|---|---|---|")
    ordered = sorted(recoveries)
    print(f"| {len(recoveries)} | {undisturbed.rate():.2f} | {disturbed.rate():.2f} "
          f"| {100 * disturbed.rate() / undisturbed.rate():.1f} % "
          + (f"| {ordered[len(ordered) // 2]:.2f} | {ordered[-1]:.2f} |" if ordered else "| | |"))


if __name__ == "__main__":
    main()
