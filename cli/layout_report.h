// `lockstep train --describe`: who holds what, in words, as a table and as pictures.
#pragma once

#include <string>
#include <vector>

#include <lockstep/mesh/placement/mesh_shape.h>
#include <lockstep/mesh/placement/placement.h>
#include <lockstep/models/spec/config.h>
#include <lockstep/observe/terminal.h>
#include <lockstep/train/preflight/run_layout.h>

namespace lockstep::cli {

struct DescribedRun {
  const train::TrainConfig& config;
  const train::RunPlan& plan;
  const train::RunLayout& layout;
};

// The next functions put into words what the table and the picture both show.

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

struct ReportStyle {
  int width = 80;  // columns
  observe::Characters characters = observe::Characters::unicode;
};

// The mesh as a grid of ranks, what its axes are for, and a row for each rank.
std::string layout_report(const DescribedRun& run, const ReportStyle& style = {});

// The grid alone, with what each rank holds in its cell: a self-contained SVG document. Where there
// are many ranks, it draws those of the first samples, and says how many it leaves out.
std::string layout_svg(const DescribedRun& run);

}  // namespace lockstep::cli
