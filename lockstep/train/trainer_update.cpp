// The update that a trainer makes from a step's gradients, and the conditions that end a run.
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/comm/open_groups.h>
#include <lockstep/train/loss_scaling.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train {

namespace {

// Skipping is meant for single bad batches. A model that skips this many steps in a row is lost,
// and would replace the checkpoints of a better one.
constexpr int kMostSkipsInARow = 20;

}  // namespace

// Updates the weights, unless the loss or the gradients' norm is not finite, which only the device
// knows when this returns. Loss and norm are the same on every rank, so all of them do the same.
void Trainer::update(Step& step) {
  step.learning_rate = schedule_->learning_rate(updates_);
  const c10::NoGradGuard no_grad;
  const at::Tensor totals = dist_.totals(model_).values;
  const at::Tensor count = totals[0];
  const at::Tensor loss = totals[1] / count;
  at::Tensor norm = at::zeros_like(count), factor = at::zeros_like(count);
  const bool is_left_out = loss_scaling_ && (count.item<double>() == 0 || !unscale(step));
  if (!is_left_out) {
    norm = dist_.gradient_norm(model_).to(totals.device());
    // A step without a sample has the loss 0 / 0, which is not finite.
    factor =
        at::where(loss.isfinite(), optim::clip_factor(norm, options_.gradient_clipping), factor);
    optimizer_->step(step.learning_rate, optim::StepFactor(factor));
  }
  step.numbers = device::HostCopy(at::stack({count, loss, norm, factor}));
}

// Whether the host goes on to the next step while a GPU works on this one. It does not if the next
// step's loss scale depends on this one, or if the parts of steps are timed.
bool Trainer::runs_ahead() const {
  return dist_.device().is_cuda() && !loss_scaling_ && !options_.step_times;
}

// Counts the last step as done or skipped, once the host has its numbers.
void Trainer::settle() {
  if (!unsettled_) return;
  Step step = std::move(*unsettled_);
  unsettled_.reset();
  if (runs_ahead()) note_progress("the GPU's part", step.number);
  const auto* numbers = step.numbers.get().data_ptr<double>();
  // The numbers mean nothing if a call between GPUs has failed.
  comm::check_device_results();
  step.count = numbers[0];
  step.loss = unsigned_nan(numbers[1]);
  if (step.skipped == Skipped::overflow) {
    ++result_.skipped_steps;
  } else if (step.count == 0) {
    step.skipped = Skipped::nothing_to_learn;
    ++result_.skipped_steps;
  } else {
    step.gradient_norm = unsigned_nan(numbers[2]);
    count_update(step, /*done=*/numbers[3] != 0);
  }
  if (step.skipped != Skipped::nothing_to_learn) result_.loss = step.loss;
  unreported_ = std::move(step);
}

void Trainer::finish_step() {
  settle();
  report_settled();
}

void Trainer::count_update(Step& step, bool done) {
  if (done) {
    ++updates_;
    skips_in_a_row_ = 0;
    return;
  }
  if (options_.on_non_finite == NonFinite::stop || ++skips_in_a_row_ > kMostSkipsInARow) {
    if (reporter_) reporter_->finish();
    give_up(step);
  }
  step.skipped = Skipped::non_finite;
  ++result_.skipped_steps;
}

// Whether the step's gradients fit fp16. If they do not, a smaller scale is tried in the next step;
// if there is none, training ends.
bool Trainer::unscale(Step& step) {
  step.loss_scale = loss_scaling_->value();
  try {
    if (loss_scaling_->unscale(dist_, model_)) return true;
  } catch (const UsageError& error) {
    if (reporter_) reporter_->finish();
    finish_save();
    throw TrainingStopped(fmt::format("training stopped at step {}: {}. {}", step.number,
                                      error.what(), last_checkpoint()));
  }
  step.gradient_norm = std::numeric_limits<double>::infinity();
  if (loss_scaling_->is_fixed() && ++skips_in_a_row_ > kMostSkipsInARow) {
    if (reporter_) reporter_->finish();
    finish_save();
    throw TrainingStopped(fmt::format(
        "training stopped at step {}: its gradients overflow at the fixed loss scale of {:g}, as "
        "those of the {} steps before it did. {}. Try a smaller fp16.loss_scale, or 0, which finds "
        "one that fits",
        step.number, step.loss_scale, kMostSkipsInARow, last_checkpoint()));
  }
  step.skipped = Skipped::overflow;
  return false;
}

std::string Trainer::last_checkpoint() const {
  return result_.checkpoint.empty()
             ? "No checkpoint was written before it"
             : fmt::format("The last checkpoint is '{}'", result_.checkpoint.string());
}

void Trainer::give_up(const Step& step) {
  finish_save();
  throw TrainingStopped(fmt::format(
      "training stopped at step {}: the loss is {} and the gradient norm {}{}. {}. Try a smaller "
      "learning rate (it was {:g}) or a longer warm-up, gradient_clipping (it is {:g}; 0 is "
      "none){}",
      step.number, step.loss, step.gradient_norm,
      skips_in_a_row_ == 0
          ? ""
          : fmt::format(", and the {} steps before it were skipped", kMostSkipsInARow),
      last_checkpoint(), step.learning_rate, options_.gradient_clipping,
      skips_in_a_row_ == 0 ? ", or on_non_finite_loss \"skip\" where only single batches are bad"
                           : ""));
}

}  // namespace lockstep::train
