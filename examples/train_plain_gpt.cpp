// A GPT in plain torch::nn learns to add. The engine shards it over the ranks (ZeRO-3), as the
// config below says: no rank ever holds all of its weights.
//
//   lockstep run --nproc-per-node 2 ./train_plain_gpt [WEIGHTS]
//
// With WEIGHTS it writes the trained weights there, whole, as a safetensors file. Any number of
// ranks prints the same losses.
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

namespace nn = torch::nn;

constexpr const char* kConfig = R"({
  "train_batch_size": 64,
  "zero_optimization": {"stage": 3},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
  "max_steps": 300,
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 30, "warmup_type": "linear"}},
  "gradient_clipping": 1.0,
  "seed": 1
})";

constexpr std::int64_t kWidth = 48, kHeads = 4, kLayers = 3;
constexpr const char* kLetters = "0123456789+=.";      // a token is a place in it
constexpr std::int64_t kVocabulary = 13, kLength = 7;  // such as "8+5=13."

struct Block : nn::Module {
  Block() {
    register_module("norm1", norm1);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("norm2", norm2);
    register_module("mlp", mlp);
  }

  torch::Tensor forward(torch::Tensor x) {  // [samples, tokens, kWidth]
    const auto samples = x.size(0), tokens = x.size(1);
    const auto heads =
        qkv(norm1(x)).view({samples, tokens, 3, kHeads, -1}).permute({2, 0, 3, 1, 4});
    const auto scores = torch::matmul(heads[0], heads[1].transpose(2, 3)) /
                        std::sqrt(static_cast<double>(kWidth / kHeads));
    const auto later = torch::ones({tokens, tokens}, x.options().dtype(torch::kBool)).triu(1);
    const auto mixed = torch::matmul(scores.masked_fill(later, -INFINITY).softmax(-1), heads[2]);
    x = x + out(mixed.transpose(1, 2).reshape({samples, tokens, kWidth}));
    return x + mlp->forward(norm2(x));
  }

  nn::LayerNorm norm1{nn::LayerNormOptions({kWidth})}, norm2{nn::LayerNormOptions({kWidth})};
  nn::Linear qkv{kWidth, 3 * kWidth}, out{kWidth, kWidth};
  nn::Sequential mlp{nn::Linear(kWidth, 4 * kWidth), nn::GELU(), nn::Linear(4 * kWidth, kWidth)};
};

struct Gpt : nn::Module {
  Gpt() {
    register_module("tokens", tokens);
    register_module("positions", positions);
    register_module("blocks", blocks);
    for (std::int64_t i = 0; i < kLayers; ++i) blocks->push_back(std::make_shared<Block>());
    register_module("norm", norm);
    nn::init::normal_(tokens->weight, 0, 0.1);
  }

  // [samples, tokens] → [samples, tokens, kVocabulary]. The head shares the embedding's weights.
  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = tokens(ids) + positions(torch::arange(ids.size(1), ids.options()));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::matmul(norm(x), tokens->weight.t());
  }

  nn::Embedding tokens{kVocabulary, kWidth}, positions{kLength, kWidth};
  nn::ModuleList blocks;
  nn::LayerNorm norm{nn::LayerNormOptions({kWidth})};
};

// Sums such as "8+5=13." as tokens: [samples, kLength]
torch::Tensor sums(std::int64_t count) {
  const auto a = torch::randint(10, {count}, torch::kLong);
  const auto b = torch::randint(10, {count}, torch::kLong);
  const auto sum = a + b;
  const auto letter = [&](std::int64_t token) { return torch::full({count}, token, torch::kLong); };
  return torch::stack(
      {a, letter(10), b, letter(11), sum.div(10, "floor"), sum.remainder(10), letter(12)}, 1);
}

std::string text_of(const torch::Tensor& tokens) {
  std::string text;
  for (std::int64_t i = 0; i < tokens.size(0); ++i)
    text += kLetters[tokens[i].item<std::int64_t>()];
  return text;
}

void train(const std::string& weights) {
  auto engine =
      lockstep::initialize(lockstep::EngineConfig::from_json(kConfig), [] { return Gpt(); });
  auto& dist = engine.dist();
  constexpr std::int64_t kFirst = 3;  // the model learns what comes after "8+5"

  for (int step = 1; step <= 300; ++step) {
    // All ranks draw the same batch, and share it out.
    torch::manual_seed(static_cast<std::uint64_t>(step));
    const auto batch = sums(engine.train_batch_size())
                           .slice(0, dist.rank(), {}, dist.world_size())
                           .to(dist.device());
    const auto targets = batch.narrow(1, kFirst + 1, kLength - kFirst - 1);
    const auto scores =
        engine.forward(batch.narrow(1, 0, kLength - 1)).narrow(1, kFirst, targets.size(1));
    const auto loss = torch::cross_entropy_loss(scores.flatten(0, 1), targets.flatten(), {},
                                                torch::Reduction::Sum);
    engine.backward(loss, targets.numel());  // a sum over so many tokens
    engine.step();
    if (step % 50 != 0) continue;
    const double mean = engine.last_step().loss;
    if (dist.is_main()) std::printf("step %d: loss %.5f\n", step, mean);
  }

  // All ranks compute, as each of them holds a part; the main rank prints.
  const torch::NoGradGuard no_grad;
  auto text = sums(1).to(dist.device());
  for (std::int64_t at = kFirst + 1; at < kLength; ++at)
    text.select(1, at).copy_(engine.forward(text.narrow(1, 0, at)).select(1, at - 1).argmax(-1));
  if (dist.is_main()) std::printf("%s\n", text_of(text[0]).c_str());
  if (!weights.empty()) engine.save_model(weights);
}

int main(int count, char** words) {
  try {
    train(count > 1 ? words[1] : "");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_plain_gpt: %s\n", error.what());
    return 1;
  }
}
