#include <lockstep/train/speaker.h>

#include <lockstep/train/preflight/resume_check.h>
#include <lockstep/train/run_folder.h>

namespace lockstep::train {

void say_end(Speaker& say, const TrainConfig& config, const TrainingResult& result,
             const std::string& note) {
  using End = TrainingResult::End;
  say("{} at step {}: loss {:.4f}{}{}",
      result.end == End::finished  ? "done"
      : result.end == End::stopped ? "stopped"
                                   : "interrupted",
      result.step, result.loss,
      result.validation_loss ? fmt::format(", validation {:.4f}", *result.validation_loss) : "",
      note);
  if (result.skipped_steps > 0)
    say("{} of the steps {} skipped, for a loss or gradient that is not a number or infinite",
        result.skipped_steps, result.skipped_steps == 1 ? "was" : "were");
  if (result.end == End::interrupted && !result.checkpoint.empty())
    say("{}", how_to_go_on(config, result.step));
}

void say_files(Speaker& say, const TrainerOptions& options, const TrainingResult& result) {
  say.file("weights", result.checkpoint);
  if (options.csv) say.file("metrics", RunFolder(options).metrics());
  if (options.csv) say.file("curve", RunFolder(options).curve());
}

TrainingResult said_at_the_end(Speaker& say, TrainingResult result) {
  if (result.end == TrainingResult::End::left)
    say("left off after step {}, to go on with all nodes", result.step);
  if (result.output_error == 0) result.output_error = say.error();
  return result;
}

}  // namespace lockstep::train
