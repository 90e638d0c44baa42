// What `lockstep check` says about machines and jobs that are not here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <sstream>

#include <cli/torch/check/pairs.h>
#include <cli/torch/check/report.h>

namespace lockstep::cli::inspection {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

// Two hosts, two cores and a GPU for each rank, and nothing wrong.
Report healthy(int num_ranks = 4) {
  Report report;
  report.launcher = "lockstep run";
  report.asked_backend = "auto";
  report.backend = "shm+tcp";
  std::vector<Host> described;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::string host = rank < num_ranks / 2 ? "left" : "right";
    const int local = rank % (num_ranks / 2);
    report.ranks.push_back({.rank = rank,
                            .local_rank = local,
                            .host = host,
                            .host_id = host,
                            .cpus = {2 * local, 2 * local + 1},
                            .num_threads = 2,
                            .device = "cuda:" + std::to_string(local),
                            .device_name = "GPU",
                            .device_id = std::to_string(local),
                            .open_files = 30,
                            .open_files_limit = 1024});
    described.push_back(
        {.name = host,
         .id = host,
         .system = "Linux",
         .cpu = "CPU",
         .free_bytes = 64 * kGiB,
         .total_bytes = 128 * kGiB,
         .gpus = {"GPU", "GPU"},
         .num_gpu_files = 2,
         .gpu_pairs = {{.a = 0, .b = 1, .reach_each_other = true, .bandwidth_gbps = 300}},
         .torch_version = "2.0.0",
         .torch_has_cuda = true,
         .blas = "/usr/lib/openblas-pthread/libblas.so.3",
         .shared_memory_bytes = 64 * static_cast<std::int64_t>(kGiB),
         .tcp_buffer_bytes = 6 << 20});
  }
  report.hosts = merge_hosts(report.ranks, described);
  for (const char* name : {"shm", "tcp", "gloo"})
    report.backends.push_back({.name = name, .built = true, .works = {.yes = true}});
  for (const auto& [a, b] : choose_pairs(num_ranks)) {
    const bool near = report.ranks[static_cast<std::size_t>(a)].host ==
                      report.ranks[static_cast<std::size_t>(b)].host;
    report.pairs.push_back({.a = a,
                            .b = b,
                            .transport = near ? "shm" : "tcp",
                            .latency_us = near ? 1.0 : 30.0,
                            .bandwidth_gbps = near ? 8.0 : 1.2});
  }
  report.num_pairs = std::int64_t{num_ranks} * (num_ranks - 1) / 2;
  return report;
}

TEST(Judgement, HostsAreMergedFromTheirRanks) {
  const Report report = healthy();
  ASSERT_EQ(report.hosts.size(), 2u);
  EXPECT_EQ(report.hosts[1].ranks, (std::vector<int>{2, 3}));
  EXPECT_EQ(report.hosts[0].num_cores, 4);  // pinned ranks know two each
  std::vector<Host> limited = {report.hosts[0], report.hosts[0], report.hosts[1], report.hosts[1]};
  limited[0].cpu_quota = 2.5;
  for (Host& host : limited) host.ranks.clear();
  EXPECT_EQ(merge_hosts(report.ranks, limited)[0].num_cores, 2);
}

TEST(Judgement, NothingIsWrong) {
  EXPECT_THAT(find_problems(healthy()), IsEmpty());
  EXPECT_THAT(find_problems(healthy(16)), IsEmpty());
}

struct Fault {
  const char* says;
  bool prevents_training;
  std::function<void(Report&)> bring_about;
};

TEST(Judgement, EachFaultIsFound) {
  const std::vector<Fault> faults = {
      {"the backend shm does not work here: no memory", true,
       [](Report& r) {
         r.backends[0].works = {false, "no memory"};
       }},
      {"the backend gloo does not work here", true,
       [](Report& r) {
         r.backends[2].works = {false, "no interface"};
         r.asked_backend = "gloo";
       }},
      {"host left: 2 ranks share 1 GPU", true, [](Report& r) { r.ranks[1].device_id = "0"; }},
      {"host right: NVIDIA's driver shows 2 GPUs, but CUDA reaches none", true,
       [](Report& r) { r.hosts[1].gpus.clear(); }},
      {"host right: 2 GPUs are not used", false,
       [](Report& r) {
         r.hosts[1].gpus.clear();
         r.hosts[1].torch_has_cuda = false;
       }},
      {"host right: GPUs 0 and 1 do not reach each other's memory (11.5 GB/s)", false,
       [](Report& r) {
         r.hosts[1].gpu_pairs[0].reach_each_other = false;
         r.hosts[1].gpu_pairs[0].bandwidth_gbps = 11.54;
       }},
      {"host left: 2 ranks take turns on 1 core", false,
       [](Report& r) {
         r.hosts[0].num_cores = 1;
         r.ranks[0].num_threads = r.ranks[1].num_threads = 1;
       }},
      {"host left: 8 threads of 2 ranks compete for 4 cores: OMP_NUM_THREADS is not set", false,
       [](Report& r) {
         r.ranks[0].num_threads = r.ranks[1].num_threads = 4;
         r.ranks[0].threads_chosen = r.ranks[1].threads_chosen = false;
       }},
      {"host right has LibTorch 2.1.0, host left has 2.0.0", false,
       [](Report& r) { r.hosts[1].torch_version = "2.1.0"; }},
      {"reference BLAS (/usr/lib/blas/libblas.so.3.11.0)", false,
       [](Report& r) { r.hosts[0].blas = "/usr/lib/blas/libblas.so.3.11.0"; }},
      {"host left: 100 MiB of memory are free for 2 ranks", false,
       [](Report& r) { r.hosts[0].free_bytes = 100 << 20; }},
      {"host left: /dev/shm holds 64 MiB", false,
       [](Report& r) { r.hosts[0].shared_memory_bytes = 64 << 20; }},
      {"ranks 1 and 2 may open only 128 files", true,
       [](Report& r) { r.ranks[1].open_files_limit = r.ranks[2].open_files_limit = 128; }},
      {"rank 3 may lock only 64 KiB", false,
       [](Report& r) {
         r.hosts[1].infiniband = true;
         r.ranks[3].locked_memory_limit = 64 << 10;
       }},
      {"host right: a TCP connection may buffer only 208 KiB", false,
       [](Report& r) { r.hosts[1].tcp_buffer_bytes = 208 << 10; }},
      {"torchrun gives this job no secret", false,
       [](Report& r) {
         r.launcher = "torchrun";
         r.has_secret = false;
       }},
      {"ranks 0 and 3 are much slower together than others over tcp", false,
       [](Report& r) { r.pairs[2].bandwidth_gbps = 0.1; }},
      {"ranks 0 and 3 are much slower together than others over tcp", false,
       [](Report& r) { r.pairs[2].latency_us = 900; }},
  };
  for (const Fault& fault : faults) {
    Report report = healthy();
    fault.bring_about(report);
    const std::vector<Problem> problems = find_problems(report);
    ASSERT_EQ(problems.size(), 1u) << fault.says;
    EXPECT_THAT(problems[0].what, HasSubstr(fault.says));
    EXPECT_EQ(problems[0].prevents_training, fault.prevents_training) << fault.says;
    EXPECT_FALSE(problems[0].fix.empty());
  }
}

TEST(Judgement, WhatPreventsTrainingComesFirst) {
  Report report = healthy();
  report.hosts[0].free_bytes = 0;
  report.ranks[0].open_files_limit = 10;
  report.problems = find_problems(report);
  ASSERT_EQ(report.problems.size(), 2u);
  EXPECT_TRUE(report.problems[0].prevents_training);
  EXPECT_FALSE(report.can_train());
  report.problems.erase(report.problems.begin());
  EXPECT_TRUE(report.can_train());
}

TEST(Judgement, AnEngineNobodyAskedForMayBeBroken) {
  Report report = healthy();
  report.backends[2].works = {false, "no interface"};
  EXPECT_THAT(find_problems(report), IsEmpty());
}

TEST(Pairs, AllOfFewRanksAndASampleOfMany) {
  EXPECT_THAT(choose_pairs(1), IsEmpty());
  EXPECT_EQ(choose_pairs(2).size(), 1u);
  EXPECT_EQ(choose_pairs(16).size(), 120u);
  for (const int num_ranks : {17, 64, 128, 129, 1000, 5000}) {
    const auto pairs = choose_pairs(num_ranks);
    EXPECT_LE(pairs.size(), 256u) << num_ranks;
    EXPECT_EQ(std::set<RankPair>(pairs.begin(), pairs.end()).size(), pairs.size());
    std::set<int> met;
    for (const auto& [a, b] : pairs) {
      EXPECT_LT(a, b);
      EXPECT_GE(a, 0);
      EXPECT_LT(b, num_ranks);
      met.insert({a, b});
    }
    EXPECT_GE(met.size(), std::min<std::size_t>(static_cast<std::size_t>(num_ranks), 128u));
  }
}

TEST(Printing, FitsATerminalHoweverManyRanks) {
  for (const int num_ranks : {2, 4, 8, 9, 16, 17, 200}) {
    Report report = healthy(num_ranks);
    report.problems = find_problems(report);
    const std::string text = to_text(report, Style::plain);
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
      EXPECT_LE(
          std::count_if(line.begin(), line.end(), [](char byte) { return (byte & 0xC0) != 0x80; }),
          80)
          << line;
    EXPECT_EQ(text.find("of 19900 pairs") != std::string::npos, num_ranks == 200);
  }
}

TEST(Printing, ShowsPairsOfGpus) {
  Report report = healthy();
  report.hosts[0].gpus.push_back("GPU");
  report.hosts[0].gpu_pairs = {{.a = 0, .b = 1, .reach_each_other = true, .bandwidth_gbps = 300.4},
                               {.a = 0, .b = 2, .reach_each_other = false, .bandwidth_gbps = 11.54},
                               {.a = 1, .b = 2, .reach_each_other = true, .bandwidth_gbps = 21}};
  EXPECT_THAT(to_text(report, Style::plain), HasSubstr("    GPU      0      1      2\n"
                                                       "      0      -    yes     no\n"
                                                       "      1    300      -    yes\n"
                                                       "      2   11.5   21.0      -\n"));
  report.hosts[0].gpu_pairs.clear();
  EXPECT_THAT(to_text(report, Style::plain), ::testing::Not(HasSubstr("Between GPUs")));
}

}  // namespace
}  // namespace lockstep::cli::inspection
