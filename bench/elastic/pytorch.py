"""The job of lockstep.cpp in PyTorch: DistributedDataParallel, the main rank saves with torch.save,
synced and renamed, and all ranks load it when torchrun has started them anew. The arguments are the same."""
import os
import sys

import torch
from torch import nn

LAYERS, BATCH = 4, 32


def main():
    folder, steps, interval, width = sys.argv[1], *(int(number) for number in sys.argv[2:5])
    torch.set_num_threads(1)
    os.environ.setdefault("USE_LIBUV", "0")  # Debian's PyTorch is built without it
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    newest = os.path.join(folder, "checkpoint.pt")
    step = 0
    if os.path.exists(newest):
        state = torch.load(newest, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    log = open(os.path.join(folder, "steps"), "a", encoding="utf-8", buffering=1)
    inputs = torch.rand(BATCH, width)
    while step < steps:
        optimizer.zero_grad()
        (model(inputs).square().sum() / BATCH).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            log.write(f"{step}\n")
        if rank == 0 and step % interval == 0:
            with open(newest + ".part", "wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "step": step}, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(newest + ".part", newest)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


main()
