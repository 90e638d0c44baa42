// Makes one translation unit of the pages' C++, which compiles only if everything that they name
// exists.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "markdown.h"

namespace lockstep::documents {

// The objects that the pages mention, which scene.h declares: `dist.rank()` is code, and
// `data.train` is a key of a config.
inline const std::set<std::string> kObjects = {"checkpoints", "copies", "cut",     "dist",
                                               "engine",      "loader", "manager", "mesh",
                                               "pipe",        "scaler", "trainer"};

// The declarations in the library's headers that decide how a name has to be written to compile.
struct Declared {
  std::set<std::string> namespaces;  // such as "lockstep::nn"
  std::set<std::string> enums;       // such as "ReduceOp"
};
Declared declared_in(const std::filesystem::path& root);

// Every block of C++, and every piece of C++ within a line that is qualified, called on an object,
// or a statement, after the headers that its page names.
std::string code_of(std::vector<Page> pages, const Declared& declared);

// Whether a piece is one of these; other names can only be looked up as words.
bool is_code(const std::string& span);

}  // namespace lockstep::documents
