#include <lockstep/comm/open_groups.h>

#include <mutex>
#include <optional>
#include <vector>

namespace lockstep::comm {

namespace {

struct OpenGroups {
  std::mutex mutex;
  std::vector<std::weak_ptr<Communicator>> groups;
  std::optional<std::string> over;  // why new groups are aborted at once
};

// Never destroyed: static objects that end later may still hold groups.
OpenGroups& open_groups() {
  static auto* const all = new OpenGroups;
  return *all;
}

std::vector<std::shared_ptr<Communicator>> alive_groups(OpenGroups& all) {
  std::vector<std::shared_ptr<Communicator>> alive;
  for (const auto& one : all.groups)
    if (auto group = one.lock()) alive.push_back(std::move(group));
  return alive;
}

}  // namespace

void note_open_group(const std::shared_ptr<Communicator>& group) {
  OpenGroups& all = open_groups();
  std::optional<std::string> over;
  {
    const std::lock_guard lock(all.mutex);
    std::erase_if(all.groups, [](const auto& one) { return one.expired(); });
    all.groups.push_back(group);
    over = all.over;
  }
  if (over) group->abort(*over);
}

void abort_open_groups(const std::string& reason) {
  std::vector<std::shared_ptr<Communicator>> alive;
  {
    OpenGroups& all = open_groups();
    const std::lock_guard lock(all.mutex);
    all.over = reason;
    alive = alive_groups(all);
  }
  for (const auto& group : alive) group->abort(reason);
}

void check_device_results() {
  std::vector<std::shared_ptr<Communicator>> alive;
  {
    OpenGroups& all = open_groups();
    const std::lock_guard lock(all.mutex);
    alive = alive_groups(all);
  }
  for (const auto& group : alive) group->check_device_results();
}

void admit_groups() {
  OpenGroups& all = open_groups();
  const std::lock_guard lock(all.mutex);
  all.over.reset();
  all.groups.clear();
}

}  // namespace lockstep::comm
