#include <lockstep/parallel/data_parallel/agreed_order.h>

#include <ATen/ATen.h>

namespace lockstep::data_parallel {

std::optional<std::vector<std::size_t>> agree_on_order(const std::vector<std::size_t>& mine,
                                                       bool counts, comm::Communicator& group) {
  const at::Tensor teacher = at::full({1}, counts ? group.rank() : group.size(), at::kInt);
  group.all_reduce(teacher, comm::ReduceOp::min).wait();
  const int root = teacher.item<std::int32_t>();
  if (root == group.size()) return {};
  const std::vector<std::int64_t> numbers(mine.begin(), mine.end());
  const at::Tensor order = at::tensor(numbers, at::kLong);
  group.broadcast(order, root).wait();
  const std::int64_t* const first = order.data_ptr<std::int64_t>();
  return std::vector<std::size_t>(first, first + order.numel());
}

}  // namespace lockstep::data_parallel
