// write_code ROOT FILE: writes the C++ of a tree's pages to a file that can be compiled.
#include <fstream>
#include <iostream>

#include "code.h"

int main(int argc, char** argv) {
  using namespace lockstep::documents;
  if (argc != 3) {
    std::cerr << "write_code ROOT FILE\n";
    return 2;
  }
  std::ofstream file(argv[2]);
  file << code_of(pages_of(argv[1]), declared_in(argv[1]));
  return file.flush() ? 0 : 1;
}
