"""The GPT and the step of job.h in Python's PyTorch: alone, under DistributedDataParallel, or sharded by
FSDP2 (fully_shard) with a unit for each block, if this PyTorch has it.

Arguments: plain, ddp or fsdp, the steps to time, and those of the warm-up. Run under `lockstep run`
or torchrun. PyTorch uses all that makes this fast: gradients as views of buckets, and its fused attention
and fused AdamW if they exist.
"""
import json
import math
import os
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS, BATCH = 512, 384, 6, 6, 256, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.fused = hasattr(F, "scaled_dot_product_attention")
        if not self.fused:
            # This is no buffer, because DistributedDataParallel would send a buffer with every step.
            self.hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def forward(self, x):
        q, k, v = (part.view(*part.shape[:2], HEADS, -1).transpose(1, 2)
                   for part in self.c_attn(x).split(WIDTH, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            y = F.softmax(scores.masked_fill(self.hidden, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(TOKENS, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln_f = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        logits = F.linear(self.ln_f(self.h(x)), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def adamw(parameters):
    choices = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    parameters = list(parameters)
    try:
        return torch.optim.AdamW(parameters, fused=True, **choices)
    except (RuntimeError, TypeError):  # not on a CPU before PyTorch 2.4
        return torch.optim.AdamW(parameters, **choices)


def fully_sharded(model, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def cpu_milliseconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) * 1e3


def main():
    what = sys.argv[1] if len(sys.argv) > 1 else "ddp"
    timed = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    warm_up = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Gpt()
    if what != "plain":
        os.environ.setdefault("USE_LIBUV", "0")  # Debian's PyTorch is built without it
        torch.distributed.init_process_group("gloo")
    if what == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if what == "fsdp":
        model = fully_sharded(model, ranks)
    optimizer = adamw(model.parameters())
    torch.manual_seed(1 + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    row = {"who": f"pytorch_{what}", "rank": rank, "ranks": ranks, "torch": torch.__version__,
           "ms": [], "cpu_ms": [], "forward_ms": [], "backward_ms": [], "update_ms": []}
    for step in range(warm_up + timed):
        cpu = cpu_milliseconds()
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, targets)
        after_forward = time.perf_counter()
        loss.backward()
        after_backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        cpu = cpu_milliseconds() - cpu
        if step < warm_up:
            continue
        row["ms"].append((end - begin) * 1e3)
        row["cpu_ms"].append(cpu)
        row["forward_ms"].append((after_forward - begin) * 1e3)
        row["backward_ms"].append((after_backward - after_forward) * 1e3)
        row["update_ms"].append((end - after_backward) * 1e3)
    row["loss"] = loss.item()
    print(json.dumps(row), flush=True)
    if what != "plain":
        torch.distributed.destroy_process_group()


main()
