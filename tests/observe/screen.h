// A terminal's screen, as far as our output uses one. It notes every line that was broken because
// it was too long, and every sequence that it does not know.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::observe {

class Screen {
 public:
  explicit Screen(int width) : width_(width) {}

  void write(std::string_view bytes) {
    for (const char c : bytes) take(c);
  }

  // Behaves like terminals that reflow: lines that are too long now are broken into several. The
  // cursor stays with its character.
  void resize(int width) {
    width_ = width;
    std::vector<Line> lines;
    std::size_t row = 0;
    std::size_t column = 0;
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      const auto first = lines.size();
      lines.emplace_back();
      for (const auto& cell : lines_[i]) {
        if (lines.back().size() == static_cast<std::size_t>(width)) lines.emplace_back();
        lines.back().push_back(cell);
      }
      if (i == row_) {
        row = first + column_ / static_cast<std::size_t>(width);
        column = column_ % static_cast<std::size_t>(width);
      }
    }
    lines_ = std::move(lines);
    row_ = row;
    column_ = column;
  }

  // The lines without trailing blanks, and without empty lines at the end.
  std::vector<std::string> lines() const {
    std::vector<std::string> texts;
    for (const auto& line : lines_) {
      std::string text;
      for (const auto& cell : line) text += cell;
      text.erase(text.find_last_not_of(' ') + 1);
      texts.push_back(text);
    }
    while (!texts.empty() && texts.back().empty()) texts.pop_back();
    return texts;
  }
  std::size_t row() const { return row_; }
  std::size_t column() const { return column_; }
  int num_wraps() const { return num_wraps_; }
  bool coloured() const { return coloured_; }
  const std::string& unknown() const { return unknown_; }

 private:
  using Line = std::vector<std::string>;  // one element for each character

  void take(char c) {
    if (!sequence_.empty()) {
      sequence_ += c;
      if (sequence_ == "\x1b[") return;
      if (c >= '0' && c <= '9') return;
      if (c == 'J' && sequence_ == "\x1b[J") {
        lines_.resize(row_ + 1);
        if (lines_[row_].size() > column_) lines_[row_].resize(column_);
      } else if (c == 'K' && sequence_ == "\x1b[K") {
        if (lines_[row_].size() > column_) lines_[row_].resize(column_);
      } else if (c == 'm') {
        coloured_ = true;
      } else {
        unknown_ += sequence_.substr(1) + " ";
      }
      sequence_.clear();
    } else if (c == '\x1b') {
      sequence_ = c;
    } else if (c == '\r') {
      column_ = 0;
    } else if (c == '\n') {
      next_line();
      column_ = 0;
    } else if ((static_cast<unsigned char>(c) & 0xc0) == 0x80) {
      lines_[row_][column_ - 1] += c;
    } else {
      if (column_ == static_cast<std::size_t>(width_)) {
        ++num_wraps_;
        next_line();
        column_ = 0;
      }
      auto& line = lines_[row_];
      if (line.size() <= column_) line.resize(column_ + 1, " ");
      line[column_++] = c;
    }
  }

  void next_line() {
    if (++row_ == lines_.size()) lines_.emplace_back();
  }

  int width_;
  std::vector<Line> lines_ = {{}};
  std::size_t row_ = 0;
  std::size_t column_ = 0;
  int num_wraps_ = 0;
  bool coloured_ = false;
  std::string sequence_;
  std::string unknown_;
};

}  // namespace lockstep::observe
