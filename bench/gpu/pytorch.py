"""PyTorch's training step of a language model on one GPU, to compare `lockstep train` with.

Arguments: gpt2 or llama, eager or compile, and the number of steps. Weights in float32, the forward
pass under autocast to bfloat16, fused AdamW, gradients clipped. Prints a JSON object with the
milliseconds of each step.
"""
import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

SIZES = {
    "gpt2": {"width": 768, "layers": 12, "heads": 12, "inside": 3072, "vocabulary": 50304,
             "batch": 64, "tokens": 1024},
    "llama": {"width": 2048, "layers": 16, "heads": 16, "inside": 5632, "vocabulary": 32000,
              "batch": 8, "tokens": 4096},
}


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class GptBlock(nn.Module):
    def __init__(self, width, inside, heads, **_):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x, _):
        q, k, v = (heads_of(part, self.heads) for part in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


def turned(x, angles):
    cosines, sines = angles
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1).to(x.dtype)


class LlamaBlock(nn.Module):
    def __init__(self, width, inside, heads, **_):
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inside, bias=False) for _ in range(2))
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, x, angles):
        y = self.input_norm(x)
        q, k, v = (heads_of(layer(y), self.heads) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.post_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, family, width, layers, heads, vocabulary, tokens, **sizes):
        super().__init__()
        gpt = family == "gpt2"
        block = GptBlock if gpt else LlamaBlock
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(tokens, width) if gpt else None
        self.blocks = nn.ModuleList(block(width=width, heads=heads, **sizes)
                                    for _ in range(layers))
        self.norm = nn.LayerNorm(width) if gpt else nn.RMSNorm(width, 1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0, 0.02)
        if gpt:
            self.head.weight = self.wte.weight
        half = width // heads // 2
        angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x, (self.cosines, self.sines))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    family, how, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sizes = SIZES[family]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    model = Model(family, **sizes).cuda()
    run = torch.compile(model) if how == "compile" else model
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                                   {"params": others, "weight_decay": 0.0}], lr=3e-4, fused=True)
    tokens = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["tokens"] + 1)).cuda()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    milliseconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - begin) * 1e3)
    if not math.isfinite(value):
        sys.exit(f"the loss is {value}")
    print(json.dumps({"torch": torch.__version__, "ms": milliseconds}))


if __name__ == "__main__":
    main()
