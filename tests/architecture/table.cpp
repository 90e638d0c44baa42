#include "table.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace lockstep::architecture {

namespace {

// The text without surrounding blanks and backticks.
std::string bare(const std::string& text) {
  const char* around = " `\t\r";
  const auto first = text.find_first_not_of(around);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(around) - first + 1);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> pieces;
  std::istringstream stream(text);
  for (std::string piece; std::getline(stream, piece, separator);) pieces.push_back(bare(piece));
  return pieces;
}

std::vector<std::string> cells(const std::string& row) {
  const auto last = row.rfind('|');
  return split(row.substr(1, last - 1), '|');
}

// Whether a file is in a row's folder; "*" stands for the name of any folder.
bool holds(const std::string& path, const std::string& file) {
  const auto star = path.find('*');
  if (star == std::string::npos) return file.starts_with(path + "/");
  const auto end = file.find('/', star);
  return file.starts_with(path.substr(0, star)) && end != std::string::npos &&
         file.substr(end).starts_with(path.substr(star + 1) + "/");
}

void add_row(Table& table, const std::vector<std::string>& row) {
  if (row.size() != 4 || row[0].empty() || (row[3] != "yes" && row[3] != "no")) {
    table.mistakes.push_back("the table's row '" + (row.empty() ? "" : row[0]) +
                             "' is not: part | what it is for | may include | yes or no");
    return;
  }
  Part part;
  part.paths = split(row[0], ',');
  part.name = part.paths.front();
  for (std::size_t i = 1; i < part.paths.size(); ++i)
    if (part.paths[i].find('*') == std::string::npos)
      table.mistakes.push_back("the row of " + part.name + " names " + part.paths[i] +
                               " too: a part is one folder, so move its files into one");
  part.libtorch = row[3] == "yes";
  for (const std::string& used : split(row[2], ',')) {
    if (used.empty()) continue;
    const Part* lower = table.named(used);
    if (lower == nullptr)
      table.mistakes.push_back("the row of " + part.name + " may include " + used +
                               ", which has no row above it");
    else if (lower->libtorch && !part.libtorch)
      table.mistakes.push_back("the row of " + part.name +
                               " says no LibTorch, but it may include " + used + ", which has it");
    part.may_include.push_back(used);
  }
  table.parts.push_back(std::move(part));
}

}  // namespace

const Part* Table::part_of(const std::string& file) const {
  const Part* best = nullptr;
  std::size_t longest = 0;
  for (const Part& part : parts)
    for (const std::string& path : part.paths)
      if (holds(path, file) && path.size() > longest) {
        best = &part;
        longest = path.size();
      }
  return best;
}

const Part* Table::named(const std::string& name) const {
  const auto found =
      std::find_if(parts.begin(), parts.end(), [&](const Part& part) { return part.name == name; });
  return found == parts.end() ? nullptr : &*found;
}

Table read_table(const std::filesystem::path& markdown) {
  Table table;
  std::ifstream file(markdown);
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("|")) {
      inside = false;
    } else if (cells(line).front() == "part") {
      inside = true;
    } else if (inside && !line.starts_with("|---")) {
      add_row(table, cells(line));
    }
  }
  if (table.parts.empty()) table.mistakes.push_back(markdown.string() + " has no table of parts");
  return table;
}

}  // namespace lockstep::architecture
