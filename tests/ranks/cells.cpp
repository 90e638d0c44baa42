#include "cells.h"

#include <chrono>
#include <cstdio>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/world/join.h>

namespace lockstep::ranks {

void Cells::cell(const std::string& name, const std::function<void()>& body) {
  if (!runs(name)) return;
  current_ = name;
  ++num_cells_;
  const auto start = std::chrono::steady_clock::now();
  body();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (rank() == 0) std::printf("%.2f s [%s]\n", took.count(), name.c_str());
}

void Cells::expect(bool good, const std::string& otherwise) {
  if (good) return;
  ++num_failures_;
  std::printf("FAIL [%s] %s\n", current_.c_str(), otherwise.c_str());
}

void Cells::expect_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  if (!got.defined() || !wanted.defined())
    return expect(got.defined() == wanted.defined(),
                  fmt::format("{} is {}defined where {}defined is right", what,
                              got.defined() ? "" : "un", wanted.defined() ? "" : "un"));
  const at::Tensor here = got.cpu();
  const at::Tensor right = wanted.cpu();
  if (at::equal(here, right)) return;
  expect(false,
         fmt::format("{} is wrong by up to {}", what, (here - right).abs().max().item<double>()));
}

void Cells::expect_close(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  if (!got.defined() || !wanted.defined()) return expect_same(got, wanted, what);
  if (at::allclose(got, wanted, 1e-4, 1e-5)) return;
  expect(false,
         fmt::format("{} is off by up to {}", what, (got - wanted).abs().max().item<double>()));
}

void Cells::expect_usage_error(const std::function<void()>& body, const std::string& part) {
  try {
    body();
  } catch (const UsageError& error) {
    return expect(std::string(error.what()).find(part) != std::string::npos,
                  fmt::format("the error says '{}', without '{}'", error.what(), part));
  }
  expect(false, fmt::format("no UsageError that says '{}'", part));
}

int run_cells(const std::function<void(Cells&)>& table, const std::string& only) {
  return run_cells(comm::join_world({.timeout = milliseconds(60'000)}), table, only);
}

int run_cells(const std::shared_ptr<comm::Communicator>& group,
              const std::function<void(Cells&)>& table, const std::string& only) {
  at::set_num_threads(1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Cells cells(group, only);
  try {
    table(cells);
  } catch (const std::exception& error) {
    std::printf("FAIL [%s] threw %s\n", cells.current().c_str(), error.what());
    return 1;
  }
  if (cells.num_cells() == 0 && !only.empty()) {
    std::printf("FAIL no cell has '%s' in its name\n", only.c_str());
    return 1;
  }
  std::printf("%d cells, %d failures\n", cells.num_cells(), cells.num_failures());
  return cells.num_failures() == 0 ? 0 : 1;
}

}  // namespace lockstep::ranks
