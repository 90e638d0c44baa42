#!/usr/bin/env python3
"""Trains the same language models on one GPU in PyTorch, eager and compiled, and with `lockstep
train`, whole and sharded on its one rank, in turns; GPT-2 also in plain torch::nn with our three lines.
Prints tokens/s and memory, in Markdown.

Each figure is the median over the rounds of a program's median step, without its first steps.
Memory is the most that nvidia-smi shows, minus the memory that was in use before.
"""
import argparse
import array
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading

import kernel_table

HERE = os.path.dirname(os.path.abspath(__file__))
WARM_UP = 5  # steps
MODELS = {
    "gpt2": ("GPT-2 124M, 64 × 1024 tokens",
             {"family": "gpt2", "hidden_size": 768, "num_layers": 12, "num_heads": 12,
              "vocab_size": 50304}, 64, 1024),
    "llama": ("Llama 0.95B, 8 × 4096 tokens",
              {"family": "llama", "hidden_size": 2048, "num_layers": 16, "num_heads": 16,
               "intermediate_size": 5632, "vocab_size": 32000}, 8, 4096),
}
PROGRAMS = {
    "eager": "PyTorch, eager",
    "compile": "PyTorch, torch.compile",
    "stage 0": "lockstep train",
    "stage 3": "lockstep train, ZeRO-3",
    "plain": "torch::nn, and three lines",
}


def memory_in_use():
    shown = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                           capture_output=True, text=True, check=True).stdout
    return int(shown.splitlines()[0])  # MiB


class PeakMemory:
    """The most memory that the GPU holds within the with-block, minus what it held before."""

    def __enter__(self):
        self.before = self.most = memory_in_use()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.done.wait(0.1):
            self.most = max(self.most, memory_in_use())

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.mib = self.most - self.before


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        sys.exit(f"failed with {done.returncode}: {' '.join(command)}\n{done.stdout[-2000:]}")
    return done.stdout


def pytorch_command(model, how, steps):
    return [sys.executable, os.path.join(HERE, "pytorch.py"), model, how, str(steps)]


def pytorch_steps(*job):
    lines = run(pytorch_command(*job))
    found = json.loads(lines.splitlines()[-1])
    return found["ms"], f"PyTorch {found['torch'].split('+')[0]}"


def write_tokens(path, vocabulary, count):
    draw = random.Random(1)
    array.array("H", (min(int(draw.paretovariate(0.5)), vocabulary - 1) for _ in range(count))
                ).tofile(open(path, "wb"))


def lockstep_command(launcher, folder, model, stage, steps):
    """`lockstep train` of a model, and the folder it writes to."""
    _, shape, batch, tokens = MODELS[model]
    data = os.path.join(folder, f"{model}.bin")
    if not os.path.exists(data):
        write_tokens(data, shape["vocab_size"], batch * tokens * 10)
    output = tempfile.mkdtemp(dir=folder)
    config = os.path.join(output, "config.json")
    with open(config, "w", encoding="utf-8") as file:
        json.dump({"model": shape,
                   "data": {"train": data, "sequence_length": tokens, "validation_fraction": 0},
                   "output": os.path.join(output, "run"), "train_batch_size": batch,
                   "max_steps": steps, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
                   "zero_optimization": {"stage": stage}, "steps_per_print": 1,
                   "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}},
                  file)
    return [launcher, "train", config], os.path.join(output, "run")


def lockstep_steps(*job):
    command, output = lockstep_command(*job)
    run(command)
    with open(os.path.join(output, "metrics.csv"), encoding="utf-8") as file:
        ends = [float(row["seconds"]) for row in csv.DictReader(file)]
    return [(end - begin) * 1e3 for begin, end in zip([0.0] + ends, ends)]


def plain_command(build, steps):
    return [os.path.join(build, "bench", "gpu_plain_gpt"), str(steps)]


def plain_steps(*job):
    return json.loads(run(plain_command(*job)))["ms"]


def profile(build, launcher, model, programs):
    """Prints where the time of a step goes."""
    library = os.path.abspath(os.path.join(build, "bench", "libgpu_kernel_times.so"))
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "eager": lambda steps: pytorch_command(model, "eager", steps),
            "compile": lambda steps: pytorch_command(model, "compile", steps),
            "stage 0": lambda steps: lockstep_command(launcher, folder, model, 0, steps)[0],
            "plain": lambda steps: plain_command(build, steps),
        }
        steps = {PROGRAMS[program]: kernel_table.of_a_step(commands[program], library, folder,
                                                           tunes=program == "compile")
                 for program in commands if program in programs}
    kernel_table.print_table(MODELS[model][0], steps)
    for label, kernels in steps.items():
        kernel_table.print_longest(label, kernels)


def programs_of(model, choices):
    asked_for = choices.programs.split(",")
    return [program for program in PROGRAMS
            if program in asked_for and (program != "plain" or model == "gpt2")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True, help="the folder of a build with CUDA")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25, help="of a program in a round")
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="by default %(default)s")
    parser.add_argument("--profile", action="store_true",
                        help="instead, where the time of a step goes, by CUPTI")
    choices = parser.parse_args()
    for program in choices.programs.split(","):
        if program not in PROGRAMS:
            parser.error(f"--programs: there is no {program}, but {', '.join(PROGRAMS)}")
    launcher = os.path.join(choices.build, "cli", "lockstep")
    name = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    print(name.splitlines()[0])
    if choices.profile:
        for model in choices.models.split(","):
            profile(choices.build, launcher, model, programs_of(model, choices))
        return
    for model in choices.models.split(","):
        title, _, batch, tokens = MODELS[model]
        programs = programs_of(model, choices)
        medians = {program: [] for program in programs}
        memory = {program: 0 for program in programs}
        version = "PyTorch"
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(choices.rounds):
                for program in programs:
                    with PeakMemory() as peak:
                        if program.startswith("stage"):
                            steps = lockstep_steps(launcher, folder, model, int(program[-1]),
                                                   choices.steps)
                        elif program == "plain":
                            steps = plain_steps(choices.build, choices.steps)
                        else:
                            steps, version = pytorch_steps(model, program, choices.steps)
                    medians[program].append(statistics.median(steps[WARM_UP:]))
                    memory[program] = max(memory[program], peak.mib)
        peers = [program for program in ("eager", "compile") if program in programs]
        best = min(statistics.median(medians[program]) for program in peers or programs)
        print(f"\n{title}, bf16\n\n| | ms a step | tokens/s | of PyTorch's best | memory |")
        print("|---|---|---|---|---|")
        for program in programs:
            label = PROGRAMS[program]
            step = statistics.median(medians[program])
            print(f"| {label.replace('PyTorch', version)} | {step:.1f} | "
                  f"{batch * tokens / step * 1e3:,.0f} | {best / step:.2f} | "
                  f"{memory[program] / 1024:.1f} GiB |", flush=True)


if __name__ == "__main__":
    main()
