#include <lockstep/parallel/shard/unit_table.h>

#include <algorithm>

#include <spdlog/fmt/fmt.h>

namespace lockstep::shard {

namespace {

struct Row {
  std::string name, tensors, elements, dtype, place;
};

Row row_of(const FlatUnit& unit) {
  const bool sharded = unit.residence() == Residence::sharded;
  return {unit.name() + (unit.is_trained() ? "" : " (frozen)"),
          std::to_string(unit.parameters().size()), std::to_string(unit.layout().num_elements()),
          c10::toString(unit.format().gathered),
          sharded ? fmt::format("{} on each rank, gathered when used", unit.layout().part_size())
                  : std::string("whole on every rank")};
}

}  // namespace

std::int64_t count_parameters(std::span<const std::unique_ptr<FlatUnit>> units) {
  std::int64_t total = 0;
  for (const auto& unit : units) total += unit->layout().num_elements();
  return total;
}

std::string describe_units(std::span<const std::unique_ptr<FlatUnit>> units) {
  std::vector<Row> rows{{"unit", "tensors", "elements", "type", "between steps"}};
  for (const auto& unit : units) rows.push_back(row_of(*unit));
  std::size_t width = 0;
  for (const Row& row : rows) width = std::max(width, row.name.size());
  std::string text;
  for (const Row& row : rows)
    text += fmt::format("{:<{}}  {:>7}  {:>12}  {:<8}  {}\n", row.name, width, row.tensors,
                        row.elements, row.dtype, row.place);
  return text +
         fmt::format("{} units, {} parameters in all", units.size(), count_parameters(units));
}

}  // namespace lockstep::shard
