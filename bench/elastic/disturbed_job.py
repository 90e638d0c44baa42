"""A job that is started, watched by the steps it finishes, and disturbed. Linux.

The job writes its progress to a file: a line for each finished step, which begins with the step's
number (a run's metrics.csv is such a file). Its ranks are found by the variable RANK, which every
launcher sets; a spare of ours has no RANK, and counts as a rank once it has stepped in.
"""
import os
import random
import re
import signal
import subprocess
import time

POLL_SECONDS = 0.002


class JobFailed(Exception):
    pass


def children_of_all():
    """The ids of processes, by the ids of their parents."""
    children = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                parent = int(stat.read().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue  # the process has ended
        children.setdefault(parent, []).append(int(name))
    return children


def started(process):
    """When a process was started, in ticks since the host's start."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0


def environment_of(process):
    """The environment with which a process was started; empty if it has ended."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    except OSError:
        return {}


class Job:
    """Owns the processes it has started: they end with it."""

    def __init__(self, command, progress, spares=0, environment=None):
        self.spares = spares  # processes that stand by
        self.progress = progress
        self.read_bytes = os.path.getsize(progress) if os.path.exists(progress) else 0
        self.last_step = -1   # the latest in the file
        self.furthest = -1    # the highest so far
        self.lines = 0
        self.rest = b""
        self.process = subprocess.Popen(command, start_new_session=True,
                                        stdout=subprocess.DEVNULL,
                                        env={**os.environ, **(environment or {})})

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.end()

    def end(self):
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            for process in [*self.processes(), self.process.pid]:
                os.kill(process, signal.SIGKILL)
            self.process.wait()

    def processes(self):
        """The ids of ranks and spares, in the order of their start, without their own children."""
        children = children_of_all()
        found, waiting = [], [self.process.pid]
        while waiting:
            for child in children.get(waiting.pop(), []):
                environment = environment_of(child)
                if b"RANK" in environment or b"LOCKSTEP_SPARE" in environment:
                    found.append((started(child), child, b"RANK" not in environment))
                else:
                    waiting.append(child)
        return {child: spare for _, child, spare in sorted(found)}

    def ranks(self):
        """The ids of the processes that are ranks now; the youngest ones are spares that stand by."""
        processes = self.processes()
        standing_by = [process for process, spare in processes.items() if spare][-self.spares:]
        return [process for process in processes
                if self.spares == 0 or process not in standing_by]

    def look(self):
        """Reads the lines written since the last look. Returns whether a step was finished."""
        try:
            size = os.path.getsize(self.progress)
        except FileNotFoundError:
            return False
        if size < self.read_bytes:  # rewritten up to the step from which the job goes on
            self.read_bytes, self.rest = size, b""
        if size == self.read_bytes:
            return False
        with open(self.progress, "rb") as file:
            file.seek(self.read_bytes)
            text = self.rest + file.read(size - self.read_bytes)
        self.read_bytes = size
        *lines, self.rest = text.split(b"\n")
        steps = [int(match.group()) for match in (re.match(rb"\d+", line) for line in lines)
                 if match]
        if steps:
            self.lines += len(steps)
            self.last_step = steps[-1]
            self.furthest = max(self.furthest, *steps)
        return bool(steps)

    def wait_for_step(self, seconds):
        """Waits until the next step is finished. Returns the time on the monotonic clock."""
        deadline = time.monotonic() + seconds
        while not self.look():
            if self.process.poll() is not None:
                self.look()
                raise JobFailed(f"the job ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise JobFailed(f"no step was finished in {seconds} s")
            time.sleep(POLL_SECONDS)
        return time.monotonic()

    def wait_for_spares(self, ranks, seconds):
        """Waits until all spares stand by."""
        deadline = time.monotonic() + seconds
        while len(self.processes()) < ranks + self.spares:
            if time.monotonic() > deadline:
                raise JobFailed(f"{self.spares} spares did not come within {seconds} s")
            self.wait_for_step(seconds)

    def kill_one(self):
        """Kills any rank with SIGKILL. Returns the time."""
        ranks = self.ranks()
        if not ranks:
            raise JobFailed("there is no rank to kill")
        os.kill(random.choice(ranks), signal.SIGKILL)
        return time.monotonic()
