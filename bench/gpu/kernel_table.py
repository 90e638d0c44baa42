"""Shows how much of a training step's time on the GPU each kind of kernel takes."""
import collections
import glob
import os
import re
import subprocess
import sys

# The first row that matches a kernel's name counts.
KINDS = [
    ("what torch.compile has fused", r"^triton_"),
    ("gradient norm, clipping, optimizer",
     r"optim::cuda|sum_blocks|add_segments|adam|multi_tensor|FusedOptimizer"),
    ("attention", r"fmha|flash|sdpa|attention|cudnn::fusion"),
    ("matrix products", r"gemm|cutlass|nvjet|xmma|cublas|splitk"),
    ("softmax, loss and their gradient",
     r"cross_entropy|softmax|nll_loss|losses_of_rows|gradients_of_rows"),
    ("layer norms, with our sums before them", r"norm|forward_rows|backward_rows|sum_columns|GammaBeta"),
    ("activation functions, turns by position", r"gelu|silu|turn_pairs|packs|::forward|::backward"),
    ("embeddings", r"embedding|indexSelect|gather_kernel|radix|segment_offsets|krn_partial|"
                   r"compute_grad_weight|sum_and_scatter|unique_by_key|scan"),
    ("biases and their gradients", r"add_bias|reduce_kernel"),
    ("casts, copies, sums, other operators", r""),
]


def run(command, library, folder):
    """{kernel: (nanoseconds, launches)} of a program and the processes that it starts."""
    times = os.path.join(folder, "kernel-times")
    for old in glob.glob(times + ".*"):
        os.remove(old)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "CUDA_INJECTION64_PATH": library, "KERNEL_TIMES": times},
                          check=False)
    kernels = {}
    for path in glob.glob(times + ".*"):
        with open(path, encoding="utf-8") as file:
            for line in file:
                nanoseconds, launches, name = line.rstrip("\n").split("\t")
                kernels[name] = (int(nanoseconds), int(launches))
    if done.returncode != 0 or not kernels:
        sys.exit(f"{len(kernels)} kernels seen, exit code {done.returncode}: {' '.join(command)}\n"
                 f"{done.stdout[-2000:]}")
    return kernels


def of_a_step(command_of, library, folder, tunes=False, few=6, more=16):
    """The same for one step: the difference between a run with many steps and a run with few. A
    program that `tunes` tries kernels in its first run, and keeps the results for later runs."""
    if tunes:
        run(command_of(few), library, folder)
    before, after = (run(command_of(steps), library, folder) for steps in (few, more))
    return {name: tuple((value - old) / (more - few)
                        for value, old in zip(values, before.get(name, (0, 0))))
            for name, values in after.items()}


def print_table(title, programs):
    """`programs`: {label: kernels of a step}."""
    spent = {label: collections.defaultdict(float) for label in programs}
    for label, kernels in programs.items():
        for name, (nanoseconds, _) in kernels.items():
            kind = next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
            spent[label][kind] += nanoseconds / 1e6
    print(f"\n{title}: milliseconds of kernels in a step\n\n| | {' | '.join(programs)} |")
    print("|---|" + "---|" * len(programs))
    for kind in sorted((kind for kind, _ in KINDS),
                       key=lambda kind: -max(times[kind] for times in spent.values())):
        print(f"| {kind} | {' | '.join(f'{times[kind]:.1f}' for times in spent.values())} |")
    print(f"| together | {' | '.join(f'{sum(times.values()):.1f}' for times in spent.values())} |")
    launches = (sum(count for _, count in kernels.values()) for kernels in programs.values())
    print(f"| launches | {' | '.join(f'{count:.0f}' for count in launches)} |", flush=True)


def print_longest(label, kernels, count=15):
    print(f"\n{label}, the longest kernels: milliseconds, launches")
    for name, (nanoseconds, launches) in sorted(kernels.items(), key=lambda one: -one[1][0])[:count]:
        print(f"{nanoseconds / 1e6:8.2f} {launches:6.0f}  {name[:150]}")
