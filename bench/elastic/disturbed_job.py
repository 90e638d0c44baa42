"""A job that is started, watched by the steps it finishes, and disturbed. Linux.

How far it is, the job tells in a file: a line for each finished step, which begins with the step's
number (a run's metrics.csv is one). Its ranks are found by the variable RANK that every launcher
sets.
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
    """The ids of processes, by their parents'."""
    children = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                parent = int(stat.read().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue  # it has ended
        children.setdefault(parent, []).append(int(name))
    return children


def rank_of(process):
    """What the process was started with as RANK; None for one that is no rank."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(b"RANK="):
                    return int(variable[5:])
    except (OSError, ValueError):
        pass
    return None


class Job:
    """Owns the processes it has started: they end with it."""

    def __init__(self, command, progress, environment=None):
        self.progress = progress
        self.read_bytes = os.path.getsize(progress) if os.path.exists(progress) else 0
        self.last_step = -1   # that a line told
        self.furthest = -1    # of all of them
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
            for process in [*self.ranks().values(), self.process.pid]:
                os.kill(process, signal.SIGKILL)
            self.process.wait()

    def ranks(self):
        """The ids of the processes that are ranks: where a rank has started others, its own."""
        children = children_of_all()
        found, waiting = {}, [self.process.pid]
        while waiting:
            for child in children.get(waiting.pop(), []):
                rank = rank_of(child)
                if rank is not None and rank not in found:
                    found[rank] = child
                if rank is None:
                    waiting.append(child)
        return found

    def look(self):
        """Reads what the job told since the last look. Whether that was a finished step."""
        try:
            size = os.path.getsize(self.progress)
        except FileNotFoundError:
            return False
        if size < self.read_bytes:  # written anew, as far as the job goes on from
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
        """Until the next step is finished. The time on the monotonic clock."""
        deadline = time.monotonic() + seconds
        while not self.look():
            if self.process.poll() is not None:
                self.look()
                raise JobFailed(f"the job ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise JobFailed(f"no step was finished in {seconds} s")
            time.sleep(POLL_SECONDS)
        return time.monotonic()

    def kill_one(self, of=None):
        """kill -9 of one rank, any or one of those given. Which one, and when."""
        ranks = self.ranks()
        candidates = sorted(rank for rank in ranks if of is None or rank in of)
        if not candidates:
            raise JobFailed("there is no rank to kill")
        rank = random.choice(candidates)
        os.kill(ranks[rank], signal.SIGKILL)
        return rank, time.monotonic()
