#include <lockstep/parallel/tensor/gather_log.h>

#include <lockstep/base/log.h>

namespace lockstep::tensor {

void GatherLog::add(const std::string& op, const std::string& source, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Count& count = counts_[{op, source}];
  ++count.calls;
  count.bytes += bytes;
  if (!std::exchange(said_[op], true) && speaks_)
    log::warn("{} needs all of what comes from '{}' and is cut over the ranks: {} bytes are put "
              "together on each of them, here and wherever it is called; gathers() has the sums",
              op, source, bytes);
}

std::vector<Gathered> GatherLog::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<Gathered> all;
  for (const auto& [names, count] : counts_)
    all.push_back({names.first, names.second, count.calls, count.bytes});
  return all;
}

void GatherLog::clear() {
  const std::lock_guard lock(mutex_);
  counts_.clear();
}

}  // namespace lockstep::tensor
