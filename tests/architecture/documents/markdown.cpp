#include "markdown.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>

namespace lockstep::documents {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kForeign = "<!-- others' names -->";

// Headings of table columns that hold names of other systems.
constexpr std::array<std::string_view, 9> kOthers = {
    "PyTorch", "DeepSpeed", "DeepSpeed's",           "Megatron-LM", "torchrun",
    "Horovod", "Ray Train", "Lightning, accelerate", "elsewhere"};

std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(' ') - first + 1));
}

std::vector<std::string> cells_of(std::string_view row) {
  std::vector<std::string> cells;
  row = row.substr(1, row.rfind('|') - 1);
  for (std::size_t begin = 0; begin <= row.size();) {
    const std::size_t end = std::min(row.find('|', begin), row.size());
    cells.push_back(trimmed(row.substr(begin, end - begin)));
    begin = end + 1;
  }
  return cells;
}

// Collects the pieces of a paragraph, line by line: code may continue in the next line.
class Paragraph {
 public:
  explicit Paragraph(Page& page) : page_(page) {}

  void add(std::string_view text, int line) {
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '`') {
        if (open_) page_.spans.push_back(span_);
        open_ = !open_;
        span_ = {.text = "", .line = line};
      } else if (open_) {
        span_.text += text[i];
      } else if (text.substr(i, 2) == "](") {
        const std::size_t end = text.find(')', i);
        if (end != std::string_view::npos)
          page_.links.push_back({std::string(text.substr(i + 2, end - i - 2)), line});
      }
    }
    if (open_) span_.text += ' ';
  }

  void end() { open_ = false; }

 private:
  Page& page_;
  Piece span_;
  bool open_ = false;
};

}  // namespace

Page parse_page(std::string name, std::string_view text) {
  Page page{.name = std::move(name), .blocks = {}, .spans = {}, .links = {}};
  Paragraph paragraph(page);
  std::vector<bool> foreign_columns;
  bool in_block = false;
  bool foreign = false;
  int number = 0;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.starts_with("```")) {
      if (!in_block) page.blocks.push_back({line.substr(3), {.text = "", .line = number + 1}});
      in_block = !in_block;
      paragraph.end();
    } else if (in_block) {
      page.blocks.back().code.text += line + "\n";
    } else if (line.empty()) {
      paragraph.end();
      foreign_columns.clear();
      foreign = false;
    } else if (line == kForeign) {
      foreign = true;
    } else if (foreign) {
      continue;
    } else if (line.starts_with('|')) {
      const auto cells = cells_of(line);
      if (foreign_columns.empty())
        for (const std::string& cell : cells)
          foreign_columns.push_back(std::ranges::find(kOthers, cell) != kOthers.end());
      for (std::size_t i = 0; i < cells.size(); ++i)
        if (i >= foreign_columns.size() || !foreign_columns[i]) {
          paragraph.add(cells[i], number);
          paragraph.end();
        }
    } else {
      paragraph.add(line, number);
    }
  }
  return page;
}

std::string read_text(const fs::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::vector<Page> pages_of(const fs::path& root) {
  std::vector<fs::path> files = {"README.md"};
  for (const auto& entry : fs::directory_iterator(root / "docs"))
    if (entry.path().extension() == ".md") files.push_back(fs::relative(entry.path(), root));
  std::ranges::sort(files);
  std::vector<Page> pages;
  for (const fs::path& file : files)
    pages.push_back(parse_page(file.generic_string(), read_text(root / file)));
  return pages;
}

}  // namespace lockstep::documents
