#include <lockstep/nn/layers/dropout.h>

#include <algorithm>
#include <array>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/device/parallel_pieces.h>
#include <lockstep/nn/kernels/cpu/random_kernels.h>
#include <lockstep/nn/layers/random.h>

namespace lockstep::nn {

namespace {

// A random word below this drops its element.
std::uint32_t threshold_of(double p) { return static_cast<std::uint32_t>(p * 0x1p32); }

float kept_value(double p) { return static_cast<float>(1.0 / (1.0 - p)); }

// The stretches of a sample's elements that are held: all of them, or those at the positions.
std::vector<mesh::Interval> elements_held(at::IntArrayRef sizes,
                                          const std::vector<mesh::Interval>& positions) {
  if (positions.empty()) return {{0, c10::multiply_integers(sizes.slice(1))}};
  const std::int64_t width = c10::multiply_integers(sizes.slice(2));
  std::vector<mesh::Interval> held;
  for (const auto& [begin, end] : positions) held.push_back({begin * width, end * width});
  return held;
}

// The number of samples that a thread takes at a time, some 65536 elements.
std::int64_t samples_at_a_time(std::int64_t count) {
  return std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, count));
}

// Computes Philox with tensors of 64-bit integers that hold 32 bits each, so a device needs no
// kernel of ours. Returns the words of `blocks` blocks of every sample: [samples, 4·blocks].
at::Tensor philox_words(const at::Tensor& rows, std::int64_t first, std::int64_t blocks,
                        std::uint64_t key) {
  constexpr std::int64_t kLow = 0xffffffff;
  const auto low = [](const at::Tensor& x) { return x.bitwise_and(kLow); };
  const auto high = [&](const at::Tensor& x) { return low(x.bitwise_right_shift(32)); };
  const auto counter =
      at::arange(first, first + blocks, rows.options()).unsqueeze(0).expand({rows.size(0), -1});
  const auto row = rows.unsqueeze(1).expand({-1, blocks});
  std::array<at::Tensor, 4> c = {low(counter), high(counter), low(row), high(row)};
  auto k0 = static_cast<std::uint32_t>(key);
  auto k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    // The products wrap around at 64 bits, as they do in Philox.
    const auto p0 = c[0] * std::int64_t{0xd2511f53};
    const auto p1 = c[2] * std::int64_t{0xcd9e8d57};
    c = {high(p1).bitwise_xor_(c[1]).bitwise_xor_(std::int64_t{k0}), low(p1),
         high(p0).bitwise_xor_(c[3]).bitwise_xor_(std::int64_t{k1}), low(p0)};
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return at::stack({c[0], c[1], c[2], c[3]}, 2).flatten(1);
}

// The positions as numbers that autograd can save: where each interval begins and ends.
std::vector<std::int64_t> ends_of(const std::vector<mesh::Interval>& positions) {
  std::vector<std::int64_t> ends;
  for (const auto& [begin, end] : positions) ends.insert(ends.end(), {begin, end});
  return ends;
}
std::vector<mesh::Interval> positions_from(const std::vector<std::int64_t>& ends) {
  std::vector<mesh::Interval> positions;
  for (std::size_t i = 0; i < ends.size(); i += 2) positions.push_back({ends[i], ends[i + 1]});
  return positions;
}

// Backward multiplies by the same mask, so it is the same function.
class DropoutFunction : public torch::autograd::Function<DropoutFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            std::vector<std::int64_t> rows, std::vector<std::int64_t> ends,
                            std::int64_t key, double p) {
    const auto mask = dropout_mask(x.sizes(), rows, static_cast<std::uint64_t>(key), p, x.device(),
                                   positions_from(ends));
    ctx->saved_data["rows"] = std::move(rows);
    ctx->saved_data["ends"] = std::move(ends);
    ctx->saved_data["key"] = key;
    ctx->saved_data["p"] = p;
    return x * mask.to(x.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    auto& saved = ctx->saved_data;
    return {DropoutFunction::apply(gradients.at(0), saved["rows"].toIntVector(),
                                   saved["ends"].toIntVector(), saved["key"].toInt(),
                                   saved["p"].toDouble()),
            {},
            {},
            {},
            {}};
  }
};

}  // namespace

at::Tensor dropout_mask(at::IntArrayRef sizes, const std::vector<std::int64_t>& rows,
                        std::uint64_t key, double p, const at::Device& device,
                        const std::vector<mesh::Interval>& positions) {
  LOCKSTEP_CHECK(!sizes.empty() && sizes[0] == static_cast<std::int64_t>(rows.size()));
  if (!device.is_cpu())
    return internal::dropout_mask_of_operators(sizes, rows, key, p, device, positions);
  const std::int64_t count = c10::multiply_integers(sizes.slice(1));
  const auto held = elements_held(sizes, positions);
  auto mask = at::empty(sizes, at::TensorOptions().dtype(at::kFloat));
  auto* out = mask.data_ptr<float>();
  device::parallel_pieces(
      sizes[0], samples_at_a_time(count), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          auto* to = out + i * count;
          for (const auto& elements : held) {
            mask_of_sample(key, static_cast<std::uint64_t>(rows[static_cast<std::size_t>(i)]),
                           elements.begin, elements.size(), threshold_of(p), kept_value(p), to);
            to += elements.size();
          }
        }
      });
  return mask;
}

at::Tensor internal::dropout_mask_of_operators(at::IntArrayRef sizes,
                                               const std::vector<std::int64_t>& rows,
                                               std::uint64_t key, double p,
                                               const at::Device& device,
                                               const std::vector<mesh::Interval>& positions) {
  const auto samples = device::on_device(rows, at::kLong, device);
  std::vector<at::Tensor> kept;
  for (const auto& elements : elements_held(sizes, positions)) {
    const auto first = elements.begin / 4;
    const auto words = philox_words(samples, first, (elements.end + 3) / 4 - first, key);
    kept.push_back(words.narrow(1, elements.begin - 4 * first, elements.size())
                       .ge(std::int64_t{threshold_of(p)}));
  }
  return at::cat(kept, 1).to(at::kFloat).mul_(kept_value(p)).view(sizes);
}

DropoutImpl::DropoutImpl(double p, std::string site, std::shared_ptr<const RandomState> state)
    : p_(p), site_(std::move(site)), state_(std::move(state)) {
  if (!(p >= 0.0 && p < 1.0))
    throw UsageError("dropout at '{}' is {}: give a probability of at least 0 and below 1", site_,
                     p);
}

at::Tensor DropoutImpl::forward(const at::Tensor& x) {
  if (!is_training() || p_ == 0.0) return x;
  const auto& rows = state_->rows;
  if (x.dim() == 0 || x.size(0) != static_cast<std::int64_t>(rows.size()))
    throw UsageError(
        "dropout at '{}' is given {} samples, but knows the places of {} in the whole batch: set "
        "the step and the rows of this batch before each forward",
        site_, x.dim() == 0 ? 0 : x.size(0), rows.size());
  const auto& positions = state_->positions;
  std::int64_t held = 0;
  for (const auto& interval : positions) held += interval.size();
  if (!positions.empty() && (x.dim() < 2 || x.size(1) != held))
    throw UsageError("dropout at '{}' is given {} positions, but knows the places of {} in the "
                     "sequence that ranks share: set the positions held before each forward",
                     site_, x.dim() < 2 ? 0 : x.size(1), held);
  const auto key = stream_key(state_->seed, site_, state_->step);
  return DropoutFunction::apply(x, rows, ends_of(positions), static_cast<std::int64_t>(key), p_);
}

}  // namespace lockstep::nn
