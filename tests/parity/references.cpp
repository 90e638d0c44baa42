#include "references.h"

#include <cstring>
#include <span>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::parity {

namespace {

// A text, a number or a tensor's bytes after the other.
class Writer {
 public:
  void number(std::int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), 8); }
  void text(const std::string& text) {
    number(static_cast<std::int64_t>(text.size()));
    bytes_ += text;
  }
  void tensor(const at::Tensor& tensor) {
    number(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : -1);
    if (!tensor.defined()) return;
    number(tensor.dim());
    for (const std::int64_t size : tensor.sizes()) number(size);
    const at::Tensor values = tensor.cpu().contiguous();
    bytes_.append(static_cast<const char*>(values.data_ptr()), values.nbytes());
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string bytes) : bytes_(std::move(bytes)) {}

  bool at_end() const { return at_ == bytes_.size(); }
  std::int64_t number() {
    std::int64_t value = 0;
    take(&value, sizeof value);
    return value;
  }
  std::string text() {
    std::string text(static_cast<std::size_t>(number()), '\0');
    take(text.data(), text.size());
    return text;
  }
  at::Tensor tensor() {
    const std::int64_t type = number();
    if (type < 0) return {};
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(number()));
    for (std::int64_t& size : sizes) size = number();
    at::Tensor tensor = at::empty(sizes, static_cast<at::ScalarType>(type));
    take(tensor.data_ptr(), tensor.nbytes());
    return tensor;
  }

 private:
  void take(void* to, std::size_t count) {
    LOCKSTEP_CHECK(at_ + count <= bytes_.size());
    if (count > 0) std::memcpy(to, bytes_.data() + at_, count);
    at_ += count;
  }

  std::string bytes_;
  std::size_t at_ = 0;
};

// Returns the root's text on every rank.
std::string broadcast(comm::Communicator& group, const std::string& mine, int root,
                      c10::Device device) {
  const at::Tensor size =
      at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong).to(device);
  group.broadcast(size, root).wait();
  at::Tensor bytes = at::empty({size.cpu().item<std::int64_t>()}, at::kByte);
  if (bytes.numel() == 0) return {};
  if (group.rank() == root) std::memcpy(bytes.data_ptr(), mine.data(), mine.size());
  bytes = bytes.to(device);
  group.broadcast(bytes, root).wait();
  bytes = bytes.cpu();
  return {static_cast<const char*>(bytes.data_ptr()), bytes.nbytes()};
}

}  // namespace

void References::add(const std::string& key, std::function<Values()> compute) {
  if (values_.try_emplace(key).second) to_compute_.emplace_back(key, std::move(compute));
}

void References::compute(comm::Communicator& group, c10::Device device) {
  Writer mine;
  for (std::size_t i = 0; i < to_compute_.size(); ++i) {
    if (static_cast<int>(i) % group.size() != group.rank()) continue;
    const auto& [key, compute] = to_compute_[i];
    const Values values = compute();
    mine.text(key);
    mine.number(static_cast<std::int64_t>(values.size()));
    for (const auto& [name, tensor] : values) {
      mine.text(name);
      mine.tensor(tensor);
    }
  }
  for (int root = 0; root < group.size(); ++root) {
    Reader told(broadcast(group, mine.bytes(), root, device));
    while (!told.at_end()) {
      Values& values = values_.at(told.text());
      for (std::int64_t left = told.number(); left > 0; --left) {
        const std::string name = told.text();
        values[name] = told.tensor();
      }
    }
  }
  to_compute_.clear();
}

}  // namespace lockstep::parity
