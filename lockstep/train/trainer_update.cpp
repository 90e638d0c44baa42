// What a trainer does with a step's gradients, and what ends a run.
#include <cmath>
#include <limits>

#include <lockstep/train/trainer.h>
#include <lockstep/train/unsigned_nan.h>

namespace lockstep::train {

namespace {

// Skipping is for single bad batches: a model that so many in a row cannot move is lost, and would
// take the place of the checkpoints that are not.
constexpr int kMostSkipsInARow = 20;

}  // namespace

// Loss and norm are the same on every rank, so all of them do the same.
void Trainer::update(Step& step) {
  step.learning_rate = schedule_->learning_rate(updates_);
  if (step.count == 0) {
    step.skipped = Skipped::nothing_to_learn;
    ++result_.skipped_steps;
    return;
  }
  if (loss_scaling_ && !unscale(step)) return;
  const auto clip = dist_.clip_gradients(model_, options_.gradient_clipping);
  step.gradient_norm = unsigned_nan(clip.norm);
  if (std::isfinite(step.loss) && clip.finite) {
    optimizer_->step(step.learning_rate);
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

// Whether the step's gradients fit fp16; where they do not, a smaller scale is tried next, or,
// where there is none, training has come to its end.
bool Trainer::unscale(Step& step) {
  step.loss_scale = loss_scaling_->value();
  try {
    if (loss_scaling_->unscale(dist_, model_)) return true;
  } catch (const UsageError& error) {
    if (reporter_) reporter_->finish();
    finish_save();
    throw TrainingStopped(fmt::format("training stopped at step {}: {}. {}", step_ + 1,
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
        step_ + 1, step.loss_scale, kMostSkipsInARow, last_checkpoint()));
  }
  step.skipped = Skipped::overflow;
  ++result_.skipped_steps;
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
      step_ + 1, step.loss, step.gradient_norm,
      skips_in_a_row_ == 0
          ? ""
          : fmt::format(", and the {} steps before it were skipped", kMostSkipsInARow),
      last_checkpoint(), step.learning_rate, options_.gradient_clipping,
      skips_in_a_row_ == 0 ? ", or on_non_finite_loss \"skip\" where only single batches are bad"
                           : ""));
}

}  // namespace lockstep::train
