#include <cstdlib>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include <tests/ranks/job.h>

#include "../base/files.h"

namespace lockstep {
namespace {

TEST(TorchScript, TrainsAsInOneProcess) {
  const testing::TemporaryFolder folder;
  // Each job loads what the ones before it saved.
  for (const int num_ranks : {2, 4, 1})
    ranks::expect_cells_pass(num_ranks, {"--rank", folder.path().string()});
}

// Writes one file for each model.
constexpr const char* kExport = R"(
import sys, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8, bias=False)
    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + torch.nn.functional.gelu(self.fc(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.blocks[0].fc.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("scale", torch.full((8,), 0.5))
    def forward(self, x):
        x = self.embedding(x.unsqueeze(2))
        for block in self.blocks:
            x = block(x)
        x = self.lstm(x)[0]
        x = self.norm(x.transpose(1, 2)).mean(2)
        return self.head(self.dropout(x)) * self.scale + self.frozen

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
torch.jit.script(Net()).save(sys.argv[1] + "/script.pt")
traced = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))
torch.jit.trace(traced, torch.randn(3, 8)).save(sys.argv[1] + "/trace.pt")
)";

TEST(TorchScript, TrainsWhatPythonExports) {
  const std::string python = "/usr/bin/python3";
  if (std::system((python + " -c 'import torch' 2>/dev/null").c_str()) != 0)
    GTEST_SKIP() << "PyTorch is not installed for " << python;
  const testing::TemporaryFolder folder;
  const std::string program = (folder.path() / "export.py").string();
  std::ofstream(program) << kExport;
  ASSERT_EQ(std::system((python + " " + program + " " + folder.path().string()).c_str()), 0);
  for (const char* file : {"script.pt", "trace.pt"}) {
    SCOPED_TRACE(file);
    ranks::expect_cells_pass(2, {"--exported", (folder.path() / file).string()});
  }
}

}  // namespace
}  // namespace lockstep
