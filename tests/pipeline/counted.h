// Shows which half of a backward pass computes what.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <ATen/record_function.h>

namespace lockstep::pipeline {

// Counts how often operators of this name run on this thread.
class Counted {
 public:
  explicit Counted(std::string name) {
    wanted() = std::move(name);
    number() = 0;
    handle_ =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) {
                                     if (call.name() == wanted()) ++number();
                                     return std::unique_ptr<at::ObserverContext>();
                                   }).scopes({at::RecordScope::FUNCTION}));
  }
  ~Counted() { at::removeCallback(handle_); }
  int take() const { return std::exchange(number(), 0); }

 private:
  static std::string& wanted() {
    static std::string name;
    return name;
  }
  static int& number() {
    static int calls = 0;
    return calls;
  }
  at::CallbackHandle handle_{};
};

}  // namespace lockstep::pipeline
