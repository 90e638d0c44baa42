// What a run must know, beside its tensors, to continue as if it had never stopped.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

// How far the data has been read: good for any number of ranks and any batch size.
struct DataPosition {
  std::int64_t epoch = 0;
  std::int64_t position = 0;  // samples that all ranks have had of the epoch's order
  std::int64_t size = 0;      // of the dataset: another one has another order

  bool operator==(const DataPosition&) const = default;
};

struct TrainingState {
  std::int64_t step = 0;  // done so far
  DataPosition data = {};
  std::uint64_t seed = 0;
  std::int64_t samples_seen = 0;  // by all ranks, in all epochs
  std::optional<double> last_loss = {};
  // Whatever else has to go on: how many updates were made.
  std::map<std::string, double> values = {};
  std::string config = {};  // the run's resolved JSON, as it is

  bool operator==(const TrainingState&) const = default;
};

// As JSON, in one line. Every double comes back to the bit, also those that are no number.
// UsageError for texts that are no UTF-8.
std::string to_text(const TrainingState& state);

// UsageError that names `file` and the key for what is not such a text or lacks a key.
TrainingState parse_state(std::string_view text, const std::string& file);

// Reads the state from a place within a larger JSON text. UsageError as parse_state.
class JsonPlace;
TrainingState state_at(const JsonPlace& place);

}  // namespace lockstep::checkpoint
