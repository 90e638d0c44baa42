#include "peaks.h"

#include <optional>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/device/autocast.h>
#include <lockstep/device/live_bytes.h>
#include <lockstep/optim/clip.h>
#include <lockstep/optim/parameters.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>
#include <lockstep/plan/measured/trace_step.h>

#include "models.h"

namespace lockstep::plan::testing {

namespace {

using ranks::Cells;

constexpr double kTolerance = 0.05;
// With offload little memory stays on the GPU, and it may be up to 9 % more than the estimate.
constexpr double kToleranceOfOffload = 0.1;

// A model that one of the strategies spreads over ranks.
class Spread {
 public:
  Spread(torch::nn::Module& module, const Cells& cells, const MemoryOptions& options)
      : trained_(data_parallel::trained_parameters(module)), options_(options) {
    auto groups = optim::decay_groups(trained_, 0.1);
    using enum ShardingStrategy;
    if (options.strategy == NO_SHARD || options.strategy == SHARD_OPTIMIZER) {
      if (options.strategy == SHARD_OPTIMIZER)
        shards_ = std::make_unique<shard::OptimizerShards>(module, cells.group());
      replicas_ = std::make_unique<replicate::DistributedDataParallel>(module, cells.group());
      optimizer_ = shards_ ? shards_->make_optimizer(optim::AdamWOptions{}, std::move(groups))
                           : optim::make_optimizer(optim::AdamWOptions{}, std::move(groups));
      replicas_->exchange_each_pass(
          exchanges_each_pass(options.exchange_gradients, options.strategy));
      return;
    }
    const auto cut = options.strategy == SHARD_GRAD_OP ? shard::Cut::gradients
                                                       : shard::Cut::gradients_and_parameters;
    sharded_ = std::make_unique<shard::FullyShardedDataParallel>(
        module, groups_of(cells, options),
        shard::Options{.cut = cut,
                       .mixed_precision = precision_of(options),
                       .cpu_offload = offload_of(options),
                       .max_live_units = static_cast<std::size_t>(options.max_live_units)});
    optimizer_ = sharded_->make_optimizer(optim::AdamWOptions{}, std::move(groups));
    sharded_->exchange_each_pass(exchanges_each_pass(options.exchange_gradients, options.strategy));
  }

  void step(const std::function<at::Tensor()>& loss, std::int64_t accumulation) {
    optimizer_->zero_grad();
    for (std::int64_t pass = 1; pass < accumulation; ++pass) {
      const auto more = sharded_ ? sharded_->accumulate() : replicas_->accumulate();
      backward(computed(loss));
    }
    backward(computed(loss));
    if (sharded_)
      sharded_->clip_gradients(1.0);
    else
      optim::clip_gradients(trained_, 1.0);
    optimizer_->step(0.001);
  }

  // Memory that the ranks share, which LibTorch's allocators do not count.
  std::int64_t shared_bytes() const {
    if (options_.device == Device::gpu) return 0;
    if (sharded_) {
      const MemoryReport report = sharded_->memory_report();
      return report.parameters + report.gradients_on_their_way_peak;
    }
    return shards_ ? shards_->memory_report().parameters : 0;
  }

 private:
  using MemoryReport = data_parallel::MemoryReport;

  static shard::MixedPrecision precision_of(const MemoryOptions& options) {
    if (options.precision == Precision::fp32) return {};
    shard::MixedPrecision precision = {.param_dtype = at::kBFloat16};
    if (options.narrow_masters) precision.master_dtype = at::kBFloat16;
    precision.master_rounding.in_state = options.narrow_states;
    return precision;
  }

  static shard::CPUOffload offload_of(const MemoryOptions& options) {
    return {.offload_optimizer = options.offload != Offload::none,
            .offload_params = options.offload == Offload::optimizer_and_parameters};
  }

  // Computes as Trainer does: if parameters are whole, 16 bits on a GPU are autocast's.
  at::Tensor computed(const std::function<at::Tensor()>& loss) const {
    std::optional<device::Autocast> bf16;
    if (options_.precision != Precision::fp32 && options_.device == Device::gpu && !sharded_)
      bf16.emplace(at::kCUDA, at::kBFloat16);
    return loss();
  }

  static shard::Groups groups_of(const Cells& cells, const MemoryOptions& options) {
    const int size = options.ranks_per_copy;
    if (options.strategy != ShardingStrategy::HYBRID_SHARD || size == cells.num_ranks())
      return shard::shard_over(cells.group());
    return shard::shard_over(cells.group(),
                             cells.group()->split(cells.rank() / size, cells.rank(), "copy"),
                             cells.group()->split(cells.rank() % size, cells.rank(), "replicas"));
  }

  void backward(const at::Tensor& loss) {
    if (sharded_)
      sharded_->backward(loss, 1);
    else
      replicas_->backward(loss, 1);
  }

  std::vector<NamedTensor> trained_;
  MemoryOptions options_;
  std::unique_ptr<shard::OptimizerShards> shards_;
  std::unique_ptr<replicate::DistributedDataParallel> replicas_;
  std::unique_ptr<shard::FullyShardedDataParallel> sharded_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

std::int64_t measured_peak(const Cells& cells, const NamedSubject& subject,
                           const MemoryOptions& options) {
  const c10::Device where =
      options.device == Device::gpu ? c10::Device(at::kCUDA, 0) : c10::Device(at::kCPU);
  device::LiveBytes live(where);
  const Subject made = subject.make();
  made.module->to(where);
  Spread spread(*made.module, cells, options);
  live.reset_peak();
  for (int step = 0; step < 3; ++step) spread.step(made.loss, options.accumulation);
  return live.peak() + spread.shared_bytes();
}

void check_peak(Cells& cells, const NamedSubject& subject, const models::DescribedModel& model,
                MemoryOptions options) {
  options.num_ranks = cells.num_ranks();
  if (options.strategy == ShardingStrategy::HYBRID_SHARD)
    options.ranks_per_copy = cells.num_ranks() % 2 == 0 ? cells.num_ranks() / 2 : 1;
  cells.cell(
      fmt::format("{} with {} in {}, offload {}, {} live units, {} micro-batches{}{}", subject.name,
                  name_of(options.strategy), name_of(options.precision),
                  static_cast<int>(options.offload), options.max_live_units, options.accumulation,
                  options.exchange_gradients == ExchangeGradients::automatic
                      ? ""
                      : fmt::format(", exchanged after {}", name_of(options.exchange_gradients)),
                  options.narrow_states    ? ", nothing in fp32"
                  : options.narrow_masters ? ", no weights in fp32"
                                           : ""),
      [&] {
        const std::int64_t estimated = estimate_memory(model.sizes, model.trace, options).peak;
        const std::int64_t measured = measured_peak(cells, subject, options);
        const double off = static_cast<double>(estimated) / static_cast<double>(measured) - 1;
        const bool offloads = options.device == Device::gpu && options.offload != Offload::none;
        cells.expect(std::abs(off) <= (offloads ? kToleranceOfOffload : kTolerance),
                     fmt::format("estimated {} bytes, measured {}: {:+.1f} %", estimated, measured,
                                 100 * off));
      });
}

void check_strategies(Cells& cells, const NamedSubject& subject,
                      const models::DescribedModel& model, const MemoryOptions& options = {}) {
  for (const StrategyTraits& one : kStrategies) {
    MemoryOptions changed = options;
    changed.strategy = one.strategy;
    check_peak(cells, subject, model, changed);
  }
}

models::DescribedModel traced(const NamedSubject& subject) {
  const Subject made = subject.make();
  return {sizes_of(*made.module), trace_step(*made.module, made.loss)};
}

}  // namespace

void check_peaks(Cells& cells) {
  // The ranks share the cores of a host.
  at::set_num_threads(1);
  check_strategies(cells, mlp(), traced(mlp()));
  check_strategies(cells, gpt().subject(), gpt().described());
  // Other numbers of ranks only change the sizes of the parts.
  if (cells.num_ranks() != 2) return;
  check_strategies(cells, lstm(), traced(lstm()));
  check_strategies(cells, odd(), traced(odd()));
  check_strategies(cells, llama().subject(), llama().described());
  check_strategies(cells, qwen2().subject(), qwen2().described());

  LanguageSubject large_batch = gpt();
  large_batch.name = "GPT of a large batch";
  large_batch.step.micro_batch = 10;
  check_strategies(cells, large_batch.subject(), large_batch.described());
  LanguageSubject recomputed = large_batch;
  recomputed.name = "GPT, recomputed";
  recomputed.step.recomputed_blocks = 1;
  check_strategies(cells, recomputed.subject(), recomputed.described());
  LanguageSubject large_vocabulary = llama();
  large_vocabulary.name = "Llama of a large vocabulary";
  large_vocabulary.config.vocab_size = 6000;
  large_vocabulary.config.tie_embeddings = true;
  check_strategies(cells, large_vocabulary.subject(), large_vocabulary.described());

  for (const auto when :
       {ExchangeGradients::automatic, ExchangeGradients::each_pass, ExchangeGradients::last_pass})
    check_strategies(cells, mlp(), traced(mlp()), {.accumulation = 3, .exchange_gradients = when});
  for (const auto strategy : {ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::FULL_SHARD}) {
    MemoryOptions options{.strategy = strategy, .precision = Precision::bf16};
    check_peak(cells, gpt().subject(), gpt().described(), options);
    options.narrow_masters = true;
    check_peak(cells, gpt().subject(), gpt().described(), options);
    options.narrow_states = true;
    options.accumulation = 2;
    check_peak(cells, gpt().subject(), gpt().described(), options);
  }
  for (const std::int64_t live : {1, 3})
    check_peak(cells, gpt().subject(), gpt().described(),
               {.strategy = ShardingStrategy::FULL_SHARD, .max_live_units = live});
}

void check_peaks_on_gpu(Cells& cells) {
  for (const Precision precision : {Precision::fp32, Precision::bf16})
    for (LanguageSubject model : {gpt(), llama()}) {
      model.config.hidden_size = 512;
      model.config.intermediate_size = 2048;
      model.config.vocab_size = 4096;
      model.config.max_positions = model.step.sequence_length = 256;
      model.step.device = Device::gpu;
      model.step.precision = precision;
      const MemoryOptions options = {.precision = precision, .device = Device::gpu};
      // cuBLAS keeps memory for itself from its first product on.
      measured_peak(cells, model.subject(), options);
      check_strategies(cells, model.subject(), model.described(), options);
      for (const Offload offload : {Offload::optimizer, Offload::optimizer_and_parameters}) {
        MemoryOptions offloaded = options;
        offloaded.strategy = ShardingStrategy::FULL_SHARD;
        offloaded.offload = offload;
        check_peak(cells, model.subject(), model.described(), offloaded);
      }
    }
}

}  // namespace lockstep::plan::testing
