#include <lockstep/train/stepper.h>

#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/utils.h>

#include <lockstep/base/hash.h>
#include <lockstep/checkpoint/generators.h>
#include <lockstep/comm/open_groups.h>
#include <lockstep/recovery/checkpointer.h>

namespace lockstep::train {

namespace {

// Skipping is meant for single bad batches. A model that skips this many steps in a row is lost,
// and would replace the checkpoints of a better one.
constexpr int kMostSkipsInARow = 20;

constexpr const char* kGenerators = "generators/";

// The name of a rank's own random numbers, such as "generators/rank3/cpu".
std::string generator_name(int rank, const std::string& name) {
  return fmt::format("{}rank{}/{}", kGenerators, rank, name);
}

constexpr const char* kSamples = "loss_scale.samples";
constexpr const char* kAverage = "ema_decay";

std::string stopped(std::int64_t step, const std::string& what) {
  return fmt::format("training stopped at step {}: {}", step, what);
}

std::string sentences(const std::string& first, const std::string& second) {
  return second.empty() ? first : fmt::format("{}. {}", first, second);
}

}  // namespace

void LossScaling::begin_step(const DistributedManager& dist, double count) {
  if (knows_step_) return;
  const double mean = dist.mean(count);
  if (mean <= 0) return;
  scaler_.set_samples_per_sum(std::exp2(std::round(std::log2(std::max(mean, 1.0)))));
  knows_step_ = true;
}

std::map<std::string, double> LossScaling::values() const {
  std::map<std::string, double> values;
  for (const auto& [name, number] : scaler_.state()) values[name] = number.item<double>();
  if (knows_step_) values[kSamples] = scaler_.samples_per_sum();
  return values;
}

void LossScaling::load(const std::map<std::string, double>& values) {
  std::vector<NamedTensor> state = scaler_.state();
  for (auto& [name, number] : state) {
    const auto found = values.find(name);
    if (found == values.end()) return;
    number = at::scalar_tensor(found->second, number.options());
  }
  scaler_.load_state(state);
  if (const auto found = values.find(kSamples); found != values.end()) {
    scaler_.set_samples_per_sum(found->second);
    knows_step_ = true;
  }
}

StepFailed::StepFailed(const StepResult& step, std::string what, std::string advice)
    : Error(sentences(stopped(step.number, what), advice)),
      step_(step),
      what_(stopped(step.number, what)),
      advice_(std::move(advice)) {}

std::string StepFailed::with(const std::string& sentence) const {
  return sentences(sentences(what_, sentence), advice_);
}

std::string describe_skipped(const StepResult& step, double loss_scale) {
  const std::string why =
      step.skipped == StepResult::Skipped::overflow
          ? fmt::format("gradients overflow at a loss scale of {:g}, which is {:g} now",
                        step.loss_scale, loss_scale)
      : step.skipped == StepResult::Skipped::nothing_to_learn
          ? std::string("there is nothing to learn from, as the loss counts none of its samples")
          : fmt::format("loss {}, gradient norm {}", step.loss, step.gradient_norm);
  return fmt::format("step {} was skipped on all ranks: {}", step.number, why);
}

void check_samples(const std::shared_ptr<const data::Dataset>& dataset, const char* what) {
  if (dataset == nullptr || dataset->size() == 0)
    throw UsageError("there are no samples to {}: the dataset is {}", what,
                     dataset == nullptr ? "a null pointer" : "empty");
}

data::Batch stand_in(const data::Dataset& dataset, std::int64_t micro, c10::Device device) {
  std::vector<std::int64_t> first = {0};
  if (dataset.size() > 1 && micro > 1) first.push_back(1);
  data::Batch batch = dataset.batch(first);
  batch.input = batch.input.to(device);
  if (batch.target.defined()) batch.target = batch.target.to(device);
  batch.rows = std::move(first);
  return batch;
}

void check_batch_norms(const DistributedManager& dist,
                       const std::shared_ptr<torch::nn::Module>& model,
                       const data::DataLoader& loader, const CutOfSteps& cut) {
  if (!dist.synchronises_batch_norms(model)) return;
  const std::int64_t num_samples = loader.sampler().num_positions();
  const std::int64_t batch = loader.sampler().global_batch_size(cut.micro);
  const auto too_few = [&](std::int64_t samples) {
    const std::int64_t last = samples % batch;
    return last > 0 && last < dist.data_size();
  };
  if (num_samples >= cut.global && too_few(cut.global))
    throw UsageError("the last batch of a step has {} of {} samples, too few for {} ranks, each of "
                     "which needs one for its synchronised batch norms: set a {} other than {}, or "
                     "start another number of ranks",
                     cut.global % batch, cut.global, dist.data_size(), cut.name_of_micro,
                     cut.asked_micro);
  const std::int64_t rest = num_samples % cut.global;
  if (cut.drop_last || !too_few(rest)) return;
  throw UsageError("the last batch of an epoch has {} of {} samples, too few for {} ranks, each of "
                   "which needs one for its synchronised batch norms: set {}, or a {} other than "
                   "{}",
                   rest % batch, num_samples, dist.data_size(), cut.name_of_drop_last,
                   cut.name_of_micro, cut.asked_micro);
}

Stepper::Stepper(DistributedManager dist, std::shared_ptr<torch::nn::Module> model,
                 StepperOptions options)
    : dist_(std::move(dist)),
      model_(std::move(model)),
      options_(std::move(options)),
      optimizer_(dist_.make_optimizer(model_, options_.optimizer, options_.weight_decay,
                                      options_.decay_rule)),
      schedule_(optim::make_schedule(options_.schedule, options_.learning_rate)) {
  if (options_.loss_scale) loss_scaling_.emplace(*options_.loss_scale);
  if (options_.ema_decay > 0)
    averaged_ = std::make_unique<AveragedWeights>(dist_, model_, options_.ema_decay);
  // Ranks of a tensor axis compute with the same activations, and drop the same of them.
  const int stream = dist_.config().model_parallel.tensor > 1
                         ? dist_.mesh().axis("tp")->global_ranks().front()
                         : dist_.rank();
  torch::manual_seed(hash_text(fmt::format("{}/{}", options_.seed, stream)));
}

void Stepper::set_learning_rate(double learning_rate) {
  options_.learning_rate = learning_rate;
  schedule_ = optim::make_schedule(options_.schedule, learning_rate);
}

std::optional<device::Autocast> Stepper::low_precision() const {
  if (!options_.autocast) return std::nullopt;
  return std::optional<device::Autocast>(std::in_place, dist_.device().type(), *options_.autocast);
}

void Stepper::backward(nn::LossSum loss, std::int64_t num_passes, Exchange exchange, bool counts) {
  if (loss_scaling_ && std::exchange(first_pass_, false))
    loss_scaling_->begin_step(dist_, static_cast<double>((counts ? loss.count : 0) * num_passes));
  if (loss_scaling_ && loss.sum.defined()) loss.sum = loss_scaling_->scale_gradients_of(loss.sum);
  if (!counts) loss = {.sum = loss.sum * 0, .count = 0};
  if (exchange == Exchange::now) return dist_.backward(model_, loss.sum, loss.count);
  const auto more = dist_.accumulate(model_);
  dist_.backward(model_, loss.sum, loss.count);
}

void Stepper::backward_passes(std::int64_t expected,
                              const std::function<PassesLoss(const GradientScale&)>& run) {
  GradientScale scale;
  if (loss_scaling_) {
    loss_scaling_->begin_step(dist_, static_cast<double>(expected));
    scale = [this](const at::Tensor& sum) { return loss_scaling_->scale_gradients_of(sum); };
  }
  dist_.backward_passes(model_, [&]() -> data_parallel::CountedSum {
    const PassesLoss loss = run(scale);
    return {.loss_sum = at::scalar_tensor(loss.sum, at::kDouble), .count = loss.count};
  });
}

// Loss and norm are the same on every rank, so all of them do the same.
void Stepper::update(std::int64_t step) {
  first_pass_ = true;
  StepResult result{.number = step, .learning_rate = learning_rate()};
  const c10::NoGradGuard no_grad;
  const at::Tensor totals = dist_.totals(model_).values;
  const at::Tensor count = totals[0];
  const at::Tensor loss = totals[1] / count;
  at::Tensor norm = at::zeros_like(count), factor = at::zeros_like(count);
  const bool is_left_out = loss_scaling_ && (count.item<double>() == 0 || !unscale(result));
  if (!is_left_out) {
    norm = dist_.gradient_norm(model_).to(totals.device());
    // A step without a sample has the loss 0 / 0, which is not finite.
    factor =
        at::where(loss.isfinite(), optim::clip_factor(norm, options_.gradient_clipping), factor);
    optimizer_->step(result.learning_rate, optim::StepFactor(factor));
    if (averaged_) averaged_->update(factor);
  }
  unsettled_ = {.result = result,
                .numbers = device::HostCopy(at::stack({count, loss, norm, factor}))};
}

std::optional<StepResult> Stepper::settle() {
  if (!unsettled_) return std::nullopt;
  auto [step, copy] = std::move(*unsettled_);
  unsettled_.reset();
  const auto* numbers = copy.get().data_ptr<double>();
  // The numbers mean nothing if a call between GPUs has failed.
  comm::check_device_results();
  step.count = numbers[0];
  step.loss = unsigned_nan(numbers[1]);
  if (step.skipped == StepResult::Skipped::overflow) return step;
  if (step.count == 0) {
    step.skipped = StepResult::Skipped::nothing_to_learn;
    return step;
  }
  step.gradient_norm = unsigned_nan(numbers[2]);
  count_update(step, /*done=*/numbers[3] != 0);
  return step;
}

void Stepper::count_update(StepResult& step, bool done) {
  if (done) {
    ++updates_;
    skips_in_a_row_ = 0;
    return;
  }
  step.skipped = StepResult::Skipped::non_finite;
  if (options_.on_non_finite == NonFinite::skip && ++skips_in_a_row_ <= kMostSkipsInARow) return;
  const bool skips = skips_in_a_row_ > 0;
  throw StepFailed(
      step,
      fmt::format(
          "the loss is {} and the gradient norm {}{}", step.loss, step.gradient_norm,
          skips ? fmt::format(", and the {} steps before it were skipped", kMostSkipsInARow) : ""),
      fmt::format(
          "Try a smaller learning rate (it was {:g}) or a longer warm-up, "
          "gradient_clipping (it is {:g}; 0 is none){}",
          step.learning_rate, options_.gradient_clipping,
          skips ? "" : ", or on_non_finite_loss \"skip\" where only single batches are bad"));
}

// Whether the step's gradients fit fp16. If they do not, a smaller scale is tried in the next step;
// if there is none, training ends.
bool Stepper::unscale(StepResult& step) {
  step.loss_scale = loss_scaling_->value();
  try {
    if (loss_scaling_->unscale(dist_, model_)) return true;
  } catch (const UsageError& error) {
    throw StepFailed(step, error.what());
  }
  step.gradient_norm = std::numeric_limits<double>::infinity();
  step.skipped = StepResult::Skipped::overflow;
  if (loss_scaling_->is_fixed() && ++skips_in_a_row_ > kMostSkipsInARow)
    throw StepFailed(step,
                     fmt::format("its gradients overflow at the fixed loss scale of {:g}, as those "
                                 "of the {} steps before it did",
                                 step.loss_scale, kMostSkipsInARow),
                     "Try a smaller fp16.loss_scale, or 0, which finds one that fits");
  return false;
}

std::map<std::string, double> Stepper::values() const {
  std::map<std::string, double> values;
  if (loss_scaling_) values = loss_scaling_->values();
  values["updates"] = static_cast<double>(updates_);
  if (averaged_) values[kAverage] = options_.ema_decay;
  return values;
}

void Stepper::check(const checkpoint::TrainingState& state, const std::string& what) {
  const auto updates = state.values.find("updates");
  if (updates == state.values.end())
    throw UsageError("{} does not say how many updates were made: it is not one of a training run",
                     what);
  if (!(updates->second >= 0) || updates->second > static_cast<double>(state.step))
    throw UsageError("{} has made {} updates in {} steps: it is damaged", what, updates->second,
                     state.step);
}

void Stepper::load(const checkpoint::TrainingState& state, const std::string& what) {
  check(state, what);
  updates_ = static_cast<std::int64_t>(state.values.at("updates"));
  if (loss_scaling_) loss_scaling_->load(state.values);
}

std::vector<mesh::HeldTensor> Stepper::beside_model() const {
  std::vector<mesh::HeldTensor> held;
  if (averaged_) held = averaged_->held();
  for (const auto& [name, bytes] : checkpoint::generator_states(dist_.device())) {
    const at::Tensor state = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
    std::memcpy(state.data_ptr(), bytes.data(), bytes.size());
    held.push_back(mesh::whole_tensor(generator_name(dist_.rank(), name), state));
  }
  return held;
}

void Stepper::restored(const std::vector<mesh::HeldTensor>& beside_model,
                       const checkpoint::TrainingState& state) {
  checkpoint::GeneratorStates mine;
  for (const mesh::HeldTensor& one : beside_model) {
    if (!one.name.starts_with(kGenerators)) continue;
    const auto* const bytes = static_cast<const std::byte*>(one.values.data_ptr());
    mine[one.name.substr(one.name.rfind('/') + 1)].assign(bytes, bytes + one.values.numel());
  }
  checkpoint::restore_generators(mine, dist_.device());
  if (averaged_ && !state.values.contains(kAverage)) averaged_->begin();
}

std::vector<mesh::HeldTensor> Stepper::held() {
  std::vector<mesh::HeldTensor> all = state_of(dist_, model_, *optimizer_);
  for (mesh::HeldTensor& one : beside_model()) all.push_back(std::move(one));
  return all;
}

checkpoint::TrainingState Stepper::restore(const std::filesystem::path& from) {
  const std::vector<mesh::HeldTensor> beside = beside_model();
  checkpoint::TrainingState state = load_checkpoint(dist_, from, model_, *optimizer_, beside);
  restored(beside, state);
  return state;
}

}  // namespace lockstep::train
