// Several messages at once, one after the other in memory, each of as many numbers.
#pragma once

#include <cstddef>

namespace lockstep::comm {

// Parts of numbers, row by row, of which messages are made column by column: part (r, c) becomes
// message c · rows + r. With one row the order stays.
struct PartTable {
  std::size_t rows = 1;
  std::size_t columns = 1;
  std::size_t count = 0;  // numbers of a part

  std::size_t num_parts() const { return rows * columns; }
  // Which part becomes the message.
  std::size_t part_of(std::size_t message) const {
    return message % rows * columns + message / rows;
  }
};

// Messages that are added to parts of numbers: part p is the sum of messages p, p + parts,
// p + 2 · parts and so on, one for each term.
struct SumTable {
  std::size_t terms = 1;
  std::size_t parts = 1;
  std::size_t count = 0;  // numbers of a part

  std::size_t num_messages() const { return terms * parts; }
};

}  // namespace lockstep::comm
