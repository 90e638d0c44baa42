#include "ranks.h"

#include <atomic>
#include <thread>

#include <gtest/gtest.h>

namespace lockstep::comm::testing {

std::vector<std::shared_ptr<Endpoint>> make_endpoints(int n, const net::Secret& secret) {
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  for (int rank = 0; rank < n; ++rank)
    endpoints.push_back(std::make_shared<Endpoint>("127.0.0.1", secret));
  return endpoints;
}

std::vector<std::exception_ptr> try_ranks(int n, const RankSettings& settings,
                                          const std::function<void(Transport&)>& body) {
  static std::atomic<int> jobs{0};
  const std::string group_id = "test-" + std::to_string(++jobs);
  const auto endpoints = make_endpoints(n, net::Secret::random());
  std::vector<EndpointAddress> addresses;
  for (int rank = 0; rank < n; ++rank) {
    addresses.push_back(endpoints[static_cast<std::size_t>(rank)]->address());
    if (!settings.hosts.empty())
      addresses.back().host += std::to_string(settings.hosts[static_cast<std::size_t>(rank)]);
  }
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<std::size_t>(rank);
      try {
        const auto transport = connect_group(
            endpoints[at],
            {.group_id = group_id, .group_name = "test", .rank = rank, .addresses = addresses},
            settings.media, Deadline::after(settings.timeout));
        try {
          body(*transport);
        } catch (const CommError& error) {
          transport->tell(Notice::from(error, rank));
          throw;
        }
      } catch (...) {
        errors[at] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void run_ranks(int n, const RankSettings& settings, const std::function<void(Transport&)>& body) {
  const auto errors = try_ranks(n, settings, body);
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    if (!errors[rank]) continue;
    try {
      std::rethrow_exception(errors[rank]);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
  }
}

void expect_ended_by_rank_0(const std::vector<std::exception_ptr>& errors) {
  EXPECT_FALSE(errors[0]);
  ASSERT_TRUE(errors[1]);
  try {
    std::rethrow_exception(errors[1]);
  } catch (const CommError& error) {
    EXPECT_EQ(error.fault(), Fault::aborted) << error.what();
    EXPECT_EQ(error.ranks(), std::vector<int>{0}) << error.what();
  }
}

void begin_call(Transport& transport, Fingerprint fingerprint, milliseconds timeout) {
  transport.begin(fingerprint, Deadline::after(timeout));
}

}  // namespace lockstep::comm::testing
