#include <lockstep/data/data_loader.h>

#include <algorithm>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::data {

namespace {

constexpr int most_workers = 1024;
constexpr int most_prefetch = 1 << 16;

// The GPU that batches are pinned for, if any. Call this in the user's thread: the current GPU of a
// worker thread is GPU 0, which every rank would then initialise.
std::optional<c10::Device> pinned_for(const DataLoaderOptions& options) {
  if (options.device && options.device->is_cuda() && options.device->has_index())
    return options.device;
  if (!options.pin_memory && !(options.device && options.device->is_cuda())) return std::nullopt;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
}

StepCut cut_of(const DistributedSampler& sampler, const DataLoaderOptions& options) {
  const std::int64_t batch = sampler.global_batch_size(options.batch_size);
  return {.samples_per_step = options.samples_per_step > 0 ? options.samples_per_step : batch,
          .samples_per_batch = batch,
          .drop_last = options.drop_last};
}

void check(const Dataset& dataset, const DistributedSampler& sampler,
           const DataLoaderOptions& options) {
  if (dataset.size() != sampler.options().size)
    throw UsageError("a loader of a dataset of {} samples with a sampler over {}: make the sampler "
                     "with .size = dataset->size()",
                     dataset.size(), sampler.options().size);
  if (options.num_workers < 0 || options.num_workers > most_workers)
    throw UsageError("num_workers is {}: it must be 0 (load in place) to {}", options.num_workers,
                     most_workers);
  if (options.prefetch < 1 || options.prefetch > most_prefetch)
    throw UsageError("prefetch is {}: it must be 1 to {} batches a worker", options.prefetch,
                     most_prefetch);
  if (options.pin_memory && options.device && !options.device->is_cuda())
    throw UsageError("pin_memory is for batches that a GPU copies, but the device is {}: leave it "
                     "out",
                     options.device->str());
  const bool cuda = options.pin_memory || (options.device && options.device->is_cuda());
  if (cuda && !at::hasCUDA())
    throw UsageError("{} needs a GPU, and LibTorch sees none: leave it out",
                     options.pin_memory ? "pin_memory" : "a loader for a CUDA device");
  if (options.samples_per_step < 0)
    throw UsageError("a step of {} samples: there must be at least one", options.samples_per_step);
  const StepCut cut = cut_of(sampler, options);
  if (options.drop_last && sampler.num_positions() < cut.samples_per_step)
    throw UsageError(
        "with drop_last, {} samples are less than one step of {}, in {} batch{} of {} a rank on {} "
        "ranks: give more samples, a smaller batch, or no drop_last",
        sampler.num_positions(), cut.samples_per_step, cut.batches_per_step(),
        cut.batches_per_step() == 1 ? "" : "es", options.batch_size,
        sampler.options().num_replicas);
}

}  // namespace

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, DistributedSampler sampler,
                       const DataLoaderOptions& options)
    : dataset_(std::move(dataset)),
      sampler_(sampler),
      options_(options),
      cut_(cut_of(sampler_, options_)) {
  check(*dataset_, sampler_, options_);
  pinned_for_ = pinned_for(options_);
  start_at(0);
}

void DataLoader::set_epoch(std::int64_t epoch) {
  prefetcher_.reset();
  sampler_.set_epoch(epoch);
  start_at(0);
}

void DataLoader::load_state(const SamplerState& state) {
  prefetcher_.reset();
  start_at(sampler_.load_state(state));
}

void DataLoader::set_step(std::int64_t batch_size, std::int64_t samples_per_step) {
  const std::int64_t position = state().position;
  DataLoaderOptions options = options_;
  options.batch_size = batch_size;
  options.samples_per_step = samples_per_step;
  check(*dataset_, sampler_, options);
  prefetcher_.reset();
  options_ = options;
  cut_ = cut_of(sampler_, options_);
  start_at(position);
}

void DataLoader::start_at(std::int64_t position) {
  last_given_.reset();
  start_ = position;
  num_given_ = 0;
  end_ = position + cut_.num_used(sampler_.num_positions() - position);
}

std::int64_t DataLoader::num_batches() const {
  return cut_.num_batches(cut_.num_used(sampler_.num_positions()));
}

std::optional<Batch> DataLoader::next() {
  const auto called = Clock::now();
  std::optional<Batch> batch;
  Clock::duration waited{};
  try {
    batch = take();
    if (device_is_idle()) waited = Clock::now() - called;
    if (batch) put_on_device(*batch);
  } catch (...) {
    // The batch that failed is tried again, and the batches that were loaded ahead come after it.
    prefetcher_.reset();
    throw;
  }
  if (!batch) {
    prefetcher_.reset();
    last_given_.reset();
    return batch;
  }
  ++num_given_;
  note_step(waited);
  return batch;
}

std::optional<Batch> DataLoader::take() {
  const std::int64_t left = batches_left();
  if (left == 0) return std::nullopt;
  if (options_.num_workers == 0) return load(num_given_);
  if (!prefetcher_)
    prefetcher_ = std::make_unique<Prefetcher<Batch>>(
        [this, first = num_given_](std::int64_t k) { return load(first + k); }, left,
        options_.num_workers, std::int64_t{options_.num_workers} * options_.prefetch);
  return prefetcher_->take();
}

// A GPU may still be busy with earlier work.
bool DataLoader::device_is_idle() const {
  if (!options_.device || !options_.device->is_cuda()) return true;
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(*options_.device).query();
}

void DataLoader::put_on_device(Batch& batch) const {
  if (!options_.device) return;
  batch.input = batch.input.to(*options_.device, /*non_blocking=*/true);
  if (!batch.target.defined()) return;
  if (!options_.device->is_cpu()) batch.target_on_host = batch.target;
  batch.target = batch.target.to(*options_.device, /*non_blocking=*/true);
}

// Called by the workers, so it reads nothing that changes while they run.
Batch DataLoader::load(std::int64_t number) const {
  const c10::NoGradGuard no_grad;
  c10::OptionalDeviceGuard on_gpu;
  if (pinned_for_) on_gpu.reset_device(*pinned_for_);
  BatchShare share =
      sampler_.share_of(start_ + cut_.first_of(number), cut_.size_of(number, end_ - start_));
  Batch batch = load_samples(share);
  batch.rows = std::move(share.rows);
  batch.global_size = share.global_size;
  if (pinned_for_) {
    batch.input = batch.input.pin_memory();
    if (batch.target.defined()) batch.target = batch.target.pin_memory();
  }
  return batch;
}

Batch DataLoader::load_samples(const BatchShare& share) const {
  // Datasets need not make empty batches: an empty batch is a sample, cut to length 0.
  static constexpr std::int64_t any_sample[] = {0};
  const bool nothing = share.indices.empty();
  Batch batch = dataset_->batch_of_epoch(nothing ? std::span(any_sample) : std::span(share.indices),
                                         sampler_.epoch());
  const auto asked = static_cast<std::int64_t>(nothing ? 1 : share.indices.size());
  for (at::Tensor* const tensor : {&batch.input, &batch.target}) {
    if (tensor == &batch.target && !tensor->defined()) continue;
    if (!tensor->defined() || tensor->dim() == 0 || tensor->size(0) != asked)
      throw UsageError(
          "the dataset was asked for {} samples and gave {} of {}: samples lie along dim 0", asked,
          tensor == &batch.input ? "an input" : "a target",
          tensor->defined() ? fmt::format("shape [{}]", fmt::join(tensor->sizes(), ", "))
                            : "no tensor");
    if (nothing) *tensor = tensor->narrow(0, 0, 0);
  }
  return batch;
}

void DataLoader::note_step(Clock::duration waited) {
  const auto now = Clock::now();
  // The first batch of an epoch waits for the threads to start, and no step came before it.
  if (last_given_) starvation_.step(waited, now - *last_given_);
  last_given_ = now;
  if (!starvation_.should_warn()) return;
  log::warn(
      "loading data took {:.0f}% of the last steps' time, in which the device waited: {}",
      100 * starvation_.share(),
      options_.num_workers == 0
          ? std::string("set num_workers to 1 or more, so that batches are loaded ahead")
          : fmt::format("try more workers than {} (with cores for them), a dataset that does less "
                        "for each sample, or files on a faster disk",
                        options_.num_workers));
}

}  // namespace lockstep::data
