// How a trainer measures its model, and what comes out of it.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/log.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train {

namespace {

// What a rank has of the outputs: which samples they are of, and their type and shape.
struct Part {
  at::Tensor values;                 // [samples, …], on the host
  std::vector<std::int64_t> places;  // of the samples in the data set
  bool counts = false;               // no other rank of the same share of the data tells the same

  std::string form() const {
    std::string sizes;
    for (const std::int64_t size : values.sizes().slice(1)) sizes += fmt::format(", {}", size);
    return fmt::format("{} of shape [samples{}]", c10::toString(values.scalar_type()), sizes);
  }
};

// The memory, as the bytes that ranks send.
at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.view(-1).view(at::kByte); }

// Puts the parts of all ranks together on the first one.
at::Tensor gathered(const Part& mine, std::int64_t num_samples, const RankMessages& ranks) {
  const std::vector<std::string> forms = ranks.gather(mine.form());
  for (const std::string& form : forms)
    if (form != forms.front())
      throw UsageError("the outputs of ranks do not fit together: rank 0 has {}, rank {} {}",
                       forms.front(), std::ranges::find(forms, form) - forms.begin(), form);
  std::vector<std::int64_t> sizes;
  for (const std::string& size : ranks.gather(std::to_string(mine.counts ? mine.places.size() : 0)))
    sizes.push_back(std::stoll(size));

  const auto places_of = [](std::int64_t size) { return at::empty({size}, at::kLong); };
  at::Tensor places = places_of(static_cast<std::int64_t>(mine.places.size()));
  std::ranges::copy(mine.places, places.data_ptr<std::int64_t>());
  if (!ranks.is_first()) {
    if (sizes[static_cast<std::size_t>(ranks.rank())] > 0)
      ranks.exchange({comm::send_to(0, bytes_of(places)), comm::send_to(0, bytes_of(mine.values))});
    return {};
  }
  std::vector<std::int64_t> shape = mine.values.sizes().vec();
  shape.front() = num_samples;
  const at::Tensor whole = at::empty(shape, mine.values.options());
  whole.index_copy_(0, places, mine.values);
  for (int rank = 1; rank < ranks.size(); ++rank) {
    shape.front() = sizes[static_cast<std::size_t>(rank)];
    if (shape.front() == 0) continue;
    places = places_of(shape.front());
    const at::Tensor values = at::empty(shape, mine.values.options());
    ranks.exchange(
        {comm::receive_from(rank, bytes_of(places)), comm::receive_from(rank, bytes_of(values))});
    whole.index_copy_(0, places, values);
  }
  return whole;
}

// Gives the first rank's tensor to all.
at::Tensor on_all_ranks(at::Tensor whole, const Part& mine, std::int64_t num_samples,
                        const RankMessages& ranks) {
  std::vector<std::int64_t> shape = mine.values.sizes().vec();
  shape.front() = num_samples;
  if (!ranks.is_first()) whole = at::empty(shape, mine.values.options());
  if (whole.numel() > 0) ranks.group()->broadcast(bytes_of(whole), 0).wait_on_host();
  return whole;
}

}  // namespace

std::unique_ptr<data::DataLoader> Trainer::load_data(const Dataset& dataset, Samples order) const {
  const bool trains = order == Samples::in_training_order;
  return std::make_unique<data::DataLoader>(
      dataset,
      data::DistributedSampler({.size = dataset->size(),
                                .num_replicas = dist_.data_size(),
                                .rank = dist_.data_rank(),
                                .shuffle = trains && options_.shuffle,
                                .seed = options_.seed}),
      data::DataLoaderOptions{.batch_size = batch_.micro,
                              .num_workers = options_.num_workers,
                              .prefetch = options_.prefetch,
                              .samples_per_step = batch_.global,
                              .drop_last = trains && options_.drop_last,
                              .device = dist_.device()});
}

// If parameters are cut, a rank without samples has to compute, too, because the others gather its
// parts. It gets samples that do not count.
bool Trainer::take_stand_in(data::Batch& batch, const data::Dataset& dataset) {
  if (batch.size() > 0 || !dist_.every_rank_computes(model_)) return false;
  const std::int64_t global_size = batch.global_size;
  batch = stand_in(dataset, batch_.micro, dist_.device());
  batch.global_size = global_size;
  return true;
}

// The blocks of a pipeline's stages cast by themselves, and leave the loss in 32 bits.
std::optional<device::Autocast> Trainer::low_precision() const {
  if (task_->pipeline() != nullptr) return std::nullopt;
  return stepper_->low_precision();
}

void Trainer::validate(const Dataset& validation) {
  if (validation == nullptr) return;
  finish_step();
  note_progress("validation");
  // Takes as many samples as that many training steps have, in every layout.
  std::optional<Validation> measured;
  with(options_.validation_weights,
       [&] { measured = measure(validation, options_.validation_batches * batch_.accumulation); });
  result_.validation_loss.reset();
  result_.validation_metrics.clear();
  if (!measured) {
    if (reporter_)
      reporter_->note(
          fmt::format("step {}: no validation loss, as none of the samples counts", step_));
    return;
  }
  result_.validation_loss = measured->loss;
  result_.validation_metrics = measured->metrics;
  judge(*measured);
  if (reporter_) {
    check_still_ours();
    reporter_->validation(step_, measured->loss, measured->metrics);
  }
  if (measured->is_best && options_.keep_best) save_best();
  call(callbacks_->on_validation, *measured);
}

// All ranks have the same numbers, and so come to the same judgement.
void Trainer::judge(Validation& validation) {
  double value = validation.loss;
  for (const observe::Metric& metric : validation.metrics)
    if (metric.name == options_.judge.metric) value = metric.value;
  const bool larger = options_.judge.better == Judge::Better::larger;
  const double gain = result_.best ? (larger ? value - *result_.best : *result_.best - value)
                                   : std::numeric_limits<double>::infinity();
  validation.is_best = !std::isnan(value) && gain > options_.judge.min_delta;
  if (validation.is_best) {
    result_.best = value;
    result_.best_step = step_;
    not_better_ = 0;
  } else if (++not_better_ >= options_.patience && options_.patience > 0) {
    wants_stop_ = true;
  }
}

Validation Trainer::evaluate(const Dataset& dataset, Weights weights) {
  check_samples(dataset, "evaluate");
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())},
                      rank_messages());
  make_stepper();
  finish_step();
  const EvalMode eval(model_);
  std::optional<Validation> measured;
  with(weights, [&] { measured = measure(dataset, 0); });
  if (measured) return *measured;
  return {.step = step_, .loss = std::numeric_limits<double>::quiet_NaN()};
}

// Nothing if none of the samples counts. With 0 as the most batches, all are taken.
std::optional<Validation> Trainer::measure(const Dataset& dataset, std::int64_t most_batches) {
  const c10::NoGradGuard no_grad;
  model_->eval();
  const auto loader = load_data(dataset, Samples::in_their_own);
  const std::vector<std::string> names = task_->metric_names();
  std::vector<double> sums(2 + names.size());
  std::int64_t left = most_batches == 0 ? loader->num_batches() : most_batches;
  while (auto batch = left-- > 0 ? loader->next() : std::nullopt) {
    const bool stands_in = take_stand_in(*batch, *dataset);
    if (batch->size() == 0) continue;
    const auto cast = low_precision();
    const Evaluation evaluation = task_->evaluate(*batch);
    if (stands_in) continue;
    sums[0] += evaluation.loss.sum.item<double>();
    sums[1] += static_cast<double>(evaluation.loss.count);
    for (std::size_t i = 0; i < names.size(); ++i) sums[2 + i] += evaluation.metric_sums[i];
  }
  sums = dist_.sum_over_data(std::move(sums));
  if (sums[1] == 0) return std::nullopt;
  Validation measured{.step = step_, .loss = unsigned_nan(sums[0] / sums[1])};
  for (std::size_t i = 0; i < names.size(); ++i)
    measured.metrics.push_back({names[i], sums[2 + i] / sums[1]});
  return measured;
}

at::Tensor Trainer::predict(const Dataset& dataset,
                            const std::function<at::Tensor(const data::Batch&)>& output,
                            Weights weights, Where where) {
  check_samples(dataset, "predict");
  const RankMessages ranks = rank_messages();
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())}, ranks);
  make_stepper();
  finish_step();
  const EvalMode eval(model_);
  Part mine;
  std::string wrong;
  with(weights, [&] {
    const c10::NoGradGuard no_grad;
    const auto loader = load_data(dataset, Samples::in_their_own);
    std::vector<at::Tensor> outputs;
    std::int64_t begin = 0;
    while (auto batch = loader->next()) {
      const std::int64_t size = batch->size();
      for (const std::int64_t row : batch->rows) mine.places.push_back(begin + row);
      begin += batch->global_size;
      // A rank that has no sample learns the outputs' shape from one.
      if (size == 0) {
        constexpr std::int64_t kFirst[] = {0};
        batch->input = dataset->batch(kFirst).input.to(dist_.device());
      }
      const auto cast = low_precision();
      const at::Tensor given = output(*batch);
      if (!given.defined() || given.dim() == 0 || given.size(0) != batch->size()) {
        wrong = fmt::format(
            "the output of {} samples is {}: it must have one row for each", batch->size(),
            given.defined() ? fmt::format("of shape [{}]", fmt::join(given.sizes(), ", "))
                            : "no tensor");
        continue;
      }
      outputs.push_back(given.narrow(0, 0, size).to(at::kCPU));
      if (outputs.back().sizes().slice(1) != outputs.front().sizes().slice(1))
        wrong = fmt::format("outputs of a sample have the shapes [{}] and [{}]: they cannot be put "
                            "together",
                            fmt::join(outputs.front().sizes().slice(1), ", "),
                            fmt::join(outputs.back().sizes().slice(1), ", "));
    }
    do_together(ranks, [&] {
      if (!wrong.empty()) throw UsageError("{}", wrong);
    });
    mine.values = at::cat(outputs).contiguous();
  });
  // Of ranks that work together on the same samples, the first tells what came out.
  const std::vector<std::string> shares = ranks.gather(std::to_string(dist_.data_rank()));
  mine.counts =
      std::ranges::find(shares, std::to_string(dist_.data_rank())) - shares.begin() == ranks.rank();
  const at::Tensor whole = gathered(mine, dataset->size(), ranks);
  return where == Where::main_rank ? whole : on_all_ranks(whole, mine, dataset->size(), ranks);
}

void Trainer::with(Weights weights, const std::function<void()>& work) {
  if (weights == Weights::trained) return work();
  AveragedWeights* const averaged = stepper_->averaged();
  if (averaged == nullptr)
    throw UsageError("averaged weights are asked for, and ema_decay is 0, which averages none: set "
                     "it, for example to 0.999");
  averaged->in_place_of_weights(work);
}

}  // namespace lockstep::train
