#include "xml.h"

#include <cctype>

namespace lockstep::observe {

namespace {

class Parser {
 public:
  explicit Parser(std::string_view document) : rest_(document) {}

  std::vector<Element> parse() {
    element();
    while (!rest_.empty()) {
      require(std::isspace(static_cast<unsigned char>(next())) != 0, "text after the document");
    }
    return std::move(elements_);
  }

 private:
  static void require(bool condition, const std::string& what) {
    if (!condition) throw std::runtime_error("no well-formed XML: " + what);
  }

  bool skip(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  char next() {
    require(!rest_.empty(), "it ends too early");
    const char c = rest_.front();
    rest_.remove_prefix(1);
    return c;
  }
  std::string name() {
    std::string word;
    while (!rest_.empty() &&
           (std::isalnum(static_cast<unsigned char>(rest_.front())) != 0 || rest_.front() == '-'))
      word += next();
    require(!word.empty(), "a name is missing");
    return word;
  }
  // Reads one character of text; an entity counts as the character that it stands for.
  std::string character() {
    const char c = next();
    require(static_cast<unsigned char>(c) >= 0x20 || c == '\n', "a control character");
    require(c != '<' && c != '>', "markup where text should be");
    if (c != '&') return std::string(1, c);
    for (const auto& [entity, value] : {std::pair{"amp;", "&"}, std::pair{"lt;", "<"},
                                        std::pair{"gt;", ">"}, std::pair{"quot;", "\""}}) {
      if (skip(entity)) return value;
    }
    require(false, "an unknown entity");
    return {};
  }

  void element() {
    require(skip("<"), "an element is missing");
    const std::size_t index = elements_.size();
    elements_.push_back({.name = name(), .attributes = {}, .text = {}});
    while (skip(" ")) {
      const std::string key = name();
      require(skip("=\""), "an attribute without a value");
      std::string value;
      while (!skip("\"")) value += character();
      require(elements_[index].attributes.emplace(key, value).second, "an attribute twice");
    }
    if (skip("/>")) return;
    require(skip(">"), "a tag without an end");
    while (!rest_.starts_with("</")) {
      if (rest_.starts_with("<")) {
        element();
      } else {
        elements_[index].text += character();
      }
    }
    require(skip("</" + elements_[index].name + ">"), "another end tag than was begun");
  }

  std::string_view rest_;
  std::vector<Element> elements_;
};

}  // namespace

std::vector<Element> parse_xml(std::string_view document) { return Parser(document).parse(); }

}  // namespace lockstep::observe
