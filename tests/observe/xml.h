// Reads XML strictly, as far as a picture needs it: throws if a document is not well formed.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::observe {

struct Element {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;  // the element's own text, unescaped
};

// All elements, in the order in which they begin.
std::vector<Element> parse_xml(std::string_view document);

}  // namespace lockstep::observe
