#include <lockstep/parallel/replicate/bucket_plan.h>

#include <map>
#include <utility>

namespace lockstep::replicate {

std::vector<std::vector<std::size_t>> plan_buckets(std::span<const GradientSize> gradients,
                                                   std::span<const std::size_t> order,
                                                   const BucketLimits& limits) {
  struct Open {
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
  };
  std::vector<std::vector<std::size_t>> buckets;
  std::map<int, Open> open;  // by kind
  const auto close = [&](Open& bucket) {
    buckets.push_back(std::move(bucket.members));
    bucket = Open{};
  };
  for (const std::size_t index : order) {
    const GradientSize& gradient = gradients[index];
    const std::size_t limit = buckets.empty() ? limits.first_bytes : limits.bytes;
    Open& bucket = open[gradient.kind];
    if (!bucket.members.empty() && bucket.bytes + gradient.bytes > limit) close(bucket);
    bucket.members.push_back(index);
    bucket.bytes += gradient.bytes;
    if (bucket.bytes >= limit) close(bucket);
  }
  for (auto& [kind, bucket] : open)
    if (!bucket.members.empty()) close(bucket);
  return buckets;
}

}  // namespace lockstep::replicate
