#include <lockstep/deferred/construction.h>

#include <vector>

#include <lockstep/deferred/recorder.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

namespace {

LivingMemories memories_of(std::span<const at::Tensor> tensors, const Contents& contents) {
  LivingMemories memories;
  for (const at::Tensor& tensor : tensors)
    if (auto living = contents.of(tensor)) memories.push_back(std::move(*living));
  return memories;
}

}  // namespace

Materialised::Materialised(std::unique_ptr<Hold> hold) : hold_(std::move(hold)) {}
Materialised::~Materialised() = default;
Materialised::Materialised(Materialised&&) noexcept = default;
Materialised& Materialised::operator=(Materialised&&) noexcept = default;

Construction::Construction(ConstructionOptions options)
    : recorder_(std::make_shared<Recorder>(options.smallest_bytes)) {}
Construction::~Construction() = default;
Construction::Construction(Construction&&) noexcept = default;
Construction& Construction::operator=(Construction&&) noexcept = default;

void Construction::run(const std::function<void()>& make) {
  const auto forget = [](Contents& contents) { contents.forget_unneeded(); };
  try {
    const FactoryScope scope(*recorder_);
    const auto watched =
        recorder_->with_contents([](Contents& contents) { return contents.watch(); });
    make();
    recorder_->with_contents([](Contents& contents) { contents.check_touches(); });
  } catch (...) {
    recorder_->with_contents(forget);
    throw;
  }
  recorder_->with_contents(forget);
}

bool Construction::is_deferred(const at::Tensor& tensor) const {
  return recorder_->with_contents(
      [&](const Contents& contents) { return contents.of(tensor).has_value(); });
}

Materialised Construction::materialise(std::span<const at::Tensor> tensors) {
  return recorder_->with_contents([&](Contents& contents) {
    LivingMemories memories = memories_of(tensors, contents);
    contents.hold(memories);
    return Materialised(std::make_unique<Hold>(recorder_, std::move(memories)));
  });
}

void Construction::keep(std::span<const at::Tensor> tensors) {
  std::vector<at::Tensor> kept;
  recorder_->with_contents([&](Contents& contents) {
    for (const at::Tensor& tensor : tensors)
      if (contents.of(tensor)) kept.push_back(tensor);
    contents.keep(memories_of(kept, contents));
  });
  // Operators on these tensors need not call us any more.
  for (const at::Tensor& tensor : kept) intercept::untag(tensor);
}

void Construction::keep_all() {
  recorder_->with_contents([](Contents& contents) { contents.keep(contents.all()); });
}

std::size_t Construction::bytes() const {
  return recorder_->with_contents([](Contents& contents) { return contents.account().bytes(); });
}

std::size_t Construction::peak_bytes() const {
  return recorder_->with_contents(
      [](Contents& contents) { return contents.account().peak_bytes(); });
}

}  // namespace lockstep::deferred
