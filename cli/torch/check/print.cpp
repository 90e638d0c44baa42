#include <cli/torch/check/report.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

namespace lockstep::cli::inspection {

namespace {

constexpr std::size_t kWidth = 80;
constexpr std::size_t kMostInMatrix = 16;
constexpr std::size_t kMostListed = 32;

std::string gibibytes(std::uint64_t bytes) {
  return fmt::format("{:.1f} GiB", double(bytes) / double(1 << 30));
}

// Columns that a text takes: its bytes without those that continue a UTF-8 character.
std::size_t columns(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char byte) {
    return (static_cast<unsigned char>(byte) >> 6) != 2;
  }));
}

// "0-3,8" from {0, 1, 2, 3, 8}.
std::string ranges(const std::vector<int>& numbers) {
  std::vector<int> sorted = numbers;
  std::sort(sorted.begin(), sorted.end());
  std::string text;
  for (std::size_t i = 0; i < sorted.size();) {
    std::size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    if (!text.empty()) text += ',';
    text += std::to_string(sorted[i]);
    if (end - i > 1) text += fmt::format("-{}", sorted[end - 1]);
    i = end;
  }
  return text;
}

// A figure in three or four characters: "0.83", "12.4", "1234".
std::string short_number(double value, std::size_t width) {
  for (int digits = value < 10 ? 2 : 1; digits >= 0; --digits) {
    std::string text = fmt::format("{:.{}f}", value, digits);
    if (text.size() <= width) return text;
  }
  return fmt::format("{:.0f}", value);
}

class Printer {
 public:
  Printer(const Report& report, Style style) : report_(report), style_(style) {}

  std::string run() {
    text_ = style("1", "lockstep check");
    text_ += fmt::format("  (version {})\n", report_.version);
    print_machine();
    if (report_.hosts.size() > 1) print_hosts();
    print_backends();
    if (!report_.hosts.front().gpu_pairs.empty()) print_gpu_pairs(report_.hosts.front());
    if (report_.ranks.size() > 1) {
      print_ranks();
      print_pairs();
    }
    print_problems();
    return std::move(text_);
  }

 private:
  std::string style(const char* code, const std::string& text) const {
    return style_ == Style::terminal ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : text;
  }
  void heading(const std::string& text) { text_ += "\n" + style("1", text) + "\n"; }

  // `text` after a label of 12 columns, broken between words.
  void entry(const std::string& label, const std::string& text) {
    paragraph(fmt::format("  {:<10}", label), text);
  }
  void paragraph(const std::string& first, const std::string& text) {
    const std::string indent(columns(first), ' ');
    std::string line = first;
    bool empty = true;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      if (!empty && columns(line) + 1 + columns(word) > kWidth) {
        text_ += line + "\n";
        line = indent;
        empty = true;
      }
      line += (empty ? "" : " ") + word;
      empty = false;
    }
    text_ += line + "\n";
  }

  static std::string blas_name(const Host& host) {
    if (host.blas.empty()) return "its own BLAS";
    for (const auto& [word, name] :
         {std::pair{"openblas", "OpenBLAS"}, {"mkl", "MKL"}, {"blis", "BLIS"}, {"atlas", "ATLAS"}})
      if (host.blas.find(word) != std::string::npos) return name;
    return host.blas.find("libblas.so") != std::string::npos ? "reference BLAS" : host.blas;
  }
  static std::string gpu_list(const Host& host) {
    if (host.gpus.empty()) return "none";
    const bool alike = std::count(host.gpus.begin(), host.gpus.end(), host.gpus.front()) ==
                       static_cast<long>(host.gpus.size());
    if (alike && host.gpus.size() == 1) return host.gpus.front();
    if (alike) return fmt::format("{} x {}", host.gpus.size(), host.gpus.front());
    return fmt::format("{}", fmt::join(host.gpus, ", "));
  }
  static std::string format_text(const Answer& answer) {
    return fmt::format("{}: {}", answer.yes ? "yes" : "no", answer.reason);
  }

  void print_machine() {
    const Host& host = report_.hosts.front();
    const Rank& rank = report_.ranks.front();
    heading(report_.hosts.size() > 1 ? "Machine of rank 0" : "Machine");
    entry("host", fmt::format("{} ({})", host.name, host.system));
    std::string cores = fmt::format("{}, {} core{} usable", host.cpu, host.num_cores,
                                    host.num_cores == 1 ? "" : "s");
    if (host.cpu_quota >= 0) cores += fmt::format(" (control group: {:.2g})", host.cpu_quota);
    entry("CPU", cores);
    entry("memory",
          fmt::format("{} free of {}", gibibytes(host.free_bytes), gibibytes(host.total_bytes)));
    entry("GPU", gpu_list(host));
    entry("LibTorch",
          fmt::format("{}, {}, {}, {} thread{}", host.torch_version,
                      host.torch_has_cuda ? "with CUDA" : "without CUDA", blas_name(host),
                      rank.num_threads, rank.num_threads == 1 ? "" : "s"));
    entry("device",
          rank.device_id.empty()
              ? rank.device
              : fmt::format("{} ({}), {} free of {}", rank.device, rank.device_name,
                            gibibytes(rank.device_free_bytes), gibibytes(rank.device_total_bytes)));
    entry("bf16", format_text(host.bf16));
    entry("fp8", format_text(host.fp8));
  }

  void print_hosts() {
    heading(fmt::format("Hosts ({})", report_.hosts.size()));
    text_ +=
        fmt::format("  {:<18} {:<9} {:>5} {:>10}  {}\n", "host", "ranks", "cores", "free", "GPU");
    for (std::size_t i = 0; i < std::min(report_.hosts.size(), kMostListed); ++i) {
      const Host& host = report_.hosts[i];
      text_ += fmt::format("  {:<18} {:<9} {:>5} {:>10}  {}\n", host.name, ranges(host.ranks),
                           host.num_cores, gibibytes(host.free_bytes), gpu_list(host));
    }
    if (report_.hosts.size() > kMostListed)
      text_ +=
          fmt::format("  and {} more (--json lists all)\n", report_.hosts.size() - kMostListed);
  }

  void print_backends() {
    heading("Backends");
    for (const Backend& backend : report_.backends) {
      const std::string word = !backend.built      ? "not in this build: "
                               : backend.works.yes ? "works"
                                                   : "does not work: ";
      const char* comma = backend.works.yes && !backend.works.reason.empty() ? "; " : "";
      entry(backend.name, word + comma + backend.works.reason);
    }
  }

  void print_ranks() {
    heading(fmt::format("Ranks ({}, started by {})", report_.ranks.size(), report_.launcher));
    text_ += fmt::format("  {:>4}  {:<18} {:<14} {:>7}  {}\n", "rank", "host", "CPUs", "threads",
                         "device");
    for (std::size_t i = 0; i < std::min(report_.ranks.size(), kMostListed); ++i) {
      const Rank& rank = report_.ranks[i];
      text_ += fmt::format("  {:>4}  {:<18} {:<14} {:>7}  {}\n", rank.rank, rank.host,
                           ranges(rank.cpus), rank.num_threads, rank.device);
    }
    if (report_.ranks.size() > kMostListed)
      text_ +=
          fmt::format("  and {} more (--json lists all)\n", report_.ranks.size() - kMostListed);
  }

  void print_pairs() {
    heading(fmt::format("Between ranks (backend {}: {})", report_.asked_backend, report_.backend));
    if (report_.ranks.size() <= kMostInMatrix) {
      print_matrix();
    } else {
      print_slowest_pairs();
    }
  }

  void print_gpu_pairs(const Host& host) {
    heading(report_.hosts.size() > 1 ? "Between GPUs of rank 0's host" : "Between GPUs");
    Cells cells = empty_cells(host.gpus.size());
    for (const GpuPair& pair : host.gpu_pairs) {
      const auto a = static_cast<std::size_t>(pair.a), b = static_cast<std::size_t>(pair.b);
      cells[a][b] = pair.reach_each_other ? "yes" : "no";
      cells[b][a] = short_number(pair.bandwidth_gbps, 4);
    }
    paragraph("  ", "above the diagonal: whether they reach each other's memory; below: bandwidth "
                    "of copies, GB/s");
    print_cells("GPU", cells, cells.size() > 8 ? 5 : 7);
  }

  using Cells = std::vector<std::vector<std::string>>;
  static Cells empty_cells(std::size_t size) {
    return Cells(size, std::vector<std::string>(size, "-"));
  }
  void print_cells(const char* of, const Cells& cells, std::size_t width) {
    text_ += fmt::format("  {:>5}", of);
    for (std::size_t column = 0; column < cells.size(); ++column)
      text_ += fmt::format("{:>{}}", column, width);
    text_ += "\n";
    for (std::size_t row = 0; row < cells.size(); ++row) {
      text_ += fmt::format("  {:>5}", row);
      for (const std::string& cell : cells[row]) text_ += fmt::format("{:>{}}", cell, width);
      text_ += "\n";
    }
  }

  void print_matrix() {
    const std::size_t size = report_.ranks.size();
    Cells cells = empty_cells(size);
    double longest = 0;
    for (const Pair& pair : report_.pairs) longest = std::max(longest, pair.latency_us);
    // Narrow cells cannot hold many digits.
    const std::size_t digits = size > 8 ? 3 : 4;
    const bool in_milliseconds = longest >= std::pow(10.0, double(digits));
    for (const Pair& pair : report_.pairs) {
      const auto a = static_cast<std::size_t>(pair.a), b = static_cast<std::size_t>(pair.b);
      cells[a][b] = short_number(pair.latency_us / (in_milliseconds ? 1000 : 1), digits);
      cells[b][a] = short_number(pair.bandwidth_gbps, digits);
    }
    paragraph("  ", fmt::format("above the diagonal: latency one way, {}; below: bandwidth, GB/s",
                                in_milliseconds ? "ms" : "\u00b5s"));
    print_cells("rank", cells, digits + (size > 8 ? 1 : 3));
  }

  void print_slowest_pairs() {
    constexpr std::size_t kShown = 8;
    std::vector<Pair> pairs = report_.pairs;
    std::sort(pairs.begin(), pairs.end(), [](const Pair& left, const Pair& right) {
      return left.bandwidth_gbps < right.bandwidth_gbps;
    });
    paragraph("  ", fmt::format("Measured: {} of {} pairs, neighbours and a sample. The slowest, "
                                "and the middle one:",
                                pairs.size(), report_.num_pairs));
    text_ += fmt::format("  {:>6} {:>6}  {:<9} {:>12} {:>12}\n", "rank", "rank", "transport",
                         "latency \u00b5s", "GB/s");
    const auto line = [&](const Pair& pair) {
      text_ += fmt::format("  {:>6} {:>6}  {:<9} {:>12.1f} {:>12.2f}\n", pair.a, pair.b,
                           pair.transport, pair.latency_us, pair.bandwidth_gbps);
    };
    for (std::size_t i = 0; i < std::min(kShown, pairs.size()); ++i) line(pairs[i]);
    line(pairs[pairs.size() / 2]);
  }

  void print_problems() {
    heading("Problems");
    if (report_.problems.empty()) text_ += "  " + style("32", "none") + "\n";
    for (const Problem& problem : report_.problems) {
      const std::size_t start = text_.size();
      paragraph(problem.prevents_training ? "  error   " : "  advice  ", problem.what);
      if (style_ == Style::terminal)
        text_.replace(start + 2, 6,
                      style(problem.prevents_training ? "31" : "33", text_.substr(start + 2, 6)));
      paragraph("          -> ", problem.fix);
    }
  }

  const Report& report_;
  Style style_;
  std::string text_;
};

}  // namespace

std::string to_text(const Report& report, Style style) { return Printer(report, style).run(); }

}  // namespace lockstep::cli::inspection
