#include <lockstep/distributed/snapshot.h>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep {

std::int64_t room_in_block(const checkpoint::HeldPiece& piece) {
  return checkpoint::HostCopy::room_for(static_cast<std::int64_t>(piece.bytes()));
}

std::int64_t block_bytes(const std::vector<checkpoint::HeldPiece>& pieces) {
  std::int64_t bytes = 0;
  for (const checkpoint::HeldPiece& piece : pieces) bytes += room_in_block(piece);
  return bytes;
}

void Snapshot::clear() {
  own_block.reset();
  received_block.reset();
  order = 0;
  if (!is_abandoned) return;
  own = checkpoint::HostCopy();
  received = at::Tensor();
  is_abandoned = false;
}

std::vector<int> Snapshot::held_blocks() const {
  std::vector<int> held;
  if (own_block) held.push_back(*own_block);
  if (received_block && received_block != own_block) held.push_back(*received_block);
  return held;
}

std::span<const std::byte> Snapshot::block(std::int64_t number) const {
  const at::Tensor bytes = number == own_block ? own.bytes() : received;
  LOCKSTEP_CHECK(number == own_block || number == received_block, "block {} is not here", number);
  return {static_cast<const std::byte*>(bytes.data_ptr()), static_cast<std::size_t>(bytes.numel())};
}

std::string to_text(const Snapshot& snapshot) {
  auto blocks = nlohmann::json::array();
  for (const auto& pieces : *snapshot.blocks) blocks.push_back(checkpoint::to_text(pieces));
  return nlohmann::json{{"state", snapshot.state}, {"blocks", std::move(blocks)}}.dump();
}

}  // namespace lockstep
