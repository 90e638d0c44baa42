"""Prints the folder of TorchConfig.cmake inside an installed Python torch, or nothing.

Debian's python3-torch has none: its LibTorch is the system's. Torch is found and not imported, which
would take seconds. A LibTorch with the old libstdc++ ABI cannot be linked with the system's
libraries, so it does not count.
"""

import importlib.util
import pathlib

spec = importlib.util.find_spec("torch")
for location in (spec.submodule_search_locations if spec else None) or []:
    folder = pathlib.Path(location, "share", "cmake", "Torch")
    config = folder / "TorchConfig.cmake"
    if config.is_file() and "_GLIBCXX_USE_CXX11_ABI=0" not in config.read_text():
        print(folder.resolve())
        break
