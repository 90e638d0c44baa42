#include <lockstep/distributed/rank_messages.h>

#include <ATen/ATen.h>

namespace lockstep {

namespace {

// Memory of its own: a call that fails may leave it to others for a while.
at::Tensor copy_to(c10::Device device, const at::Tensor& host) {
  return host.to(device, host.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor bytes_in(std::string& text) {
  return at::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, at::kByte);
}

}  // namespace

RankMessages::RankMessages(std::shared_ptr<comm::Communicator> group, c10::Device device)
    : group_(std::move(group)), device_(device), wire_(comm::message_device(*group_, device)) {}

std::string RankMessages::broadcast(const std::string& text) const {
  const at::Tensor size =
      at::full({1}, static_cast<std::int64_t>(text.size()), at::dtype(at::kLong).device(wire_));
  group_->broadcast(size, 0).wait();
  std::string received(static_cast<std::size_t>(size.item<std::int64_t>()), '\0');
  if (is_first()) received = text;
  if (received.empty()) return received;
  const at::Tensor bytes = copy_to(wire_, bytes_in(received));
  group_->broadcast(bytes, 0).wait();
  bytes_in(received).copy_(bytes);
  return received;
}

std::vector<std::string> RankMessages::gather(const std::string& text) const {
  const auto lengths = at::empty({size()}, at::dtype(at::kLong).device(wire_));
  group_
      ->all_gather(lengths,
                   at::full({1}, static_cast<std::int64_t>(text.size()), lengths.options()))
      .wait();
  const at::Tensor sizes = lengths.cpu();
  std::vector<at::Tensor> bytes;
  for (int rank = 0; rank < size(); ++rank)
    bytes.push_back(
        at::empty({sizes[rank].item<std::int64_t>()}, at::dtype(at::kByte).device(wire_)));
  std::string mine = text;
  group_->all_gather(bytes, copy_to(wire_, bytes_in(mine))).wait();
  std::vector<std::string> texts;
  for (const at::Tensor& one : bytes) {
    std::string& received = texts.emplace_back(static_cast<std::size_t>(one.numel()), '\0');
    if (!received.empty()) bytes_in(received).copy_(one);
  }
  return texts;
}

std::vector<double> RankMessages::sum(std::vector<double> values) const {
  const at::Tensor host =
      at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kDouble);
  const at::Tensor totals = copy_to(wire_, host);
  group_->all_reduce(totals).wait();
  host.copy_(totals);
  return values;
}

std::vector<std::vector<std::int64_t>> RankMessages::deal(
    const std::vector<std::vector<std::int64_t>>& numbers) const {
  const auto options = at::dtype(at::kLong).device(wire_);
  std::vector<std::int64_t> lengths;
  std::vector<at::Tensor> sent;
  for (const std::vector<std::int64_t>& list : numbers) {
    lengths.push_back(static_cast<std::int64_t>(list.size()));
    sent.push_back(copy_to(wire_, at::tensor(list, at::kLong)));
  }
  const at::Tensor coming = at::empty({size()}, options);
  group_->all_to_all(coming, copy_to(wire_, at::tensor(lengths, at::kLong))).wait();
  const at::Tensor sizes = coming.cpu();
  std::vector<at::Tensor> received;
  for (int rank = 0; rank < size(); ++rank)
    received.push_back(at::empty({sizes[rank].item<std::int64_t>()}, options));
  group_->all_to_all(received, sent).wait();
  std::vector<std::vector<std::int64_t>> dealt;
  for (const at::Tensor& one : received) {
    const at::Tensor here = one.cpu();
    const auto* const first = static_cast<const std::int64_t*>(here.data_ptr());
    dealt.emplace_back(first, first + here.numel());
  }
  return dealt;
}

void RankMessages::exchange(const std::vector<comm::Transfer>& transfers) const {
  if (travels_from_host()) return group_->exchange(transfers).wait_on_host();
  std::vector<comm::Transfer> staged = transfers;
  for (comm::Transfer& one : staged) one.tensor = copy_to(wire_, one.tensor);
  group_->exchange(staged).wait_on_host();
  for (std::size_t i = 0; i < staged.size(); ++i)
    if (staged[i].direction == comm::Transfer::Direction::receive)
      transfers[i].tensor.copy_(staged[i].tensor);
}

}  // namespace lockstep
