// Models of one's own for `lockstep train`: a class with a model, its loss and its data, in a
// shared library that a config names.
//
//   struct Digits {
//     explicit Digits(const lockstep::ModelOptions& options)
//         : hidden(options.integer("hidden", 64)) {}
//
//     auto model() const { return std::make_shared<MyNet>(hidden); }
//     torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const {
//       return torch::cross_entropy_loss(output, target);   // a mean, or an nn::LossSum
//     }
//     auto training_set() const { return MyDataset(…); }    // as DistributedTrainer takes them
//     auto validation_set() const { return MyDataset(…); }  // may be left out
//
//     std::int64_t hidden;
//   };
//   LOCKSTEP_MODEL("MyNet", Digits)
//
//   "model": {"library": "libmy_model.so", "name": "MyNet", "options": {"hidden": 128}}
//
// It may have a function metrics(), which returns pairs of a name and a function, as
// DistributedTrainer::add_metric() takes them. In CMake the library is
//
//   add_library(my_model MODULE my_model.cpp)
//   target_link_libraries(my_model PRIVATE Lockstep::model_library)
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torch/version.h>

#include <lockstep/data/torch_dataset.h>
#include <lockstep/distributed/any_model.h>
#include <lockstep/train/model_options.h>
#include <lockstep/train/model_task.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// What a library gives to be trained, whatever its types. Ownership: owns its model and data once
// they are made. Threading: one thread. Failure: whatever the library throws.
class OwnModel {
 public:
  virtual ~OwnModel() = default;

  virtual std::shared_ptr<torch::nn::Module> make_model() = 0;
  // Of the model that was made.
  virtual std::shared_ptr<Task> task() = 0;
  virtual std::shared_ptr<const data::Dataset> training_set() = 0;
  // Null where there is none.
  virtual std::shared_ptr<const data::Dataset> validation_set() = 0;
};

using MakeOwnModel = std::function<std::unique_ptr<OwnModel>(const ModelOptions& options)>;

// Makes a model known under a name; returns true. If a name is given twice, the last one counts.
bool register_own_model(const std::string& name, MakeOwnModel make);

template <typename Type>
class OwnModelOf final : public OwnModel {
 public:
  explicit OwnModelOf(const ModelOptions& options) : own_(std::make_shared<Type>(options)) {}

  std::shared_ptr<torch::nn::Module> make_model() override {
    model_.emplace(internal::made_in_place([&] { return own_->model(); }));
    return internal::module_of(*model_);
  }

  std::shared_ptr<Task> task() override {
    auto task = std::make_shared<ModelTask<Model>>(
        *model_,
        [own = own_](const auto& output, const at::Tensor& target) {
          return own->loss(output, target);
        },
        LossReduction::mean);
    if constexpr (requires { own_->metrics(); })
      for (auto& [name, metric] : own_->metrics()) task->add_metric(name, metric);
    return task;
  }

  std::shared_ptr<const data::Dataset> training_set() override {
    return data::as_dataset(own_->training_set());
  }
  std::shared_ptr<const data::Dataset> validation_set() override {
    if constexpr (requires { own_->validation_set(); })
      return data::as_dataset(own_->validation_set());
    else
      return nullptr;
  }

 private:
  using Model = decltype(internal::made_in_place(
      std::declval<std::function<decltype(std::declval<Type&>().model())()>>()));

  std::shared_ptr<Type> own_;
  std::optional<Model> model_;
};

// What two builds must share for one to load the other: a text that stands in the library's file.
#define LOCKSTEP_TEXT_OF_(number) #number
#define LOCKSTEP_TEXT_OF(number) LOCKSTEP_TEXT_OF_(number)
#if defined(_LIBCPP_VERSION)
#define LOCKSTEP_STANDARD_LIBRARY "libc++"
#elif defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#define LOCKSTEP_STANDARD_LIBRARY "libstdc++ with the ABI before C++11"
#else
#define LOCKSTEP_STANDARD_LIBRARY "libstdc++"
#endif
#define LOCKSTEP_BUILT_WITH(lockstep_version)                                                      \
  "LockstepModelLibrary{Lockstep " lockstep_version                                                \
  ", LibTorch " LOCKSTEP_TEXT_OF(TORCH_VERSION_MAJOR) "." LOCKSTEP_TEXT_OF(                        \
      TORCH_VERSION_MINOR) "." LOCKSTEP_TEXT_OF(TORCH_VERSION_PATCH) ","                           \
                                                                     " " LOCKSTEP_STANDARD_LIBRARY \
                                                                     "}"

// The target defines it.
#ifndef LOCKSTEP_MODEL_LIBRARY_VERSION
#define LOCKSTEP_MODEL_LIBRARY_VERSION "of a version that Lockstep::model_library would tell"
#endif

}  // namespace lockstep::train

#define LOCKSTEP_JOINED_(first, second) first##second
#define LOCKSTEP_JOINED(first, second) LOCKSTEP_JOINED_(first, second)

// Registers a class under a name, for configs. It stands outside of namespaces. LibTorch, the
// standard library and Lockstep's version (which the target Lockstep::model_library tells) are
// noted in the library's file, and compared before anything in it runs.
#define LOCKSTEP_MODEL(name, ...) LOCKSTEP_MODEL_NUMBERED(__COUNTER__, name, __VA_ARGS__)
#define LOCKSTEP_MODEL_NUMBERED(number, name, ...)                                              \
  namespace {                                                                                   \
  [[gnu::used]] const char LOCKSTEP_JOINED(lockstep_built_with_, number)[] =                    \
      LOCKSTEP_BUILT_WITH(LOCKSTEP_MODEL_LIBRARY_VERSION);                                      \
  [[maybe_unused]] const bool LOCKSTEP_JOINED(lockstep_registered_, number) =                   \
      ::lockstep::train::register_own_model(name, [](const ::lockstep::ModelOptions& options) { \
        return std::unique_ptr<::lockstep::train::OwnModel>(                                    \
            std::make_unique<::lockstep::train::OwnModelOf<__VA_ARGS__>>(options));             \
      });                                                                                       \
  }
