// Where an engine's batches come from: loaders, whole steps, evaluations.
#include <algorithm>
#include <map>
#include <utility>

#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/train/engine_state.h>
#include <lockstep/train/job_config.h>

namespace lockstep::train {

namespace {

// The ranks of a pipeline must give it the same batches, and all ranks as many: where they do not,
// some would wait for others. UsageError on all ranks. Returns the samples of all ranks.
std::int64_t check_own_batches(DistributedManager& dist, const std::vector<EngineBatch>& batches,
                               std::int64_t wanted) {
  std::string fault, shapes;
  std::int64_t samples = 0;
  if (static_cast<std::int64_t>(batches.size()) != wanted)
    fault = fmt::format("{} batch{} given, and a step has {} passes (gradient_accumulation_steps)",
                        batches.size(), batches.size() == 1 ? " was" : "es were", wanted);
  for (const EngineBatch& batch : batches) {
    const bool has_samples = batch.data.defined() && batch.data.dim() > 0 && batch.data.size(0) > 0;
    if (!has_samples && fault.empty()) fault = "a batch without samples was given";
    if (!has_samples) continue;
    samples += batch.data.size(0);
    shapes += fmt::format(" {} [{}]", c10::toString(batch.data.scalar_type()),
                          fmt::join(batch.data.sizes(), ", "));
  }
  const std::vector<std::string> said =
      RankMessages(dist.world())
          .gather(fault.empty()
                      ? fmt::format("{}:{} samples in{}", dist.data_rank(), samples, shapes)
                      : "!" + fault);
  std::map<std::string, std::pair<std::size_t, std::string>> first;  // by place in the data
  for (std::size_t rank = 0; rank < said.size(); ++rank)
    if (said[rank].starts_with('!')) throw UsageError("rank {}: {}", rank, said[rank].substr(1));
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    const auto colon = said[rank].find(':');
    const auto& [holder, known] =
        first.try_emplace(said[rank].substr(0, colon), rank, said[rank].substr(colon + 1))
            .first->second;
    if (known != said[rank].substr(colon + 1))
      throw UsageError("ranks {} and {} work on the same samples, and were given other batches: {} "
                       "and {}. Give all ranks of one data_rank() the same",
                       holder, rank, known, said[rank].substr(colon + 1));
  }
  std::int64_t of_all = 0;
  for (const auto& [place, given] : first) of_all += std::stoll(given.second);
  return of_all;
}

}  // namespace

EngineCore::Epoch::Epoch(std::shared_ptr<const data::Dataset> of, const DistributedManager& dist,
                         const TrainConfig& config, const Batch& batch, For use)
    : dataset(std::move(of)),
      loader(dataset,
             data::DistributedSampler({.size = dataset->size(),
                                       .num_replicas = dist.data_size(),
                                       .rank = dist.data_rank(),
                                       .shuffle = use == For::training,
                                       .seed = static_cast<std::uint64_t>(config.seed)}),
             {.batch_size = batch.micro,
              .num_workers = static_cast<int>(config.data.num_workers),
              .prefetch = static_cast<int>(config.data.prefetch),
              .samples_per_step = batch.global,
              .drop_last = use == For::training && config.dataloader_drop_last,
              .device = dist.device()}) {}

std::shared_ptr<EngineCore::Epoch> EngineCore::begin_epoch(
    std::shared_ptr<const data::Dataset> dataset) {
  State& state = *state_;
  state.begin_call("a loop over a loader begins");
  check_samples(dataset, "train on");
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())}, state.ranks());
  // The loader of the epoch before goes on: it has said what there was to say.
  std::shared_ptr<Epoch> epoch = std::move(state.prepared);
  if (epoch == nullptr || epoch->dataset != dataset)
    epoch = std::make_shared<Epoch>(std::move(dataset), state.dist, state.config, state.batch,
                                    Epoch::For::training);
  data::DataLoader& loader = epoch->loader;
  if (state.position.position > 0) loader.load_state(state.position);
  // With dataloader_drop_last, what a run with other batches left of an epoch may be no step.
  if (state.position.position > 0 && loader.batches_left() == 0) state.begin_next_epoch();
  if (state.position.position == 0) loader.set_epoch(state.position.epoch);
  check_batch_norms(state.dist, state.model, loader,
                    {.micro = state.batch.micro,
                     .asked_micro = state.config.batch.micro.value_or(state.batch.micro),
                     .global = state.batch.global,
                     .drop_last = state.config.dataloader_drop_last,
                     .name_of_micro = "train_micro_batch_size_per_gpu",
                     .name_of_drop_last = "dataloader_drop_last"});
  state.epoch = state.prepared = epoch;
  return epoch;
}

bool EngineCore::next(Epoch& epoch, EngineBatch& batch) {
  State& state = *state_;
  if (state.epoch.get() != &epoch)
    throw UsageError(
        "this loop over a loader is over: another has begun since, or a checkpoint was "
        "loaded. Begin a new one");
  if (state.passes.has_batch() || state.passes.has_loss())
    throw UsageError("a batch of the loader was left out: call backward() and step() for each, as "
                     "every rank has to take as many steps as the others");
  data::DataLoader& loader = epoch.loader;
  if (loader.batches_left() == 0) {
    // Its last passes may wait for a step of the next epoch's.
    if (state.passes.has_kept()) state.note_position();
    state.epoch.reset();
    state.begin_call("the loop ends");
    return false;
  }
  state.begin_pass();
  if (state.passes.is_first())
    state.passes.shorten(std::min(state.batch.accumulation, loader.batches_left()));
  data::Batch given = loader.next().value();
  state.passes.give(given.size(), given.global_size);
  if (given.size() == 0) given = stand_in(*epoch.dataset, state.batch.micro, state.dist.device());
  batch = {.data = std::move(given.input), .target = std::move(given.target)};
  state.end_of(&StepTimes::data);
  return true;
}

double EngineCore::evaluate(const std::shared_ptr<const data::Dataset>& dataset,
                            const std::function<nn::LossSum(const EngineBatch& batch)>& loss_of) {
  State& state = *state_;
  state.begin_call("evaluate() was called");
  check_samples(dataset, "evaluate");
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())}, state.ranks());
  const c10::NoGradGuard no_grad;
  const State::Evaluation evaluation(state);
  Epoch all(dataset, state.dist, state.config, state.batch, Epoch::For::evaluation);
  std::vector<double> sums(2);
  while (auto given = all.loader.next()) {
    const bool counts = given->size() > 0;
    if (!counts) *given = stand_in(*dataset, state.batch.micro, state.dist.device());
    const nn::LossSum loss = loss_of({.data = given->input, .target = given->target});
    if (!loss.sum.defined() || loss.sum.numel() != 1)
      throw UsageError("the loss of evaluate() is not one number: take its mean or its sum");
    if (!counts) continue;
    sums[0] += loss.sum.item<double>();
    sums[1] += static_cast<double>(loss.count);
  }
  sums = state.dist.sum_over_data(std::move(sums));
  return sums[0] / sums[1];
}

OutputLoss EngineCore::State::staged(const BatchLoss& loss) const {
  if (!loss.of_output)
    throw UsageError("parallel.pipeline is {}, and the model's forward() does not return a tensor, "
                     "which the loss of a pipeline takes",
                     config.parallel.pipeline);
  return {.of =
              [this, &loss](const at::Tensor& output, const MicroBatch& given) {
                return loss.of_output(widened(output), given.target,
                                      std::max<std::int64_t>(1, given.samples));
              },
          .counts_itself = loss.counts_itself};
}

void EngineCore::State::run_pipeline(const std::vector<MicroBatch>& batches,
                                     const BatchLoss& loss) {
  // About how much the loss counts, for its scale: of tokens, one for each number of the target.
  std::int64_t expected = 0;
  for (const MicroBatch& one : batches)
    expected += loss.counts_itself && one.samples > 0 && one.target.defined() ? one.target.numel()
                                                                              : one.samples;
  const OutputLoss of_outputs = staged(loss);
  begin_pass();
  stepper->backward_passes(
      expected, [&](const auto& scale) { return stages->run(batches, of_outputs, scale); });
  end_of(&StepTimes::backward);
  update();
}

double EngineCore::train_batch(const std::shared_ptr<const data::Dataset>& dataset,
                               const BatchLoss& loss) {
  State& state = *state_;
  state.refuse_under_no_sync("train_batch()");
  std::shared_ptr<Epoch> epoch = state.epoch;
  // A loop that was left before it used its last batch has taken that one from the loader.
  const bool goes_on = epoch != nullptr && epoch->dataset == dataset &&
                       epoch->loader.batches_left() > 0 && state.passes.is_between_steps();
  if (goes_on)
    state.begin_call("train_batch() was called");
  else
    epoch = begin_epoch(dataset);
  std::vector<MicroBatch> batches;
  for (bool over = false; !over;) {
    EngineBatch batch;
    next(*epoch, batch);
    over = state.passes.is_last();
    if (state.stages == nullptr) {
      at::Tensor output;
      state.backward(loss.of_batch(batch, output));
      state.step();
      continue;
    }
    batches.push_back({.input = std::move(batch.data),
                       .target = std::move(batch.target),
                       .samples = state.passes.samples()});
    state.passes.note_backward();
    state.passes.end();
  }
  if (state.stages != nullptr) state.run_pipeline(batches, loss);
  return last_step().loss;
}

double EngineCore::train_batch(const std::vector<EngineBatch>& batches, const BatchLoss& loss) {
  State& state = *state_;
  state.refuse_under_no_sync("train_batch()");
  state.begin_call("train_batch() was called");
  const std::int64_t samples = check_own_batches(state.dist, batches, state.batch.accumulation);
  state.epoch.reset();  // its batches are not this step's
  state.own_samples = samples;
  state.begin_pass();
  std::vector<MicroBatch> given;
  for (const EngineBatch& batch : batches) {
    if (state.stages == nullptr) {
      at::Tensor output;
      state.backward(loss.of_batch(batch, output));
      state.step();
    } else {
      given.push_back({.input = batch.data, .target = batch.target, .samples = batch.data.size(0)});
    }
  }
  if (state.stages != nullptr) state.run_pipeline(given, loss);
  return last_step().loss;
}

double EngineCore::evaluate(const std::shared_ptr<const data::Dataset>& dataset,
                            const BatchLoss& loss) {
  State& state = *state_;
  if (state.stages == nullptr)
    return evaluate(dataset, [&](const EngineBatch& batch) {
      at::Tensor output;
      return loss.of_batch(batch, output);
    });
  state.begin_call("evaluate() was called");
  check_samples(dataset, "evaluate");
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())}, state.ranks());
  const State::Evaluation evaluation(state);
  const OutputLoss of_outputs = state.staged(loss);
  Epoch all(dataset, state.dist, state.config, state.batch, Epoch::For::evaluation);
  std::vector<double> sums(2);
  while (all.loader.batches_left() > 0) {
    std::vector<MicroBatch> batches;
    while (static_cast<std::int64_t>(batches.size()) < state.batch.accumulation) {
      auto given = all.loader.next();
      if (!given) break;
      const std::int64_t samples = given->size();
      if (samples == 0) *given = stand_in(*dataset, state.batch.micro, state.dist.device());
      batches.push_back({.input = given->input, .target = given->target, .samples = samples});
    }
    const PassesLoss made = state.stages->evaluate(batches, of_outputs);
    sums[0] += made.sum;
    sums[1] += static_cast<double>(made.count);
  }
  sums = state.dist.sum_over_data(std::move(sums));
  return sums[0] / sums[1];
}

EngineEvaluation EngineCore::eval_batch(const EngineBatch& batch, const BatchLoss& loss,
                                        Outputs outputs) {
  State& state = *state_;
  state.begin_call("eval_batch() was called");
  check_own_batches(state.dist, {batch}, 1);
  const c10::NoGradGuard no_grad;
  const State::Evaluation evaluation(state);
  EngineEvaluation made;
  std::vector<double> sums(2);
  if (state.stages == nullptr) {
    const nn::LossSum one = loss.of_batch(batch, made.output);
    sums = {one.sum.item<double>(), static_cast<double>(one.count)};
  } else {
    const PassesLoss one = state.stages->evaluate(
        {{.input = batch.data, .target = batch.target, .samples = batch.data.size(0)}},
        state.staged(loss), outputs == Outputs::none ? nullptr : &made.output);
    sums = {one.sum, static_cast<double>(one.count)};
    if (outputs == Outputs::on_all_ranks)
      made.output = state.stages->from_last_stage(std::move(made.output));
    if (made.output.defined()) made.output = state.widened(made.output);
  }
  if (outputs == Outputs::none) made.output = at::Tensor();
  sums = state.dist.sum_over_data(std::move(sums));
  made.loss = sums[0] / sums[1];
  made.count = sums[1];
  return made;
}

}  // namespace lockstep::train
