#!/usr/bin/env python3
"""Times our training step and our peers' side by side and prints the ratios, in Markdown.

A GPT of 6 layers and 384 wide, 4 × 256 tokens a rank, AdamW; ranks of one thread on CPUs. Each
program runs several times in turn, and each figure is the median over its rounds of the median
step, so that the machine's load affects all of them alike. `lockstep run` starts all of them, gives
each rank cores of its own and tells OpenBLAS which CPU it is on, so the peers use the same kernels as
we do. CPU time is a process's own, its communication threads included; compare it if other programs
run on the machine. Ranks that wait for each other in every step take as long as the slowest of them,
which depends on the machine: "slowest" is the step of the slowest rank. For ranks that do not
communicate, that is a lower bound for any exchange of gradients.
"""
import argparse
import collections
import json
import os
import shlex
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FIGURES = ("ms", "cpu_ms", "forward_ms", "backward_ms", "update_ms")
NAMES = {
    "lockstep_ddp": "Lockstep, data parallel",
    "lockstep_fsdp": "Lockstep, FULL_SHARD",
    "lockstep_plain": "Lockstep, ranks on their own",
    "lockstep_torch": "torch::nn made data parallel by Lockstep",
    "torch_plain": "torch::nn, ranks on their own",
    "pytorch_ddp": "PyTorch {torch} DDP",
    "pytorch_fsdp": "PyTorch {torch} FSDP2",
    "pytorch_plain": "PyTorch {torch}, ranks on their own",
}


class Times:
    """Median steps by program and number of ranks, a value for each round."""

    def __init__(self):
        self.rounds = collections.defaultdict(list)
        self.names = {}

    def run(self, launcher, ranks, program):
        command = [launcher, "run", "--nproc-per-node", str(ranks), "--no-python", *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False,
                              env=environment)
        if done.returncode != 0:
            sys.exit(f"failed with {done.returncode}: {shlex.join(command)[:300]}")
        of_ranks = collections.defaultdict(list)
        for line in done.stdout.splitlines():
            start = line.find('{"who"')
            if start < 0:
                continue
            row = json.loads(line[start:])
            # Each version of PyTorch is a peer of its own.
            who = row["who"], row.get("torch", "")
            self.names[who] = NAMES[row["who"]].format(torch=row.get("torch", "").split("+")[0])
            of_ranks[who].append(row)
        for who, rows in of_ranks.items():
            figures = {figure: statistics.mean(statistics.median(row[figure]) for row in rows)
                       for figure in FIGURES}
            figures["slowest"] = statistics.median(max(step) for step in
                                                   zip(*(row["ms"] for row in rows)))
            self.rounds[who, ranks].append(figures)

    def median(self, who, ranks, figure):
        return statistics.median(row[figure] for row in self.rounds[who, ranks])

    def ratio(self, who, peer, ranks, figure):
        """The median of the ratios within each round, in which both ran."""
        pairs = zip(self.rounds[who, ranks], self.rounds[peer, ranks])
        return statistics.median(ours[figure] / theirs[figure] for ours, theirs in pairs)

    def found(self, name):
        return sorted(who for who in self.names if who[0] == name)


def print_steps(times, ranks):
    ours = ("lockstep_ddp", "")
    print(f"\nA training step, {ranks} ranks of one thread\n")
    print("| program | ms | slowest | CPU ms | forward | backward | update | ms: data-parallel "
          "Lockstep is … of it | CPU ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in NAMES:
        for who in times.found(name):
            cells = " | ".join(f"{times.median(who, ranks, figure):.0f}"
                               for figure in ("ms", "slowest", *FIGURES[1:]))
            ratios = " | ".join(f"{times.ratio(ours, who, ranks, figure):.3f}"
                                for figure in ("ms", "cpu_ms"))
            print(f"| {times.names[who]} | {cells} | {ratios} |")

    def say(text, who, peer):
        wall, cpu = (times.ratio(who, peer, ranks, figure) for figure in ("ms", "cpu_ms"))
        print(f"- {text}: {wall:.3f} of the time, {cpu:.3f} of the CPU time")

    print()
    for peer in times.found("pytorch_ddp"):
        say(f"Lockstep's data-parallel step against {times.names[peer]}'s", ours, peer)
    sharded = ("lockstep_fsdp", "")
    for peer in times.found("pytorch_fsdp"):
        say(f"Lockstep's FULL_SHARD step against {times.names[peer]}'s", sharded, peer)
    say("FULL_SHARD against data parallelism without shards, step by step in turn", sharded, ours)
    say("Data parallelism against the same ranks on their own, step by step in turn", ours,
        ("lockstep_plain", ""))
    slowest = times.ratio(ours, ("lockstep_plain", ""), ranks, "slowest")
    print(f"- … and against the slowest of them in each step: {slowest:.3f} of the time")
    say("Our plain loop against torch::nn's", ("lockstep_plain", ""), ("torch_plain", ""))
    say("torch::nn's loop with our three lines on "
        f"{ranks} ranks against without, the same kernels", ("lockstep_torch", ""),
        ("torch_plain", ""))


def print_scaling(times, counts):
    """Cores that share caches, memory and clock slow each other down even without communication:
    ranks that do not communicate show by how much."""
    print("\nWeak scaling: one rank's step as a part of the step on so many ranks\n")
    alone = times.found("lockstep_plain")
    peers = alone + times.found("lockstep_ddp") + times.found("pytorch_ddp")
    print("| ranks | " + " | ".join(f"{times.names[who]}, ms | efficiency" for who in peers)
          + " | Lockstep, data parallel, against the slowest of the ranks on their own |")
    print("|---|" + "---|---|" * len(peers) + "---|")
    for ranks in counts:
        cells = []
        for who in peers:
            first = times.median(who, counts[0], "ms")
            now = times.median(who, ranks, "ms")
            cells.append(f"{now:.0f} | {100 * first / now:.1f}%")
        kept = times.ratio(alone[0], ("lockstep_ddp", ""), ranks, "slowest")
        print(f"| {ranks} | " + " | ".join(cells) + f" | {100 * kept:.1f}% |")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed in each round")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--python", action="append", metavar="COMMAND",
                        help="a Python that has PyTorch; several times for several of them "
                             "(python3; 'chroot /srv/debian python3')")
    parser.add_argument("--weak-scaling", metavar="1,2,4",
                        help="instead: the data-parallel step on so many ranks")
    options = parser.parse_args()
    launcher = os.path.join(options.build, "cli", "lockstep")
    bench = os.path.join(options.build, "bench")
    steps = [str(options.steps), str(options.warm_up)]
    with open(os.path.join(HERE, "pytorch.py"), encoding="utf-8") as script:
        text = script.read()

    def lockstep(what):
        return [os.path.join(bench, "training_lockstep"), what, *steps]

    def can_import(python, module):
        probe = subprocess.run([*shlex.split(python), "-c", f"import {module}"], check=False,
                               stderr=subprocess.DEVNULL)
        return probe.returncode == 0

    def pytorch(what):
        # Passed as text, because a Python in another root cannot open our files.
        return [[*shlex.split(python), "-c", text, what, *steps] for python in pythons
                if what != "fsdp" or can_import(python, "torch.distributed.fsdp as f; f.fully_shard")]

    pythons = options.python or ["python3"]
    for python in list(pythons):
        if not can_import(python, "torch"):
            print(f"left out, as it has no PyTorch: {python}", file=sys.stderr)
            pythons.remove(python)
    times = Times()
    if options.weak_scaling:
        counts = [int(count) for count in options.weak_scaling.split(",")]
        for _ in range(options.rounds):
            for ranks in counts:
                for program in [lockstep("alternate"), *pytorch("ddp")]:
                    times.run(launcher, ranks, program)
        print_scaling(times, counts)
        return
    programs = [lockstep("alternate"), *pytorch("ddp"), *pytorch("fsdp"), lockstep("torch"),
                [os.path.join(bench, "training_torch_plain"), *steps], *pytorch("plain")]
    for _ in range(options.rounds):
        for program in programs:
            times.run(launcher, options.ranks, program)
    print_steps(times, options.ranks)


if __name__ == "__main__":
    main()
