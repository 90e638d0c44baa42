// The names in a page of documentation: its blocks of code, code within its lines, and links.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::documents {

struct Piece {
  std::string text;
  int line = 0;  // the line of its first character, from 1
};

struct Block {
  std::string language;  // empty for terminal commands
  Piece code;
};

struct Page {
  std::string name;  // relative to the tree's root
  std::vector<Block> blocks;
  // The texts between backticks, without columns of tables that hold other systems' names and
  // without paragraphs after a line <!-- others' names -->.
  std::vector<Piece> spans;
  std::vector<Piece> links;  // the links' targets
};

Page parse_page(std::string name, std::string_view text);

// README.md and all pages of docs/, in the order of their names.
std::vector<Page> pages_of(const std::filesystem::path& root);

std::string read_text(const std::filesystem::path& file);

}  // namespace lockstep::documents
