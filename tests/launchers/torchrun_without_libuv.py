"""Runs torchrun of a PyTorch that was built without libuv, for which the launcher's store asks by default."""
import functools
import importlib

import torch.distributed
from torch.distributed import run

PLACES = ("torch.distributed",
          "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
          "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
          "torch.distributed.elastic.rendezvous.static_tcp_rendezvous")

plain_store = functools.partial(torch.distributed.TCPStore, use_libuv=False)
for place in PLACES:
    module = importlib.import_module(place)
    if hasattr(module, "TCPStore"):
        module.TCPStore = plain_store
run.main()
