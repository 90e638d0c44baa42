#!/usr/bin/env python3
"""Runs our collectives and our peers' side by side and prints the ratios, in Markdown.

Each program runs several times in turn, and each figure is the median of its rounds, so that the
machine's load affects all of them alike. With --link, two network namespaces joined by a link of
that rate (as tc writes it) stand for two hosts; that needs root.
"""
import argparse
import collections
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

HOSTS = ("10.231.7.1", "10.231.7.2")


class Link:
    """Two namespaces and the link between them; gone when the with-block ends."""

    def __init__(self, rate):
        self.rate = rate
        self.names = [f"lockstep-bench-{os.getpid()}-{i}" for i in range(2)]

    def __enter__(self):
        for name in self.names:
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        self.ip("link", "add", "bench0", "netns", self.names[0], "type", "veth", "peer", "name",
                "bench0", "netns", self.names[1])
        for name, host in zip(self.names, HOSTS):
            self.ip("-n", name, "address", "add", f"{host}/24", "dev", "bench0")
            self.ip("-n", name, "link", "set", "bench0", "up")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "bench0", "root", "tbf", "rate",
                            self.rate, "burst", "64kb", "latency", "50ms"], check=True)
        return self

    def __exit__(self, *unused):
        for name in self.names:
            self.ip("netns", "delete", name)

    @staticmethod
    def ip(*words):
        subprocess.run(["ip", *words], check=True)


def rows_of(output):
    for line in output.splitlines():
        start = line.find('{"who"')
        if start >= 0:
            yield json.loads(line[start:])


def run(command, environment):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode != 0:
        sys.exit(f"failed with {done.returncode}: {' '.join(command)}")
    return list(rows_of(done.stdout))


def run_on_link(link, launcher, secret, program, environment):
    """One rank on each side of the link."""
    nodes = []
    for node, name in enumerate(link.names):
        command = ["ip", "netns", "exec", name, launcher, "run", "--nnodes", "2", "--node-rank",
                   str(node), "--nproc-per-node", "1", "--master-addr", HOSTS[0], "--master-port",
                   "29561", "--secret-file", secret, *program]
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    outputs = [node.communicate()[0] for node in nodes]
    if any(node.returncode != 0 for node in nodes):
        sys.exit(f"failed: {' '.join(program)}")
    return list(rows_of("".join(outputs)))


def size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def print_table(title, median, operation):
    sizes = sorted({size for op, size, _ in median if op == operation})
    if not sizes:
        return
    print(f"\n{operation}, {title}\n")
    print("| size | Lockstep µs | GB/s | Gloo µs | × Gloo | Open MPI µs | × Open MPI "
          "| allocated µs | memcpy µs | × memcpy |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for size in sizes:
        cell = {who: median.get((operation, size, who))
                for who in ("lockstep", "gloo", "openmpi", "allocated", "memcpy")}

        def number(value):
            return f"{value:.1f}" if value else ""

        def times(peer, ours):
            return f"{peer / ours:.2f}" if peer and ours else ""

        print(f"| {size_text(size)} | {number(cell['lockstep'])} "
              f"| {size / cell['lockstep'] / 1e3:.2f} "
              f"| {number(cell['gloo'])} | {times(cell['gloo'], cell['lockstep'])} "
              f"| {number(cell['openmpi'])} | {times(cell['openmpi'], cell['lockstep'])} "
              f"| {number(cell['allocated'])} | {number(cell['memcpy'])} "
              f"| {times(cell['memcpy'], cell['allocated'])} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-mib", type=int, default=None, help="largest size")
    parser.add_argument("--tcp", action="store_true", help="TCP on loopback, not shared memory")
    parser.add_argument("--link", metavar="RATE", help="TCP over a link of this rate: 100mbit")
    options = parser.parse_args()
    largest = str(options.max_mib or (1 if options.link else 128))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if options.link:
        environment["BENCH_MIB_IN_ALL"] = "16"
    bench = os.path.join(options.build, "bench")
    launcher = os.path.join(options.build, "cli", "lockstep")
    tcp = options.tcp or options.link

    programs = [[os.path.join(bench, "collectives_lockstep"), largest, "tcp" if tcp else "auto"]]
    if not tcp:
        programs.append(programs[0] + ["allocated", "allocated"])
    gloo = os.path.join(bench, "collectives_gloo")
    if os.path.exists(gloo):
        programs.append([gloo, largest])

    times = collections.defaultdict(list)

    def note(rows):
        for row in rows:
            times[row["op"], row["bytes"], row["who"]].append(row["us"])

    if options.link:
        title = f"2 ranks, a link of {options.link}"
        with Link(options.link) as link, tempfile.NamedTemporaryFile() as secret:
            secret.write(os.urandom(32))
            secret.flush()
            for _ in range(options.rounds):
                for program in programs:
                    note(run_on_link(link, launcher, secret.name, program, environment))
    else:
        title = f"{options.ranks} ranks, " + ("TCP on loopback" if tcp else "shared memory")
        launch = [launcher, "run", "--nproc-per-node", str(options.ranks)]
        # Gloo works in threads of its own, and is several times slower if its ranks are pinned.
        commands = [launch + (["--bind-to", "none"] if program[0] == gloo else []) + program
                    for program in programs]
        mpi = os.path.join(bench, "collectives_mpi")
        if os.path.exists(mpi) and shutil.which("mpirun") and not tcp:
            commands.append(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n",
                             str(options.ranks), mpi, largest])
        for _ in range(options.rounds):
            for command in commands:
                note(run(command, environment))

    median = {key: statistics.median(values) for key, values in times.items()}
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        print_table(title, median, operation)
    overhead = run([os.path.join(bench, "collectives_overhead")], environment)[0]["us"]
    print(f"\nA call's own cost (checks, fingerprint, recorder, executor): {overhead:.2f} µs")


if __name__ == "__main__":
    main()
