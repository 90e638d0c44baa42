#include <cmath>

#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;
using torch::nn::MultiheadAttention;
using torch::nn::MultiheadAttentionOptions;

constexpr std::int64_t kWidth = 16, kAttentionHeads = 4, kPositions = 5, kSamples = 3;

MultiheadAttentionOptions plain_options() { return {kWidth, kAttentionHeads}; }

// What an attention is called with.
struct Inputs {
  at::Tensor query, key, value;
};

struct Attention : torch::nn::Module {
  explicit Attention(const MultiheadAttentionOptions& options)
      : attention(register_module("attention", MultiheadAttention(options))) {}

  MultiheadAttention attention;
};

struct AttentionCase {
  std::string name;
  MultiheadAttentionOptions options = plain_options();
  // From an input of shape [positions, samples, width].
  std::function<Inputs(const at::Tensor&)> inputs = [](const at::Tensor& x) {
    return Inputs{x, x, x};
  };
  bool masks_positions = false;
  bool masks_keys = false;
  bool need_weights = false;
  bool average = true;
};

at::Tensor later_positions(const at::Tensor& x) {
  return at::full({kPositions, kPositions}, -INFINITY, x.options()).triu(1);
}

at::Tensor padding_of(const at::Tensor& x) {
  at::Tensor padded = at::zeros({kSamples, kPositions}, x.options().dtype(at::kBool));
  padded[1][4] = true;
  padded[2].slice(0, 3) = true;
  return padded;
}

at::Tensor attention_loss(const AttentionCase& one, Attention& model, const at::Tensor& x) {
  const Inputs inputs = one.inputs(x);
  const auto [output, weights] = model.attention(
      inputs.query, inputs.key, inputs.value, one.masks_keys ? padding_of(x) : at::Tensor(),
      one.need_weights, one.masks_positions ? later_positions(x) : at::Tensor(), one.average);
  at::Tensor loss = uneven_loss(output);
  if (one.need_weights) {
    // Those of each head are cut.
    const at::Tensor all = one.average ? weights : full_tensor(weights);
    loss = loss + uneven_loss(all) + full_tensor(weights).detach().sum();
  }
  return loss;
}

Inputs to_a_memory(const at::Tensor& x) {
  const at::Tensor memory = x.detach().cos();
  return {x, memory, memory};
}

Inputs of_three(const at::Tensor& x) { return {x, x.sin(), x * x}; }

std::vector<AttentionCase> attention_cases() {
  std::vector<AttentionCase> all = {
      {.name = "of itself"},
      {.name = "of a memory", .inputs = to_a_memory},
      {.name = "of three inputs", .inputs = of_three},
      {.name = "without bias", .options = plain_options().bias(false)},
      {.name = "without bias, of a memory",
       .options = plain_options().bias(false),
       .inputs = to_a_memory},
      {.name = "with masks", .masks_positions = true, .masks_keys = true},
      {.name = "with dropout", .options = plain_options().dropout(0.3), .masks_keys = true},
      {.name = "with its weights", .masks_positions = true, .need_weights = true},
      {.name = "with the weights of each head", .need_weights = true, .average = false},
      {.name = "with keys and values of its own",
       .options = plain_options().add_bias_kv(true).add_zero_attn(true),
       .masks_positions = true,
       .masks_keys = true}};
  all.push_back({.name = "of other widths",
                 .options = plain_options().kdim(6).vdim(6),
                 .inputs = [](const at::Tensor& x) {
                   return Inputs{x, x.slice(2, 0, 6).sin(), x.slice(2, 6, 12)};
                 }});
  all.push_back(all.back());
  all.back().name += ", without bias";
  all.back().options.bias(false);
  return all;
}

void check_attention(Cells& cells, const AttentionCase& one, const nn::Precision& precision) {
  expect_same_training<Attention>(cells,
                                  {.make =
                                       [&] {
                                         auto model = std::make_shared<Attention>(one.options);
                                         // LibTorch begins with zeros here.
                                         const torch::NoGradGuard no_grad;
                                         if (one.options.bias())
                                           model->attention->in_proj_bias.normal_(0, 0.3);
                                         return model;
                                       },
                                   .plan = {{"attention", Cut::heads}},
                                   .input = {kPositions, kSamples, kWidth},
                                   .loss = [&](Attention& model, const at::Tensor& x,
                                               int) { return attention_loss(one, model, x); },
                                   .optimizer = momentum},
                                  precision);
}

struct Layers : torch::nn::Module {
  Layers() {
    const auto options = torch::nn::TransformerOptions(kWidth, kAttentionHeads, 1, 2)
                             .dim_feedforward(24)
                             .dropout(0.2);
    transformer = register_module("transformer", torch::nn::Transformer(options));
  }
  at::Tensor forward(const at::Tensor& x) { return transformer(x, x.flip({0}).sin()); }

  torch::nn::Transformer transformer{nullptr};
};

const Plan kTransformerPlan = {{"transformer.*.layers.*.self_attn", Cut::heads},
                               {"transformer.*.layers.*.multihead_attn", Cut::heads},
                               {"transformer.*.layers.*.linear1", Cut::column},
                               {"transformer.*.layers.*.linear2", Cut::row}};

void check_whole_transformer(Cells& cells, const nn::Precision& precision) {
  expect_same_training<Layers>(cells,
                               {.make = [] { return std::make_shared<Layers>(); },
                                .plan = kTransformerPlan,
                                .input = {kPositions, kSamples, kWidth},
                                .loss = [](Layers& model, const at::Tensor& x,
                                           int) { return uneven_loss(model.forward(x)); },
                                .optimizer = momentum,
                                .max_norm = 0.01},
                               precision);
}

// Attention as people write it with Linear: queries, keys and values from one product.
struct Packed : torch::nn::Module {
  enum class Split { by_chunk, by_view, by_narrow };

  Packed(Split split, double share)
      : qkv(register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth))),
        out(register_module("out", torch::nn::Linear(kWidth, kWidth))),
        drop(register_module("drop", torch::nn::Dropout(share))),
        split(split) {}

  std::vector<at::Tensor> parts(const at::Tensor& x) {
    const at::Tensor all = qkv(x);
    if (split == Split::by_chunk) return all.chunk(3, -1);
    if (split == Split::by_narrow)
      return {all.narrow(-1, 0, kWidth), all.narrow(-1, kWidth, kWidth), all.slice(-1, 2 * kWidth)};
    return all.view({x.size(0), x.size(1), 3, kWidth}).unbind(2);
  }

  at::Tensor forward(const at::Tensor& x) {  // [samples, positions, width]
    const auto of_heads = [&](const at::Tensor& part) {
      return part.view({x.size(0), x.size(1), kAttentionHeads, -1}).transpose(1, 2);
    };
    const auto all = parts(x);
    const at::Tensor scores =
        at::matmul(of_heads(all[0]), of_heads(all[1]).transpose(-2, -1)) / 2.0;
    const at::Tensor later = at::ones({x.size(1), x.size(1)}, x.options().dtype(at::kBool)).triu(1);
    const at::Tensor weights = drop(at::softmax(scores.masked_fill(later, -INFINITY), -1));
    const at::Tensor mixed = at::matmul(weights, of_heads(all[2]));
    return out(mixed.transpose(1, 2).contiguous().view(x.sizes()));
  }

  torch::nn::Linear qkv, out;
  torch::nn::Dropout drop;
  Split split;
};

void check_packed(Cells& cells, Packed::Split split, const nn::Precision& precision) {
  expect_same_training<Packed>(cells,
                               {.make = [=] { return std::make_shared<Packed>(split, 0.2); },
                                .plan = {{"qkv", Cut::qkv}, {"out", Cut::row}},
                                .input = {kSamples, kPositions, kWidth},
                                .loss = [](Packed& model, const at::Tensor& x,
                                           int) { return uneven_loss(model.forward(x)); },
                                .optimizer = momentum},
                               precision);
}

// The names and elements of the calls that `body` makes.
std::string calls_of(comm::Communicator& group, const std::function<void()>& body) {
  const auto before = group.recorder().last_sequence();
  body();
  std::string calls;
  for (const flight::Entry& entry : group.recorder().entries())
    if (entry.sequence > before)
      calls += entry.operation + entry.summary.substr(entry.summary.find(" (")) + " ";
  return calls;
}

// A layer has a sum of its output for attention and one for the MLP, and one of its input for each
// in backward.
void check_attention_traffic(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  const auto group = cells.group()->split(0, cells.rank(), "counted attention");
  torch::nn::TransformerEncoderLayer layer(
      torch::nn::TransformerEncoderLayerOptions(kWidth, kAttentionHeads).dim_feedforward(24));
  parallelize_module(*layer, group,
                     {{"self_attn", Cut::heads}, {"linear1", Cut::column}, {"linear2", Cut::row}});
  const at::Tensor x = at::randn({kPositions, kSamples, kWidth}).requires_grad_();
  const std::string sum = fmt::format("all_reduce (sum of {} float32) ", x.numel());
  at::Tensor y;
  const std::string forward = calls_of(*group, [&] { y = layer->forward(x); });
  cells.expect(forward == sum + sum, "forward asks for " + forward);
  const std::string backward = calls_of(*group, [&] { uneven_loss(y).backward(); });
  cells.expect(backward == sum + sum, "backward asks for " + backward);
  // The mean of the heads' weights is one sum more, where it is used.
  MultiheadAttention attention(plain_options());
  parallelize_module(*attention, group, {{"", Cut::heads}});
  at::Tensor weights;
  const std::string output = calls_of(*group, [&] { weights = std::get<1>(attention(x, x, x)); });
  cells.expect(output == sum, "attention asks for " + output);
  const std::string used = calls_of(*group, [&] { weights = weights.square(); });
  cells.expect(
      used == fmt::format("all_reduce (sum of {} float32) ", kSamples * kPositions * kPositions),
      "weights ask for " + used);
}

void check_attention_parts(Cells& cells) {
  const auto one = [] {
    torch::manual_seed(3);
    return std::make_shared<Attention>(plain_options().add_bias_kv(true));
  };
  const auto whole = one(), cut = one(), other = one();
  auto parallelized = parallelize_module(*cut, cells.group(), {{"attention", Cut::heads}});
  if (cells.num_ranks() > 1) {
    const auto parts = nn::cut_parameters(*cut);
    cells.expect(parts.size() == 5, fmt::format("{} parts", parts.size()));
    for (const auto& part : parts) {
      const at::Tensor wanted = whole->named_parameters()[part.name];
      cells.expect(part.parameter.numel() * cells.num_ranks() == wanted.numel(),
                   part.name + " is no part");
      cells.expect_same(part.parameter.flatten(), mesh::part_of(wanted, part.placement).flatten(),
                        part.name);
    }
  }
  {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : other->parameters()) parameter.zero_();
  }
  auto of_other = parallelize_module(*other, cells.group(), {{"attention", Cut::heads}});
  of_other.load_full_state_dict(parallelized.full_state_dict());
  expect_same_weights(cells, *other, *whole, 0);
}

void check_attention_mistakes(Cells& cells) {
  const int ranks = cells.num_ranks();
  const auto refused = [&](const MultiheadAttentionOptions& options, const Plan& plan,
                           const std::string& part) {
    Attention model(options);
    cells.expect_usage_error([&] { parallelize_module(model, cells.group(), plan); }, part);
    for (const at::Tensor& parameter : model.parameters())
      cells.expect(!is_cut(parameter), "something is cut all the same");
  };
  refused(plain_options(), {{"attention", Cut::column}},
          "'attention' of the plan cuts by columns, is a 'torch::nn::MultiheadAttention'");
  refused(plain_options(), {{"attention.out_proj", Cut::heads}}, "by heads, is a");
  refused(plain_options(), {{"attention", Cut::heads}, {"attention.out_proj", Cut::row}},
          "'attention' and 'attention.out_proj' of the plan cut it in different ways");
  if (ranks == 1) return;
  MultiheadAttention attention(plain_options());
  parallelize_module(*attention, cells.group(), {{"", Cut::heads}});
  const at::Tensor x = at::ones({kPositions, kSamples, kWidth});
  const at::Tensor weights = std::get<1>(attention(x, x, x));
  cells.expect_usage_error([&] { weights.detach_().zero_(); }, "write to a clone()");
  refused({15 * ranks, 3}, {{"attention", Cut::heads}},
          fmt::format("'attention' has 3 heads, which 'attention' of the plan cuts over the {} "
                      "ranks",
                      ranks));
  torch::nn::Linear odd(4, 3 * 5);
  cells.expect_usage_error(
      [&] {
        parallelize_module(*odd, cells.group(), {{"", Cut::qkv}});
      },
      fmt::format("15 is no multiple of {}", 3 * ranks));
}

}  // namespace

void check_plain_attention(Cells& cells) {
  for (const nn::Precision& precision : kPlainPrecisions) {
    for (const AttentionCase& one : attention_cases())
      cells.cell(fmt::format("attention {}, {}", one.name, precision.text()),
                 [&] { check_attention(cells, one, precision); });
    cells.cell(fmt::format("Transformer, {}", precision.text()),
               [&] { check_whole_transformer(cells, precision); });
    for (const auto& [split, name] :
         {std::pair(Packed::Split::by_chunk, "chunk"), std::pair(Packed::Split::by_view, "view"),
          std::pair(Packed::Split::by_narrow, "narrow")})
      cells.cell(fmt::format("packed attention by {}, {}", name, precision.text()),
                 [&, split = split] { check_packed(cells, split, precision); });
  }
  cells.cell("what attention sends", [&] { check_attention_traffic(cells); });
  cells.cell("parts of an attention", [&] { check_attention_parts(cells); });
  cells.cell("attention that cannot be cut", [&] { check_attention_mistakes(cells); });
}

}  // namespace lockstep::tensor
