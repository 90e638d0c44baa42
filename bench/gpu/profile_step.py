"""Where the GPU's time of one training step goes: the kernels that Nsight Compute saw, by what they are for."""
import collections
import csv
import io
import re
import shutil
import subprocess
import sys

# The first that a kernel's name fits.
KINDS = [
    ("gradient norm, clipping, optimizer", r"optim::cuda|sum_blocks|add_segments|adam|multi_tensor"),
    ("attention", r"fmha|flash|sdpa|attention"),
    ("matrix products", r"gemm|cutlass|nvjet|xmma|cublas|splitk"),
    ("softmax, loss and their gradient", r"cross_entropy|softmax|nll_loss"),
    ("norms, with the sums before them", r"norm|forward_rows|backward_rows|sum_columns"),
    ("activation functions, positions", r"gelu|silu|turn_pairs|packs|::forward|::backward"),
    ("embeddings", r"embedding|indexSelect|radix|segment_offsets|krn_partial"),
    ("sums over rows (gradients of biases)", r"reduce"),
    ("casts, copies, fills, other operators", r""),
]
METRIC = "gpu__time_duration.sum"
# It runs twice in a step, before the optimizer.
END_OF_STEP = "add_segments"


def kernels_of(command, skip, count):
    """(name, microseconds) of `count` launches after the first `skip`."""
    if shutil.which("ncu") is None:
        sys.exit("a profile needs NVIDIA's Nsight Compute: ncu is not in PATH")
    done = subprocess.run(["ncu", "--target-processes", "all", "--metrics", METRIC, "--csv",
                           "--page", "raw", "--launch-skip", str(skip), "--launch-count",
                           str(count), *command], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if len(rows) < 2:
        sys.exit(f"ncu has seen no kernel:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    unit = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "nsecond": 1e-3, "usecond": 1.0,
            "msecond": 1e3}[rows[0][METRIC]]  # the first row has the units
    return [(row["Kernel Name"], float(row[METRIC].replace(",", "")) * unit) for row in rows[1:]]


def one_step(kernels):
    ends = [i for i, (name, _) in enumerate(kernels) if END_OF_STEP in name]
    if len(ends) < 4:
        sys.exit(f"{len(kernels)} kernels hold no whole step")
    return kernels[ends[1] + 1:ends[3] + 1]


def print_table(title, kernels):
    spent = collections.defaultdict(float)
    launches = collections.Counter()
    for name, microseconds in kernels:
        kind = next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
        spent[kind] += microseconds
        launches[kind] += 1
    total = sum(spent.values())
    print(f"\n{title}: {total / 1e3:.1f} ms of kernels in {len(kernels)} launches\n")
    print("| | ms | share | launches |\n|---|---|---|---|")
    for kind, _ in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"| {kind} | {spent[kind] / 1e3:.1f} | {spent[kind] / total:.1%} | {launches[kind]} |")
    longest = collections.defaultdict(float)
    for name, microseconds in kernels:
        longest[name[:90]] += microseconds
    for name, microseconds in sorted(longest.items(), key=lambda item: -item[1])[:12]:
        print(f"    {microseconds / 1e3:7.2f} ms  {name}")
