#include <lockstep/data/tokens/token_format.h>

#include <algorithm>
#include <deque>
#include <mutex>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>

namespace lockstep::data {

// Each is in a file of its name beside this one.
TokenFormat text_format();
TokenFormat nanogpt_format();
TokenFormat llm_c_format();
TokenFormat megatron_format();

namespace {

class Table {
 public:
  std::vector<const TokenFormat*> rows() const {
    const std::lock_guard lock(mutex_);
    std::vector<const TokenFormat*> rows;
    for (const TokenFormat& row : rows_) rows.push_back(&row);
    return rows;
  }

  void add(TokenFormat format) {
    const std::lock_guard lock(mutex_);
    const bool taken =
        format.name == kAutomaticFormat ||
        std::ranges::any_of(rows_, [&](const TokenFormat& row) { return row.name == format.name; });
    if (taken)
      throw UsageError("there is a format of token files called '{}' already: choose another name",
                       format.name);
    if (format.name.empty() || format.recognises == nullptr || format.layout == nullptr)
      throw UsageError("the format '{}' of token files cannot be added: it needs a name, "
                       "`recognises` and `layout`",
                       format.name);
    rows_.push_back(std::move(format));
  }

 private:
  mutable std::mutex mutex_;
  // A deque, as its elements stay where they are when rows are added.
  std::deque<TokenFormat> rows_{text_format(), nanogpt_format(), llm_c_format(), megatron_format()};
};

Table& table() {
  static Table instance;
  return instance;
}

}  // namespace

std::vector<const TokenFormat*> token_formats() { return table().rows(); }

void add_token_format(TokenFormat format) { table().add(std::move(format)); }

const TokenFormat& token_format(std::string_view name) {
  std::vector<std::string_view> names = {kAutomaticFormat};
  for (const TokenFormat* row : token_formats()) {
    if (row->name == name) return *row;
    names.push_back(row->name);
  }
  throw UsageError("'{}' is no format of token files{} (there are {})", name,
                   did_you_mean(name, names), fmt::join(names, ", "));
}

const TokenFormat& token_format_of(const std::filesystem::path& path, std::string_view name) {
  if (name != kAutomaticFormat) return token_format(name);
  const auto rows = token_formats();
  const auto found = std::find_if(rows.rbegin(), rows.rend(),
                                  [&](const TokenFormat* row) { return row->recognises(path); });
  LOCKSTEP_CHECK(found != rows.rend(), "text is any file");
  return **found;
}

std::vector<std::filesystem::path> files_of(const std::filesystem::path& path,
                                            const TokenFormat& format) {
  if (format.files == nullptr) return {path};
  return format.files(path);
}

std::string list_token_formats() {
  std::vector<std::string> all;
  for (const TokenFormat* row : token_formats())
    all.push_back(row->note.empty() ? row->name : fmt::format("{} ({})", row->name, row->note));
  return fmt::format("{}", fmt::join(all, ", "));
}

void check_not_empty(const TokenBytes& file) {
  if (file.bytes.empty())
    throw UsageError("token file '{}' is empty: was it written to the end?", file.path.string());
}

}  // namespace lockstep::data
