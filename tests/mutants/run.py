#!/usr/bin/env python3
"""Tests the tests: puts one fault at a time into the library, and expects the parity suite to find
wrong numbers.

mutants.json has the faults. Each has a file, a text that occurs in it once, the text to put there
instead, a number of ranks, and the cells of tests/parity that must fail; code that this suite does
not run has the program of another test and its arguments. Neither the tree nor its build is touched:
the file with the fault is compiled as the build compiles it, and linked before the libraries, whose
own version of the file the linker then leaves out. A fault that does not compile, or that ends a rank
before a number is wrong, shows nothing and counts as not found.
"""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PARITY = "tests/parity/parity_test"
# The suite's messages about a wrong number; exceptions have others.
WRONG_NUMBER = re.compile(
    r"FAIL \[.*\] .*(is off by|is wrong by|loss \S+ instead of|the loss of step|the norm of step)")


def run(command, folder, seconds=600):
    """Runs a command. Returns its exit code and its output."""
    try:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.STDOUT, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        return None, (late.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout


class Build:
    """How the build compiles a file and links a suite."""

    def __init__(self, folder, scratch):
        self.folder = folder
        self.scratch = scratch
        with open(os.path.join(folder, "compile_commands.json"), encoding="utf-8") as file:
            self.compile_commands = {entry["file"]: entry["command"] for entry in json.load(file)}
        self.link_commands = {}

    def link_command(self, program):
        if program not in self.link_commands:
            links = subprocess.run(["ninja", "-t", "commands", program], cwd=self.folder, check=True,
                                   stdout=subprocess.PIPE, text=True).stdout
            self.link_commands[program] = links.splitlines()[-1]
        return self.link_commands[program]

    def compile(self, source, text):
        """The object of a source file with this text, or None and the compiler's output."""
        name = os.path.join(self.scratch, os.path.basename(source))
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
        words = shlex.split(self.compile_commands[source])
        words[words.index("-o") + 1] = name + ".o"
        words[words.index("-c") + 1] = name
        words += ["-iquote", os.path.dirname(source)]
        code, output = run(words, self.folder)
        return (name + ".o", "") if code == 0 else (None, output)

    def link(self, program, objects):
        """A suite with these objects in place of the libraries', or None and the linker's output."""
        made = os.path.join(self.scratch, os.path.basename(program))
        command = self.link_command(program).replace(f"-o {program} ",
                                                     shlex.join(["-o", made, *objects]) + " ")
        code, output = run(["bash", "-c", command], self.folder)
        return (made, "") if code == 0 else (None, output)

    def run_suite(self, program, ranks, arguments):
        return run([os.path.join(self.folder, "cli/lockstep"), "run", "--standalone",
                    "--nproc-per-node", str(ranks), program, *arguments],
                   self.folder)


def suite_of(mutant):
    """The program that has to find the fault, and its arguments."""
    if "cells" in mutant:
        return PARITY, ("--model-parallel", mutant["cells"])
    return mutant["test"]["program"], tuple(mutant["test"]["arguments"])


def first_wrong_number(output):
    found = WRONG_NUMBER.search(output)
    if found is None:
        return None
    line = output[found.start():].splitlines()[0]
    return line[line.index("] ") + 2:]


def try_mutant(build, mutant):
    """Whether the suite found the fault, and the message; or the reason why that is unknown."""
    source = os.path.join(ROOT, mutant["file"])
    with open(source, encoding="utf-8") as file:
        text = file.read()
    if text.count(mutant["text"]) != 1:
        return False, f"its text is {text.count(mutant['text'])} times in {mutant['file']}"
    made, said = build.compile(source, text.replace(mutant["text"], mutant["instead"]))
    if made is None:
        return False, "it does not compile:\n" + said
    suite, arguments = suite_of(mutant)
    program, said = build.link(suite, [made])
    if program is None:
        return False, "it does not link:\n" + said
    code, output = build.run_suite(program, mutant["ranks"], arguments)
    found = first_wrong_number(output)
    if found is not None:
        return True, found
    if code == 0:
        return False, "SURVIVED: every cell passed"
    return False, "no number was wrong, but:\n" + output[-2000:]


def check_unchanged(build, mutants):
    """Checks that the cells pass without a fault; otherwise their failing would say nothing."""
    for ranks, (suite, arguments) in sorted({(mutant["ranks"], suite_of(mutant))
                                             for mutant in mutants}):
        code, output = build.run_suite(os.path.join(build.folder, suite), ranks, arguments)
        if code != 0:
            sys.exit(f"fails without any mutant, on {ranks} ranks: {suite} {shlex.join(arguments)}\n"
                     f"{output[-2000:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--build", default=os.path.join(ROOT, "build/dev"),
                        help="a folder that the suites are built in")
    parser.add_argument("names", nargs="*", metavar="text",
                        help="only the mutants with one of these in their names or files")
    options = parser.parse_args()
    with open(os.path.join(HERE, "mutants.json"), encoding="utf-8") as file:
        mutants = json.load(file)
    if options.names:
        mutants = [mutant for mutant in mutants
                   if any(text in mutant["name"] or text in mutant["file"]
                          for text in options.names)]
    if not mutants:
        sys.exit(f"no mutant has {' or '.join(options.names)} in its name or its file")
    folder = os.path.abspath(options.build)
    scratch = os.path.join(os.path.dirname(folder), "mutants")
    os.makedirs(scratch, exist_ok=True)
    build = Build(folder, scratch)
    check_unchanged(build, mutants)
    print("| the fault | in | on | found by | s |\n|---|---|---|---|---|")
    not_found = []
    for mutant in mutants:
        start = time.monotonic()
        found, how = try_mutant(build, mutant)
        if not found:
            not_found.append((mutant, how))
        print(f"| {mutant['name']} | `{mutant['file']}` | {mutant['ranks']} ranks | "
              f"{how if found else '**nothing**'} | {time.monotonic() - start:.0f} |", flush=True)
    print(f"\n{len(mutants) - len(not_found)} of {len(mutants)} mutants were found")
    for mutant, how in not_found:
        print(f"\nNOT FOUND: {mutant['name']} ({mutant['file']})\n{how}")
    sys.exit(1 if not_found else 0)


if __name__ == "__main__":
    main()
