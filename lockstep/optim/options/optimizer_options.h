// Options of optimizers: plain numbers that describe themselves. So a config reads and writes them,
// docs list them, and the planner knows the memory of the state, all without LibTorch.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <lockstep/optim/options/option_keys.h>

namespace lockstep::optim {

// How much of a parameter a step has to see.
enum class StepKind : std::uint8_t {
  elementwise,         // one element at a time
  blocks,              // fixed blocks of the whole parameter
  norm_per_parameter,  // sums over the whole parameter
  whole_matrices,      // the whole parameter, as a matrix
};

// Directions of whole parameters that a step with norms has at once; more where one parameter has.
inline constexpr std::int64_t kMostTogether = 1 << 24;  // elements

// Whether an optimizer of whole matrices moves a parameter as a matrix: what has two dims or more
// and does not have "embed", "lm_head", "wte" or "wpe" in its name, as embeddings and output layers
// have.
bool is_hidden_matrix(std::string_view name, std::span<const std::int64_t> shape);

// The options of one optimizer: a struct of numbers with
//
//   static constexpr StepKind kKind = StepKind::elementwise;
//   void describe(OptionKeys& keys);               // each number, once
//   std::vector<std::string> state_names() const;  // tensors of a parameter's shape in its state
//   std::vector<std::string> matrix_state_names() const;  // the same of what it moves as a matrix
//   double state_bytes() const;  // for each element, where these tensors are not of floats
//   std::vector<OptionMistake> mistakes(std::string_view type) const;
//   void set_learning_rate(double lr);  // what a config has as lr
//   std::unique_ptr<Optimizer> make(std::vector<ParameterGroup>, std::shared_ptr<Parts>) const;
//
// make() is defined where LibTorch is. The four before it may be left out.
template <typename T>
concept DescribesOptimizer = std::copyable<T> &&
    requires(T options, const T& fixed, OptionKeys& keys) {
  { T::kKind } -> std::convertible_to<StepKind>;
  options.describe(keys);
  { fixed.state_names() } -> std::convertible_to<std::vector<std::string>>;
};

// The options of whichever optimizer it is. A value.
class OptimizerOptions {
 public:
  template <typename T>
  requires(!std::same_as<T, OptimizerOptions> && DescribesOptimizer<T>)
      OptimizerOptions(T options)  // NOLINT(google-explicit-constructor): AdamWOptions{} is one
      : options_(std::make_shared<Held<T>>(std::move(options))) {}

  // The type of the struct.
  const std::type_info& type() const { return options_->type(); }
  // Null if it is another struct.
  template <typename T>
  const T* as() const {
    const auto* held = dynamic_cast<const Held<T>*>(options_.get());
    return held == nullptr ? nullptr : &held->options;
  }

  StepKind kind() const { return options_->kind(); }
  void describe(OptionKeys& keys);
  std::vector<std::string> state_names() const { return options_->state_names(); }
  // Bytes of state for each parameter in fp32, and for each that is moved as a part of a matrix.
  double state_bytes() const { return options_->state_bytes(); }
  double matrix_state_bytes() const;
  // The bytes that a checkpoint has for each parameter, as floats. Nothing where the state itself
  // is of floats.
  std::optional<double> saved_state_bytes() const;
  void set_learning_rate(double lr);
  // `type` is the first of the names that a config has it under, and empty where no config named
  // it.
  std::vector<OptionMistake> mistakes(std::string_view type) const {
    return options_->mistakes(type);
  }

 private:
  static constexpr double kFloatBytes = 4;

  struct Holder {
    virtual ~Holder() = default;
    virtual std::shared_ptr<Holder> clone() const = 0;
    virtual const std::type_info& type() const = 0;
    virtual StepKind kind() const = 0;
    virtual void describe(OptionKeys& keys) = 0;
    virtual std::vector<std::string> state_names() const = 0;
    virtual std::vector<std::string> matrix_state_names() const = 0;
    virtual double state_bytes() const = 0;
    virtual void set_learning_rate(double lr) = 0;
    virtual std::vector<OptionMistake> mistakes(std::string_view type) const = 0;
  };

  template <typename T>
  struct Held final : Holder {
    explicit Held(T given) : options(std::move(given)) {}

    std::shared_ptr<Holder> clone() const override { return std::make_shared<Held>(options); }
    const std::type_info& type() const override { return typeid(T); }
    StepKind kind() const override { return T::kKind; }
    void describe(OptionKeys& keys) override { options.describe(keys); }
    std::vector<std::string> state_names() const override { return options.state_names(); }
    std::vector<std::string> matrix_state_names() const override {
      if constexpr (requires { options.matrix_state_names(); })
        return options.matrix_state_names();
      else
        return options.state_names();
    }
    double state_bytes() const override {
      if constexpr (requires { options.state_bytes(); })
        return options.state_bytes();
      else
        return kFloatBytes * static_cast<double>(options.state_names().size());
    }
    void set_learning_rate([[maybe_unused]] double lr) override {
      if constexpr (requires { options.set_learning_rate(lr); }) options.set_learning_rate(lr);
    }
    std::vector<OptionMistake> mistakes(std::string_view type) const override {
      if constexpr (requires { options.mistakes(type); })
        return options.mistakes(type);
      else
        return {};
    }

    T options;
  };

  std::shared_ptr<Holder> options_;  // shared by copies until one of them is walked through
};

// The keys and their values, in words.
struct OptionText {
  std::string key;
  std::string value;

  bool operator==(const OptionText&) const = default;
};
std::vector<OptionText> texts_of(OptimizerOptions options);

// UsageError, with the name of the optimizer and the numbers, where a value is outside its range or
// values do not fit together. For options that no config was read for.
void check_options(std::string_view name, OptimizerOptions options);

}  // namespace lockstep::optim
