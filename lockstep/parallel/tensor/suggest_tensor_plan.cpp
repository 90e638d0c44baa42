#include <lockstep/parallel/tensor/suggest_tensor_plan.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>
#include <lockstep/parallel/tensor/parallelize_module.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

namespace {

// A rehearsal runs a model on one process as the first rank of many would run it, to see what a
// plan costs.

// The first rank of a group that has no others. Calls send nothing: gathers repeat this rank's part
// for every rank, and sums are this rank's. Shapes are those of a real group, values are not.
//
// Threading: as any group. Failure: UsageError for calls that plans never make.
class RehearsalGroup final : public comm::Communicator {
 public:
  explicit RehearsalGroup(int num_ranks);

  std::string backend() const override { return "rehearsal"; }
  bool canonical_order() const override { return false; }
  std::optional<std::vector<std::uint64_t>> sent_bytes() const override { return {}; }

  struct Calls {
    std::int64_t sums = 0;
    std::int64_t summed_bytes = 0;
    std::int64_t gathered_bytes = 0;  // of whole tensors
  };
  const Calls& calls() const { return calls_; }
  void forget_calls() { calls_ = {}; }

 private:
  std::shared_ptr<comm::PendingCall> do_start(comm::Call call) override;
  std::shared_ptr<Communicator> do_split(const comm::SplitRequest& request,
                                         Deadline deadline) override;
  void do_abort(const std::string&) override {}
  at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void do_check(comm::Operation, const at::Tensor&) const override {}

  Calls calls_;
};

// The gathers and calls that a step made with the layers of a plan.
struct Rehearsed {
  std::vector<Gathered> gathers;
  RehearsalGroup::Calls calls;
  std::vector<LayerUse> uses;
  std::int64_t parameter_bytes = 0;  // of a rank
};

class OverAtOnce final : public comm::PendingCall {
 public:
  bool done() const override { return true; }
  void wait_on_host(Deadline) override {}
  void wait() override {}
};

comm::GroupInfo info_of(int num_ranks) {
  comm::GroupInfo info{.name = "rehearsal"};
  info.global_ranks.resize(static_cast<std::size_t>(num_ranks));
  std::iota(info.global_ranks.begin(), info.global_ranks.end(), 0);
  return info;
}

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& one : tensors) bytes += static_cast<std::int64_t>(one.nbytes());
  return bytes;
}

constexpr milliseconds kTimeout{1000};

RehearsalGroup::RehearsalGroup(int num_ranks) : Communicator(info_of(num_ranks), kTimeout) {}

std::shared_ptr<comm::PendingCall> RehearsalGroup::do_start(comm::Call call) {
  const c10::NoGradGuard no_grad;
  switch (call.fingerprint.operation) {
    case comm::Operation::all_reduce:
      ++calls_.sums;
      calls_.summed_bytes += bytes_of(call.outputs);
      break;
    case comm::Operation::all_gather: {
      calls_.gathered_bytes += bytes_of(call.outputs);
      const at::Tensor& mine = call.inputs.front();
      if (call.outputs.size() == 1)
        call.outputs.front().view({size(), -1}).copy_(mine.view({1, -1}).expand({size(), -1}));
      else
        for (const at::Tensor& output : call.outputs) output.view({-1}).copy_(mine.view({-1}));
      break;
    }
    case comm::Operation::broadcast: break;
    default:
      throw UsageError("{} is no call of a tensor plan", comm::name(call.fingerprint.operation));
  }
  recorder().mark(call.flight_entry, flight::State::finished);
  return std::make_shared<OverAtOnce>();
}

std::shared_ptr<comm::Communicator> RehearsalGroup::do_split(const comm::SplitRequest&, Deadline) {
  throw UsageError("split is no call of a tensor plan");
}

at::Tensor RehearsalGroup::do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, dtype);
}

// Puts a model back as it was when this was made.
//
// Ownership: refers to the model. Failure: the destructor ends the process where LibTorch refuses
// to give a parameter its own memory back.
class Original {
 public:
  explicit Original(torch::nn::Module& model) : model_(model) {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model.parameters())
      parameters_.push_back({parameter, parameter.variable_data(),
                             torch::autograd::impl::version_counter(parameter), parameter.grad()});
    for (const at::Tensor& buffer : model.buffers()) buffers_.push_back({buffer, buffer.clone()});
    std::vector<c10::Device> devices = {at::kCPU};
    for (const Parameter& one : parameters_)
      if (one.tensor.is_cuda() && std::ranges::count(devices, one.tensor.device()) == 0)
        devices.push_back(one.tensor.device());
    for (const c10::Device& device : devices) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard lock(generator.mutex());
      generators_.push_back({generator, generator.clone()});
    }
  }
  ~Original() {
    const c10::NoGradGuard no_grad;
    forget_cuts(model_);
    for (const Parameter& one : parameters_) {
      one.tensor.mutable_grad() = at::Tensor();
      {
        const c10::impl::ExcludeDispatchKeyGuard unheard(intercept::kKey);
        one.tensor.set_data(one.data);
      }
      torch::autograd::impl::set_version_counter(one.tensor, one.version);
      if (one.gradient.defined()) one.tensor.mutable_grad() = one.gradient;
    }
    for (const auto& [buffer, values] : buffers_) buffer.copy_(values);
    for (auto& [generator, before] : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(before.get_state());
    }
  }
  Original(const Original&) = delete;
  Original& operator=(const Original&) = delete;

 private:
  struct Parameter {
    at::Tensor tensor, data;
    c10::VariableVersion version;
    at::Tensor gradient;
  };

  static void forget_cuts(torch::nn::Module& module) {
    std::string record;
    for (const auto& item : module.named_children())
      if (dynamic_cast<const nn::CutRecord*>(item.value().get()) != nullptr)
        record = item.key();
      else
        forget_cuts(*item.value());
    if (!record.empty()) module.unregister_module(record);
  }

  torch::nn::Module& model_;
  std::vector<Parameter> parameters_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  std::vector<std::pair<at::Generator, at::Generator>> generators_;
};

// Cuts the model by the plan over `num_ranks` ranks that are not there, runs the step, and backward
// from what it returns; then puts the model back as it was: parameters, gradients, buffers, and the
// default generators. An empty plan is allowed.
//
// Failure: UsageError for a plan that parallelize_module() refuses; what the step throws. The model
// is put back all the same.
Rehearsed rehearse(torch::nn::Module& model, const Plan& plan, int num_ranks,
                   const std::function<at::Tensor()>& step) {
  const auto group = std::make_shared<RehearsalGroup>(num_ranks);
  const Original original(model);
  Rehearsed rehearsed;
  std::shared_ptr<SplitOwner> owner;
  if (!plan.empty()) {
    parallelize_module(model, group, plan);
    for (const at::Tensor& parameter : model.parameters()) {
      if (is_cut(parameter)) owner = split_of(parameter)->owner;
      // Gradients that were there are those of the whole model.
      parameter.mutable_grad() = at::Tensor();
    }
    owner->gathers().trace();
  }
  for (const at::Tensor& parameter : model.parameters())
    rehearsed.parameter_bytes += static_cast<std::int64_t>(local_part(parameter).nbytes());
  group->forget_calls();
  const at::Tensor result = step();
  if (result.defined() && result.requires_grad()) result.sum().backward();
  if (owner != nullptr) {
    rehearsed.gathers = owner->gathers().all();
    rehearsed.uses = owner->gathers().uses();
  }
  rehearsed.calls = group->calls();
  return rehearsed;
}

// Why parallelize_module() would refuse the plan; empty if it would not.
std::string fault_of_plan(torch::nn::Module& model, const Plan& plan, int num_ranks) {
  try {
    check_plan(model, plan, RehearsalGroup(num_ranks));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

// A layer that may be cut, and what was found out about it.
struct Candidate {
  std::string name;
  std::int64_t elements = 0;  // of the table of an embedding
  std::vector<Cut> cuts;      // those that sizes allow and that have not gathered, best first
  std::optional<Cut> chosen;
  std::string reason;  // why it stays whole
};

std::string config_name(Cut cut) {
  switch (cut) {
    case Cut::column: return "column";
    case Cut::row: return "row";
    case Cut::heads: return "heads";
    case Cut::qkv: return "qkv";
  }
  LOCKSTEP_CHECK(false, "a cut without a name");
}

// The cuts that a kind of layer could have.
std::vector<Cut> cuts_of(const torch::nn::Module& module) {
  if (dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module) != nullptr)
    return {Cut::heads};
  if (dynamic_cast<const torch::nn::EmbeddingImpl*>(&module) != nullptr) return {Cut::row};
  if (dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr)
    return {Cut::column, Cut::qkv, Cut::row};
  return {};
}

// Candidates and the layer that each name of a model leads to, in the order of the model.
class Search {
 public:
  Search(torch::nn::Module& model, int num_ranks, const TracedStep& step)
      : model_(model), num_ranks_(num_ranks), step_(step) {
    std::set<const torch::nn::Module*> known;
    nn::internal::for_each_module(model, [&](const std::string& name, torch::nn::Module& module) {
      names_.push_back(name);
      const std::vector<Cut> cuts = cuts_of(module);
      if (cuts.empty() || !known.insert(&module).second) return;
      Candidate& one = candidates_.emplace_back();
      one.name = name;
      for (const Cut cut : cuts) {
        const std::string fault = fault_of_plan(model_, {{name, cut}}, num_ranks_);
        if (fault.empty()) one.cuts.push_back(cut);
        if (cut == cuts.front()) one.reason = fault;
      }
      if (const auto* const table = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module))
        one.elements = table->weight.numel();
      if (const auto* const heads =
              dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module)) {
        // Its output is cut with it.
        known.insert(heads->out_proj.get());
      }
    });
  }

  // The plan that gathers nothing, and which layers stay whole.
  SuggestedPlan find() {
    while (true) {
      trace();
      choose();
      SuggestedPlan suggested{.plan = plan()};
      const Rehearsed rehearsed = rehearse(model_, suggested.plan, num_ranks_, step_);
      if (!forbid_what_gathers(rehearsed.gathers)) {
        for (const Candidate& one : candidates_)
          if (!one.chosen) suggested.whole.push_back({one.name, one.reason});
        return suggested;
      }
    }
  }

 private:
  Candidate* candidate_of(const std::string& layer) {
    const auto found = std::ranges::find(candidates_, layer, &Candidate::name);
    return found == candidates_.end() ? nullptr : &*found;
  }

  // Cuts every layer along its outputs, to see which outputs go where.
  void trace() {
    Plan plan;
    for (const Candidate& one : candidates_)
      if (!one.cuts.empty()) plan.push_back({one.name, one.cuts.front()});
    uses_ = rehearse(model_, plan, num_ranks_, step_).uses;
    std::set<std::string> used;
    for (const LayerUse& use : uses_) used.insert(use.layer);
    for (Candidate& one : candidates_) {
      const bool by_heads = !one.cuts.empty() && one.cuts.front() == Cut::heads;
      if (one.cuts.empty() || by_heads || used.contains(one.name)) continue;
      one.cuts.clear();
      one.reason = "the step does not use it";
    }
  }

  void choose() {
    for (Candidate& one : candidates_) {
      one.chosen.reset();
      if (!one.cuts.empty() && one.cuts.front() == Cut::heads) one.chosen = Cut::heads;
    }
    for (const LayerUse& use : uses_) {
      Candidate* const one = candidate_of(use.layer);
      if (one == nullptr || one->chosen || one->cuts.empty()) continue;
      if (one->elements > 0) {
        if (one->elements > use.outputs)
          one->chosen = Cut::row;
        else
          one->reason = "its table is no larger than what a step looks up";
        continue;
      }
      const Candidate* const fed_by = use.fed_by.empty() ? nullptr : candidate_of(use.fed_by);
      const bool gets_part = fed_by != nullptr && fed_by->chosen && fed_by->chosen != Cut::row;
      const auto wanted =
          std::ranges::find_if(one->cuts, [&](Cut cut) { return gets_part == (cut == Cut::row); });
      if (wanted != one->cuts.end())
        one->chosen = *wanted;
      else if (one->reason.empty())
        one->reason = "no layer that is cut by columns feeds it";
    }
  }

  // Takes away the cuts whose results had to be gathered. False if there were none.
  bool forbid_what_gathers(const std::vector<Gathered>& gathers) {
    bool any = false;
    for (const Gathered& gathered : gathers) {
      Candidate* one = candidate_of(gathered.source);
      // A parameter of a layer: "attention.in_proj_weight".
      if (one == nullptr) one = candidate_of(gathered.source.substr(0, gathered.source.rfind('.')));
      if (one == nullptr || !one->chosen) continue;
      std::erase(one->cuts, *one->chosen);
      one->chosen.reset();
      one->reason = fmt::format("{} needs all of it: {} bytes a step", gathered.op, gathered.bytes);
      any = true;
    }
    return any;
  }

  // A pattern for the layers whose names differ in numbers alone, where it cuts all of them alike.
  Plan plan() const {
    std::map<std::string, std::vector<const Candidate*>> alike;
    std::vector<std::string> order;
    for (const Candidate& one : candidates_) {
      const std::string pattern = pattern_of(one.name);
      if (!alike.contains(pattern)) order.push_back(pattern);
      alike[pattern].push_back(&one);
    }
    Plan plan;
    for (const std::string& pattern : order) {
      const auto& all = alike[pattern];
      const auto num_matched = std::ranges::count_if(
          names_, [&](const std::string& name) { return nn::matches_layer(pattern, name); });
      const bool same = std::ranges::all_of(all, [&](const Candidate* one) {
        return one->chosen && one->chosen == all.front()->chosen;
      });
      if (same && num_matched == static_cast<std::ptrdiff_t>(all.size())) {
        plan.push_back({pattern, *all.front()->chosen});
        continue;
      }
      for (const Candidate* one : all)
        if (one->chosen) plan.push_back({one->name, *one->chosen});
    }
    return plan;
  }

  static std::string pattern_of(const std::string& name) {
    std::string pattern;
    for (std::size_t begin = 0; begin <= name.size();) {
      const std::size_t end = std::min(name.find('.', begin), name.size());
      const std::string part = name.substr(begin, end - begin);
      const bool is_number = !part.empty() && std::ranges::all_of(part, [](unsigned char c) {
        return std::isdigit(c);
      });
      pattern += (begin > 0 ? "." : "") + (is_number ? "*" : part);
      begin = end + 1;
    }
    return pattern;
  }

  torch::nn::Module& model_;
  const int num_ranks_;
  const TracedStep& step_;
  std::vector<std::string> names_;  // of all modules
  std::vector<Candidate> candidates_;
  std::vector<LayerUse> uses_;
};

void check_ranks(int num_ranks) {
  if (num_ranks < 2)
    throw UsageError("a tensor plan is for two ranks or more, and this one for {}", num_ranks);
}

}  // namespace

PlanCost cost_of_plan(torch::nn::Module& model, const Plan& plan, int num_ranks,
                      const TracedStep& step) {
  check_ranks(num_ranks);
  const Rehearsed rehearsed = rehearse(model, plan, num_ranks, step);
  PlanCost cost{.num_ranks = num_ranks,
                .gathers = rehearsed.gathers,
                .sums = rehearsed.calls.sums,
                .summed_bytes = rehearsed.calls.summed_bytes,
                .gathered_gradient_bytes = rehearsed.calls.gathered_bytes,
                .parameter_bytes = rehearsed.parameter_bytes};
  for (const Gathered& one : cost.gathers) cost.gathered_gradient_bytes -= one.bytes;
  for (const at::Tensor& parameter : model.parameters())
    cost.whole_parameter_bytes += static_cast<std::int64_t>(parameter.nbytes());
  return cost;
}

std::string PlanCost::text() const {
  std::string text = fmt::format(
      "on each of {} ranks {} of {} bytes of weights; a step adds up {} bytes in {} sums over the "
      "ranks",
      num_ranks, parameter_bytes, whole_parameter_bytes, summed_bytes, sums);
  if (gathered_gradient_bytes > 0)
    text += fmt::format(", and gathers {} bytes of gradients", gathered_gradient_bytes);
  text += gathers.empty() ? "; no operator gathers\n" : "\n";
  for (const Gathered& one : gathers)
    text += fmt::format("{} gathers what comes from '{}': {} bytes in {} calls\n", one.op,
                        one.source, one.bytes, one.calls);
  return text;
}

SuggestedPlan suggest_tensor_plan(torch::nn::Module& model, int num_ranks, const TracedStep& step) {
  check_ranks(num_ranks);
  SuggestedPlan suggested = Search(model, num_ranks, step).find();
  suggested.cost = cost_of_plan(model, suggested.plan, num_ranks, step);
  return suggested;
}

std::string SuggestedPlan::text() const {
  std::string text = "\"tensor_plan\": {";
  for (const PlannedCut& one : plan)
    text += fmt::format("{}\"{}\": \"{}\"", &one == &plan.front() ? "" : ", ", one.layers,
                        config_name(one.cut));
  text += "}\n" + cost.text();
  for (const Whole& one : whole)
    text += fmt::format("'{}' stays whole: {}\n", one.layer, one.reason);
  return text;
}

}  // namespace lockstep::tensor
