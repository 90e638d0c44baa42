// What descriptions of a run's layout are made of: its grid of ranks, and words for what they hold.
#pragma once

#include <string>
#include <vector>

#include <lockstep/mesh/placement/mesh_shape.h>
#include <lockstep/mesh/placement/placement.h>
#include <lockstep/models/spec/config.h>
#include <lockstep/train/preflight/run_layout.h>

namespace lockstep::cli {

struct DescribedRun {
  const train::TrainConfig& config;
  const train::ResolvedRun& resolved;
  const train::RunLayout& layout;
};

// -----------------------------------------------------------------------

// "pp 2 × tp 4": axes of more than one rank.
std::string axes_text(const train::RunLayout& layout);

// "0–3", "0–63, 192–255": last ones included.
std::string interval_text(const mesh::Interval& interval);
std::string intervals_text(const std::vector<mesh::Interval>& intervals);

// "embedding, layers 0–1", for each stage of a rank.
std::string layers_text(const train::RankLayout& rank, const models::ModelConfig& model);

// "0, 2, … 6": those of each batch of all ranks.
std::string samples_text(const train::RankLayout& rank, const DescribedRun& run);

// Ranks as rows, by the pipeline, and columns, by everything else.
struct RankGrid {
  std::vector<std::string> row_names;   // "pp 0"; one without a name where there is no pipeline
  std::vector<mesh::Axis> column_axes;  // of more than one rank, slowest first
  std::vector<std::vector<int>> ranks;  // of each row
  int columns_per_share = 1;            // ranks of a row that have the same samples
};
RankGrid grid_of(const train::RunLayout& layout);

}  // namespace lockstep::cli
