"""PyTorch's distributed checkpoint (torch.distributed.checkpoint, before 2.0 under another name) on
the state of state.h. Each rank saves and loads its part along the first dim, as FSDP does.

Arguments: a folder, the rounds, cold or warm, and the model's width and layers. Run under
`lockstep run` or torchrun. Files are synced, as they are by default and in our program.
"""
import dataclasses
import json
import os
import shutil
import sys
import time

import torch
import torch.distributed as dist


def sharded_tensor_module():
    """PyTorch 1.13 was made before Python 3.11, which refuses an instance of a class with __eq__ and
    without __hash__ as a field's default: such classes get one."""
    plain = dataclasses.dataclass

    def hashable(cls=None, **options):
        if cls is None:
            return lambda cls: hashable(cls, **options)
        made = plain(cls, **options)
        if made.__hash__ is None:
            made.__hash__ = object.__hash__
        return made

    if torch.__version__.startswith("1."):
        dataclasses.dataclass = hashable
    try:
        from torch.distributed._shard import sharded_tensor
    finally:
        dataclasses.dataclass = plain
    return sharded_tensor


sharded_tensor = sharded_tensor_module()
from torch.distributed._shard.metadata import ShardMetadata

try:
    import torch.distributed.checkpoint as dcp
except ImportError:
    import torch.distributed._shard.checkpoint as dcp

VOCABULARY, POSITIONS = 16384, 1024


def parameters(width, layers):
    yield "wte.weight", (VOCABULARY, width)
    yield "wpe.weight", (POSITIONS, width)
    for layer in range(layers):
        for name, shape in (("ln_1", (width,)), ("attn.c_attn", (width, 3 * width)),
                            ("attn.c_proj", (width, width)), ("ln_2", (width,)),
                            ("mlp.c_fc", (width, 4 * width)), ("mlp.c_proj", (4 * width, width))):
            yield f"h.{layer}.{name}.weight", shape
            yield f"h.{layer}.{name}.bias", shape[-1:]
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


def part(shape, rank, ranks):
    rows = shape[0] // ranks
    offsets = [rank * rows] + [0] * (len(shape) - 1)
    sizes = [rows if rank < ranks - 1 else shape[0] - rank * rows, *shape[1:]]
    metadata = ShardMetadata(shard_offsets=offsets, shard_sizes=sizes,
                             placement=f"rank:{rank}/cpu")
    shard = sharded_tensor.Shard(tensor=torch.rand(sizes), metadata=metadata)
    return sharded_tensor.init_from_local_shards([shard], *shape)


def state(width, layers, rank, ranks):
    torch.manual_seed(1 + rank)
    return {kind + name: part(shape, rank, ranks)
            for kind in ("model/", "optimizer/exp_avg.", "optimizer/exp_avg_sq.")
            for name, shape in parameters(width, layers)}


def local(tensor):
    return tensor.local_shards()[0].tensor


def save(tensors, folder):
    if hasattr(dcp, "save"):
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))
    else:
        dcp.save_state_dict(tensors, dcp.FileSystemWriter(folder, single_file_per_rank=True))


def load(tensors, folder):
    if hasattr(dcp, "load"):
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))
    else:
        dcp.load_state_dict(tensors, dcp.FileSystemReader(folder))


def forget(folder):
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main():
    folder, rounds, cold = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "cold"
    width, layers = (int(number) for number in (sys.argv[4:6] or (512, 8)))
    torch.set_num_threads(1)
    os.environ.setdefault("USE_LIBUV", "0")  # Debian's PyTorch is built without it
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    saved, loaded = (state(width, layers, rank, ranks) for _ in range(2))
    seconds = {}

    def timed(what, work):
        dist.barrier()
        begin = time.perf_counter()
        work()
        dist.barrier()
        seconds.setdefault(what, []).append(time.perf_counter() - begin)

    place = os.path.join(folder, "pytorch")
    for _ in range(rounds):
        for tensor in loaded.values():
            local(tensor).zero_()
        timed("save", lambda: save(saved, place))
        timed("load", lambda: load(loaded, place))
        if cold:
            forget(place)
            timed("cold load", lambda: load(loaded, place))
        for name, tensor in saved.items():
            assert torch.equal(local(tensor), local(loaded[name])), name
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
        os.sync()
        dist.barrier()
    if rank == 0:
        size = sum(4 * tensor.metadata().size.numel() for tensor in saved.values())
        for what, times in seconds.items():
            print(json.dumps({"who": "pytorch", "torch": torch.__version__, "what": what,
                              "ranks": ranks, "bytes": size, "seconds": times}), flush=True)
    dist.destroy_process_group()


main()
