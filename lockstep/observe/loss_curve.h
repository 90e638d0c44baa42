// The picture of a training run: loss over steps.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/observe/series.h>

namespace lockstep::observe {

struct LossCurve {
  struct Reference {
    std::string label;  // "unigram entropy"
    double value = 0;
  };

  std::string title = "Training loss";
  std::string subtitle;  // such as "GPT, 2.7 M parameters, 2 ranks"
  std::vector<Point> training;
  std::vector<Point> validation;
  std::optional<Reference> reference;  // a horizontal line
};

// The columns loss and validation_loss of a metrics.csv. UsageError where the file is missing, is
// not one of ours, or has neither column.
LossCurve read_loss_curve(const std::filesystem::path& metrics_csv);

// A self-contained SVG document with a background of its own, of at most a few thousand points
// whatever the length of the run. Training loss is a faint line with a smoothed one on top,
// validation loss a line with its points. The vertical axis is logarithmic where losses span more
// than a factor of 30. NaN and infinity are gaps; steps need not be in order.
std::string draw_svg(const LossCurve& curve);

}  // namespace lockstep::observe
