#include <lockstep/distributed/script_module.h>

#include <algorithm>
#include <functional>
#include <map>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/nn/modules/container/modulelist.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>

namespace lockstep {

namespace {

using torch::nn::Module;

// The name of a script's class without its folder and what makes it unique: "Sequential".
std::string class_name(const torch::jit::Module& script) {
  const auto name = script.type()->name();
  return name ? name->name() : "ScriptModule";
}

bool trains(const torch::jit::Module& script) {
  const auto slot = script.type()->findAttributeSlot("training");
  return !slot || script._ivalue()->getSlot(*slot).toBool();
}

void set_training(const torch::jit::Module& script, bool on) {
  if (const auto slot = script.type()->findAttributeSlot("training"))
    script._ivalue()->setSlot(*slot, on);
}

// A module within a script.
template <typename Base>
class Part final : public Base {
 public:
  explicit Part(torch::jit::Module script) : Base(base_of(script)), script_(std::move(script)) {}

  void train(bool on = true) override {
    set_training(script_, on);
    Base::train(on);
  }
  bool is_training() const noexcept override { return trains(script_); }

 private:
  static Base base_of(const torch::jit::Module& script) {
    if constexpr (std::is_same_v<Base, Module>)
      return Module(class_name(script));
    else
      return Base();
  }

  torch::jit::Module script_;
};

// Modules whose children are the elements of a list are lists here, too: sharding makes a unit of
// each block.
std::shared_ptr<Module> part_of(const torch::jit::Module& script) {
  const std::string name = class_name(script);
  if (name == "ModuleList" || name == "Sequential")
    return std::make_shared<Part<torch::nn::ModuleListImpl>>(script);
  return std::make_shared<Part<Module>>(script);
}

// Registers what a script has in a module.
class Registration {
 public:
  using Found = std::function<void(const std::string& name, const torch::jit::ModulePtr& holder,
                                   std::size_t slot, bool is_parameter)>;
  explicit Registration(Found found) : found_(std::move(found)) {}

  void fill(Module& module, const torch::jit::Module& script, const std::string& prefix) {
    const auto type = script.type();
    const torch::jit::ModulePtr object = script._ivalue();
    for (std::size_t slot = 0; slot < type->numAttributes(); ++slot) {
      const std::string& name = type->getAttributeName(slot);
      const c10::IValue& value = object->getSlot(slot);
      if (type->getAttribute(slot)->is_module()) {
        add_part(module, name, torch::jit::Module(value.toObject()), prefix + name + ".");
      } else if (value.isTensor() && value.toTensor().defined()) {
        const at::Tensor& tensor = value.toTensor();
        if (type->is_parameter(slot))
          module.register_parameter(name, tensor, tensor.requires_grad());
        else if (type->is_buffer(slot))
          module.register_buffer(name, tensor);
        else
          continue;
        found_(prefix + name, object, slot, type->is_parameter(slot));
      }
    }
  }

 private:
  void add_part(Module& module, const std::string& name, const torch::jit::Module& script,
                const std::string& prefix) {
    std::shared_ptr<Module>& part = parts_[script._ivalue().get()];
    if (part == nullptr) {
      part = part_of(script);
      fill(*part, script, prefix);
    }
    module.register_module(name, part);
  }

  Found found_;
  std::unordered_map<const void*, std::shared_ptr<Module>> parts_;  // one may have several names
};

}  // namespace

ScriptModuleImpl::ScriptModuleImpl(torch::jit::Module script)
    : Module(class_name(script)), script_(std::move(script)) {
  Registration([this](const std::string& name, const torch::jit::ModulePtr& holder,
                      std::size_t slot, bool is_parameter) {
    places_.push_back({name, holder, slot, holder->getSlot(slot).toTensor(), is_parameter});
  }).fill(*this, script_, "");
}

c10::IValue ScriptModuleImpl::call(std::vector<c10::IValue> inputs, const std::string& method) {
  const torch::jit::GraphOptimizerEnabledGuard one_by_one(false);
  const intercept::KeptError kept;
  c10::IValue result;
  try {
    result = script_.get_method(method)(std::move(inputs));
  } catch (...) {
    for (const Place& place : places_) place.holder->setSlot(place.slot, place.tensor);
    // TorchScript's interpreter makes another type of what comes out of an operator.
    kept.rethrow_if_any();
    throw;
  }
  follow_script();
  return result;
}

at::Tensor ScriptModuleImpl::forward(const at::Tensor& input) {
  const c10::IValue result = call({input});
  if (!result.isTensor())
    throw UsageError("the TorchScript model '{}' returns a {}: use call({{inputs...}}), which "
                     "returns anything",
                     name(), result.type()->str());
  return result.toTensor();
}

void ScriptModuleImpl::follow_script() {
  std::string fault;
  for (const Place& place : places_) {
    const c10::IValue value = place.holder->getSlot(place.slot);
    if (value.isTensor() && value.toTensor().is_same(place.tensor)) continue;
    place.holder->setSlot(place.slot, place.tensor);
    const at::Tensor now = value.isTensor() ? value.toTensor() : at::Tensor();
    if (place.is_parameter) {
      fault =
          fmt::format("the TorchScript model '{}' gave its parameter '{}' another tensor, which "
                      "would be trained on each rank by itself: write to it in place",
                      name(), place.name);
    } else if (!now.defined() || now.sizes() != place.tensor.sizes() ||
               now.scalar_type() != place.tensor.scalar_type()) {
      fault =
          fmt::format("the TorchScript model '{}' gave its buffer '{}' a tensor of another shape "
                      "or type, which checkpoints could not go back to: keep those, or make it "
                      "an attribute that is no buffer",
                      name(), place.name);
    } else {
      const c10::NoGradGuard no_grad;
      place.tensor.copy_(now);
    }
  }
  // Every place has its own tensor again.
  if (!fault.empty()) throw UsageError("{}", fault);
}

void ScriptModuleImpl::train(bool on) {
  set_training(script_, on);
  Module::train(on);
}

bool ScriptModuleImpl::is_training() const noexcept { return trains(script_); }

namespace internal {

namespace {

// Tensors by the part of their names before the first dot.
struct Tree {
  std::vector<NamedTensor> parameters, buffers;
  std::vector<std::string> order;
  std::map<std::string, Tree> inside;

  Tree& at(const std::string& name) {
    if (!inside.contains(name)) order.push_back(name);
    return inside[name];
  }
  // Whether it is a list by the names in it: "0", "1", …
  bool is_list() const {
    return parameters.empty() && buffers.empty() &&
           std::ranges::all_of(order, [](const std::string& name) {
             return name.find_first_not_of("0123456789") == std::string::npos;
           });
  }
};

void check_name(const NamedTensor& one) {
  const std::string dotted = "." + one.name + ".";
  if (dotted.find("..") != std::string::npos)
    throw UsageError("wrap_parameters() got a tensor of the name '{}': names are words, with dots "
                     "between them where modules hold each other",
                     one.name);
  if (!one.tensor.defined())
    throw UsageError("wrap_parameters() got no tensor for '{}': leave it out", one.name);
}

void add(Tree& root, const NamedTensor& one, std::vector<NamedTensor> Tree::*kind) {
  check_name(one);
  Tree* tree = &root;
  std::string name = one.name;
  for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.')) {
    tree = &tree->at(name.substr(0, dot));
    name.erase(0, dot + 1);
  }
  for (const auto* const tensors : {&tree->parameters, &tree->buffers})
    for (const NamedTensor& there : *tensors)
      if (there.name == name)
        throw UsageError("wrap_parameters() got two tensors of the name '{}'", one.name);
  (tree->*kind).push_back({name, one.tensor});
}

std::shared_ptr<Module> made_of(const Tree& tree, const std::string& name) {
  const auto module = tree.is_list() ? std::make_shared<torch::nn::ModuleListImpl>()
                                     : std::make_shared<Module>(name);
  for (const auto& [tensor_name, tensor] : tree.parameters)
    module->register_parameter(tensor_name, tensor, tensor.requires_grad());
  for (const auto& [tensor_name, tensor] : tree.buffers)
    module->register_buffer(tensor_name, tensor);
  for (const std::string& inner : tree.order)
    module->register_module(inner, made_of(tree.inside.at(inner), inner));
  return module;
}

}  // namespace

std::shared_ptr<Module> module_of_tensors(const std::vector<NamedTensor>& parameters,
                                          const std::vector<NamedTensor>& buffers) {
  Tree tree;
  for (const NamedTensor& one : parameters) {
    if (one.tensor.defined() && !one.tensor.is_leaf())
      throw UsageError("wrap_parameters() got '{}', which was computed from other tensors: give it "
                       "those, which are what is trained",
                       one.name);
    add(tree, one, &Tree::parameters);
  }
  for (const NamedTensor& one : buffers) add(tree, one, &Tree::buffers);
  return made_of(tree, "wrap_parameters()");
}

}  // namespace internal

}  // namespace lockstep
