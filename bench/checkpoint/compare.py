#!/usr/bin/env python3
"""Times checkpoints: ours, plain writes and reads of the same bytes, and PyTorch's, in Markdown.

The state is that of a GPT with AdamW, cut among the ranks. The first program saves and loads it, and
writes and reads as many bytes plainly, in turn. Then PyTorch's distributed checkpoint does the same.
This repeats for several rounds. A ratio is the median over the rounds of the ratio within a round, with
the smallest and largest beside it. A plain write is large writes and one fsync of a file for each
rank, a plain read is large reads of it. "load" finds everything in the page cache, "cold load" nothing.
A folder in memory (/dev/shm) has no disk behind the page cache. CPU time is that of all ranks; compare
it if other programs run on the machine.

Then a GPT trains, some steps without a save and some beside one, in turn: this shows how much longer a
step takes, and how long save() holds training up.
"""
import argparse
import collections
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


def run(launcher, ranks, program, environment=None):
    """The rows that the ranks print."""
    command = [launcher, "run", "--nproc-per-node", str(ranks), "--no-python", *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                               **(environment or {})})
    if done.returncode != 0:
        sys.exit(f"failed with {done.returncode}: {shlex.join(command)[:300]}")
    rows = (line[line.find('{"who"'):] for line in done.stdout.splitlines() if '{"who"' in line)
    return [json.loads(row) for row in rows]


def spread(values):
    """The median, with the smallest and largest value."""
    values = list(values)
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


class Files:
    """Seconds of saves and loads, by kind and program, a value for each round."""

    def __init__(self):
        self.rounds = collections.defaultdict(list)
        self.last = {}

    def add(self, rows):
        for row in rows:
            who = row["who"] + row.get("torch", "").split("+")[0]
            self.rounds[row["what"], who].append(statistics.median(row["seconds"]))
            if "cpu_seconds" in row:
                self.rounds[row["what"], who, "cpu"].append(statistics.median(row["cpu_seconds"]))
            self.last[row["what"], who] = row

    def peers(self, what):
        return [key[1] for key in self.rounds if key[0] == what and len(key) == 2
                and key[1].startswith("pytorch")]

    def ratios(self, what, who, figure=()):
        ours = self.rounds[(what, "lockstep", *figure)]
        return spread(b / a for a, b in zip(ours, self.rounds[(what, who, *figure)]))

    def print_table(self, title):
        peers = self.peers("save")
        print(f"\n{title}\n")
        print("| | GB/s | plain GB/s | × plain | plain's CPU time is … of ours | "
              + " | ".join(f"× PyTorch {peer[len('pytorch'):]}" for peer in peers)
              + " | calls | plain's |")
        print("|---|---|---|---|---|" + "---|" * len(peers) + "---|---|")
        for what in ("save", "load", "cold load"):
            if (what, "lockstep") not in self.rounds:
                continue
            row, plain = self.last[what, "lockstep"], self.last[what, "plain"]
            speed = [row["bytes"] / 1e9 / statistics.median(self.rounds[what, who])
                     for who in ("lockstep", "plain")]
            cells = [f"{speed[0]:.2f}", f"{speed[1]:.2f}", self.ratios(what, "plain"),
                     self.ratios(what, "plain", ("cpu",)),
                     *(self.ratios(what, peer) for peer in peers),
                     str(row["calls"][-1]), str(plain["calls"][-1])]
            print(f"| {what} | " + " | ".join(cells) + " |")


def print_training(rows):
    print("\nA step beside an asynchronous save\n")
    print("| ranks | MiB a rank writes | step, ms | beside a save, of it | mean, of it "
          "| save() holds up, of a step | the first one | longest poll(), ms | a save takes, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cycles = row["cycles"]

        def of_step(figure, cycles=cycles):
            return spread(figure(cycle) / statistics.median(cycle["without_ms"])
                          for cycle in cycles)

        step = statistics.median(ms for cycle in cycles for ms in cycle["without_ms"])
        means = [sum(ms for cycle in cycles for ms in cycle[kind])
                 / sum(len(cycle[kind]) for cycle in cycles)
                 for kind in ("without_ms", "during_ms")]
        print(f"| {row['ranks']} | {row['bytes'] / 2**20:.0f} | {step:.0f} "
              f"| {of_step(lambda cycle: statistics.median(cycle['during_ms']))} "
              f"| {means[1] / means[0]:.2f} "
              f"| {of_step(lambda cycle: cycle['stall_ms'])} "
              f"| {row['first_stall_ms'] / step:.2f} "
              f"| {max(cycle['longest_poll_ms'] for cycle in cycles):.1f} "
              f"| {statistics.median(cycle['save_seconds'] for cycle in cycles):.1f} |")


def can_import(python, module):
    probe = subprocess.run([*shlex.split(python), "-c", f"import {module}"], check=False,
                           stderr=subprocess.DEVNULL)
    return probe.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--ranks", default="1,2", help="how many, several times (1,2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", action="append",
                        help="where to write; several times for several disks (a folder of "
                             "--build, and /dev/shm)")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--python", action="append", metavar="COMMAND",
                        help="a Python that has PyTorch; several times for several of them "
                             "(python3; 'chroot /srv/debian python3', which needs the folder at "
                             "the same place)")
    parser.add_argument("--saves", type=int, default=10, help="while the GPT trains; 0: none")
    parser.add_argument("--steps", type=int, default=4, help="between two of them")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    launcher = os.path.join(options.build, "cli", "lockstep")
    bench = os.path.join(options.build, "bench")
    with open(os.path.join(HERE, "pytorch.py"), encoding="utf-8") as script:
        text = script.read()
    pythons = options.python or ["python3"]
    for python in list(pythons):
        if not can_import(python, "torch"):
            print(f"left out, as it has no PyTorch: {python}", file=sys.stderr)
            pythons.remove(python)
    counts = [int(count) for count in options.ranks.split(",")]
    for parent in options.folder or [options.build, "/dev/shm"]:
        folder = tempfile.mkdtemp(prefix="checkpoint-bench-", dir=parent)
        in_memory = subprocess.run(["stat", "-f", "-c", "%T", folder], stdout=subprocess.PIPE,
                                   text=True, check=True).stdout.strip() == "tmpfs"
        arguments = [folder, "2", "warm" if in_memory else "cold", str(options.width),
                     str(options.layers)]
        # Passed as text, because a Python in another root cannot open our files.
        programs = [[os.path.join(bench, "checkpoint_files"), *arguments],
                    *([*shlex.split(python), "-W", "ignore", "-c", text, *arguments]
                      for python in pythons)]
        try:
            for ranks in counts:
                files = Files()
                for _ in range(options.rounds):
                    for program in programs:
                        files.add(run(launcher, ranks, program))
                size = files.last["save", "lockstep"]["bytes"] / 2**20
                files.print_table(f"{size:.0f} MiB on {ranks} rank{'s' if ranks > 1 else ''}, "
                                  + ("in memory" if in_memory else "on a disk"))
        finally:
            shutil.rmtree(folder)
    if options.saves == 0:
        return
    rows = []
    for ranks in counts:
        with tempfile.TemporaryDirectory(dir=options.build) as folder:
            rows += run(launcher, ranks,
                        [os.path.join(bench, "checkpoint_training"), folder,
                         str(options.saves), str(options.steps)])
    print_training(rows)


if __name__ == "__main__":
    main()
