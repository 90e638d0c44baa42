#include <algorithm>
#include <array>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/adamw/adam_step.h>
#include <lockstep/optim/elementwise_optimizer.h>
#include <lockstep/optim/kernels/block_codes.h>
#include <lockstep/optim/parallel_blocks.h>
#include <lockstep/optim/parts.h>

namespace lockstep::optim {

namespace {

constexpr std::size_t kMoments = 2;
constexpr std::array kMaps = {CodeMap::with_sign, CodeMap::without_sign};

// The place of a part among its parameter's blocks. Places are counted from the beginning of the
// block that holds the part's first element.
struct PartInBlocks {
  std::int64_t before = 0;  // elements of that block that are not in the part
  std::int64_t count = 0;
  bool shares_first = false, shares_last = false;  // with other ranks' parts

  static PartInBlocks of(std::int64_t elements_before, std::int64_t count, std::int64_t whole) {
    const std::int64_t end = elements_before + count;
    return {.before = elements_before % kCodeBlock,
            .count = count,
            .shares_first = count > 0 && elements_before % kCodeBlock != 0,
            .shares_last = count > 0 && end % kCodeBlock != 0 && end != whole};
  }

  std::int64_t end() const { return before + count; }
  std::int64_t num_blocks() const { return count == 0 ? 0 : (end() + kCodeBlock - 1) / kCodeBlock; }
  // The part's elements of a block.
  std::int64_t begin_of(std::int64_t block) const {
    return std::max<std::int64_t>(block * kCodeBlock - before, 0);
  }
  std::int64_t count_of(std::int64_t block) const {
    return std::min((block + 1) * kCodeBlock, end()) - before - begin_of(block);
  }

  enum class Sharing { none, first, last };
  Sharing sharing(std::int64_t block) const {
    if (block == 0 && shares_first) return Sharing::first;
    if (block == num_blocks() - 1 && shares_last) return Sharing::last;
    return Sharing::none;
  }
};

// Both moments of a parameter's part: codes and scales.
struct Moments {
  explicit Moments(const std::vector<at::Tensor>& state) {
    for (std::size_t i = 0; i < kMoments; ++i) {
      codes[i] = state.at(i).data_ptr<std::uint8_t>();
      scales[i] = state.at(kMoments + i).data_ptr<float>();
    }
  }

  std::array<std::uint8_t*, kMoments> codes;  // of each element
  std::array<float*, kMoments> scales;        // of each block
};

using BlockValues = std::array<std::array<float, kCodeBlock>, kMoments>;

// New moments of a part's blocks become codes: at once in blocks that are whole here, and together
// with the other ranks in those that a cut goes through.
class Encoder {
 public:
  Encoder(std::string_view name, const PartInBlocks& part, Moments moments)
      : name_(name), part_(part), moments_(moments) {}

  const PartInBlocks& part() const { return part_; }
  const Moments& moments() const { return moments_; }

  // Several threads call it, each for other blocks.
  void take(std::int64_t block, const BlockValues& values) {
    switch (part_.sharing(block)) {
      case PartInBlocks::Sharing::first: first_ = values; return;
      case PartInBlocks::Sharing::last: last_ = values; return;
      case PartInBlocks::Sharing::none: break;
    }
    const std::int64_t count = part_.count_of(block);
    for (std::size_t i = 0; i < kMoments; ++i)
      encode_block(i, block, values, scale_of(values[i].data(), count));
  }

  BlockEdges edges() const {
    BlockEdges edges{.name = std::string(name_),
                     .first = std::vector<float>(kMoments),
                     .last = std::vector<float>(kMoments)};
    for (std::size_t i = 0; i < kMoments; ++i) {
      if (part_.shares_first) edges.first[i] = scale_of(first_[i].data(), part_.count_of(0));
      if (has_last())
        edges.last[i] = scale_of(last_[i].data(), part_.count_of(part_.num_blocks() - 1));
    }
    return edges;
  }
  void finish(const BlockEdges& joined) {
    for (std::size_t i = 0; i < kMoments; ++i) {
      if (part_.shares_first) encode_block(i, 0, first_, joined.first[i]);
      if (has_last()) encode_block(i, part_.num_blocks() - 1, last_, joined.last[i]);
    }
  }

 private:
  bool has_last() const {
    return part_.shares_last &&
           part_.sharing(part_.num_blocks() - 1) == PartInBlocks::Sharing::last;
  }
  void encode_block(std::size_t moment, std::int64_t block, const BlockValues& values,
                    float scale) {
    moments_.scales[moment][block] =
        encode(kMaps[moment], values[moment].data(), part_.count_of(block), scale,
               moments_.codes[moment] + part_.begin_of(block));
  }

  std::string_view name_;
  PartInBlocks part_;
  Moments moments_;
  BlockValues first_ = {}, last_ = {};
};

// State: the codes of exp_avg and exp_avg_sq, [elements], and their scales, [blocks].
std::vector<at::Tensor> empty_moments(const at::Tensor& parameter, std::int64_t elements_before) {
  if (!parameter.device().is_cpu())
    throw UsageError(
        "moments of 8 bits are computed on the CPU, and a parameter is on {}: take "
        "stage 2 or 3 and offload the optimizer (zero_optimization.offload_optimizer), "
        "or take AdamW",
        parameter.device().str());
  // Whether others share its blocks does not change their number.
  const auto part = PartInBlocks::of(elements_before, parameter.numel(), 0);
  std::vector<at::Tensor> state;
  for (const CodeMap map : kMaps)
    state.push_back(at::full(parameter.sizes(), code_of_zero(map), at::kByte));
  for (std::size_t i = 0; i < kMoments; ++i)
    state.push_back(at::zeros({part.num_blocks()}, at::kFloat));
  return state;
}

class AdamW8bit final : public StatefulOptimizer {
 public:
  AdamW8bit(std::vector<ParameterGroup> groups, const AdamWOptions& options,
            std::shared_ptr<Parts> parts)
      : StatefulOptimizer(std::move(groups), options.state_names(), NarrowWeights::refused,
                          empty_moments),
        options_(options),
        parts_(parts != nullptr ? std::move(parts) : std::make_shared<WholeParts>()) {}

 private:
  Encoder encoder_of(const HeldState& held) const {
    std::int64_t whole = 1;
    for (const std::int64_t size : parts_->whole_shape(std::string(held.name), held.parameter))
      whole *= size;
    return {held.name, PartInBlocks::of(held.elements_before, held.parameter.numel(), whole),
            Moments(*held.state)};
  }

  // Calls work(i, block) for each block of each encoder, and then encodes what is shared.
  template <typename Work>
  void encode_all(std::vector<Encoder>& encoders, const Work& work) const {
    std::vector<std::int64_t> counts;
    for (const Encoder& one : encoders) counts.push_back(one.part().num_blocks() * kCodeBlock);
    static_assert(kUpdateBlock % kCodeBlock == 0);
    parallel_blocks(counts, kUpdateBlock, [&](const Block& several) {
      for (std::int64_t at = several.begin; at < several.begin + several.count; at += kCodeBlock)
        work(several.range, at / kCodeBlock);
    });
    std::vector<BlockEdges> edges;
    for (const Encoder& one : encoders) edges.push_back(one.edges());
    parts_->join_blocks(kCodeBlock, edges);
    for (std::size_t i = 0; i < encoders.size(); ++i) encoders[i].finish(edges[i]);
  }

  static void decode_block(const Encoder& from, std::int64_t block, BlockValues& values) {
    for (std::size_t i = 0; i < kMoments; ++i)
      decode(kMaps[i], from.moments().codes[i] + from.part().begin_of(block),
             from.part().count_of(block), from.moments().scales[i][block], values[i].data());
  }

  template <typename T>
  static void update(const AdamStep<T>& numbers, const ParameterStep& step, std::int64_t begin,
                     std::int64_t count, BlockValues& moments) {
    T* const weight = step.weight.data_ptr<T>() + begin;
    const T* const gradient = step.gradient.data_ptr<T>() + begin;
    if constexpr (std::is_same_v<T, float>) {
      adam_update(numbers, count, weight, gradient, moments[0].data(), moments[1].data());
    } else {
      std::array<std::array<T, kCodeBlock>, kMoments> wide;
      for (std::size_t i = 0; i < kMoments; ++i)
        std::copy_n(moments[i].begin(), count, wide[i].begin());
      adam_update(numbers, count, weight, gradient, wide[0].data(), wide[1].data());
      for (std::size_t i = 0; i < kMoments; ++i)
        std::transform(wide[i].begin(), wide[i].begin() + count, moments[i].begin(),
                       [](T value) { return static_cast<float>(value); });
    }
  }

  void move(const std::vector<ParameterStep>& steps, const StepFactor& /*factor*/) override {
    std::vector<Encoder> encoders;
    std::vector<AdamStep<double>> numbers;
    for (const ParameterStep& step : steps) {
      encoders.push_back(encoder_of({.name = step.name,
                                     .parameter = step.weight,
                                     .elements_before = step.numbers.elements_before,
                                     .state = step.state}));
      numbers.push_back(step_of(options_, step.numbers));
    }
    encode_all(encoders, [&](std::size_t i, std::int64_t block) {
      const PartInBlocks& part = encoders[i].part();
      BlockValues moments;
      decode_block(encoders[i], block, moments);
      if (steps[i].weight.scalar_type() == at::kFloat)
        update(rounded<float>(numbers[i]), steps[i], part.begin_of(block), part.count_of(block),
               moments);
      else
        update(numbers[i], steps[i], part.begin_of(block), part.count_of(block), moments);
      encoders[i].take(block, moments);
    });
  }

  std::vector<at::Tensor> saved_state(const HeldState& held) const override {
    const Encoder from = encoder_of(held);
    std::vector<at::Tensor> saved;
    for (std::size_t i = 0; i < kMoments; ++i)
      saved.push_back(at::empty(held.parameter.sizes(), at::kFloat));
    for (std::int64_t block = 0; block < from.part().num_blocks(); ++block) {
      BlockValues values;
      decode_block(from, block, values);
      for (std::size_t i = 0; i < kMoments; ++i)
        std::copy_n(values[i].begin(), from.part().count_of(block),
                    saved[i].data_ptr<float>() + from.part().begin_of(block));
    }
    return saved;
  }

  void take_saved(const std::vector<HeldState>& held,
                  const std::vector<std::vector<at::Tensor>>& saved) override {
    std::vector<Encoder> encoders;
    std::vector<std::array<at::Tensor, kMoments>> values;
    for (std::size_t p = 0; p < held.size(); ++p) {
      encoders.push_back(encoder_of(held[p]));
      auto& of_parameter = values.emplace_back();
      for (std::size_t i = 0; i < kMoments; ++i)
        of_parameter[i] = saved[p][i].to(at::kCPU, at::kFloat).contiguous();
    }
    encode_all(encoders, [&](std::size_t p, std::int64_t block) {
      const PartInBlocks& part = encoders[p].part();
      BlockValues moments;
      for (std::size_t i = 0; i < kMoments; ++i)
        std::copy_n(values[p][i].data_ptr<float>() + part.begin_of(block), part.count_of(block),
                    moments[i].begin());
      encoders[p].take(block, moments);
    });
  }

  AdamWOptions options_;
  std::shared_ptr<Parts> parts_;
};

}  // namespace

std::unique_ptr<Optimizer> AdamW8bitOptions::make(std::vector<ParameterGroup> groups,
                                                  std::shared_ptr<Parts> parts) const {
  return std::make_unique<AdamW8bit>(std::move(groups), *this, std::move(parts));
}

}  // namespace lockstep::optim
