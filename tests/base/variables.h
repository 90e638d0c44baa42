// Environment variables for the length of a test.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class Variables {
 public:
  Variables() = default;
  ~Variables() {
    // The last one comes first, because a variable that was set twice was saved twice.
    while (!saved_.empty()) {
      const auto& [name, value] = saved_.back();
      if (value) {
        ::setenv(name.c_str(), value->c_str(), 1);
      } else {
        ::unsetenv(name.c_str());
      }
      saved_.pop_back();
    }
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

  void set(const std::string& name, const std::string& value) {
    save(name);
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  void unset(const std::string& name) {
    save(name);
    ::unsetenv(name.c_str());
  }

 private:
  void save(const std::string& name) {
    const char* value = std::getenv(name.c_str());
    saved_.emplace_back(name, value ? std::optional<std::string>(value) : std::nullopt);
  }

  std::vector<std::pair<std::string, std::optional<std::string>>> saved_;
};

}  // namespace lockstep
