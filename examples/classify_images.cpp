// Classifies images of digits with a small convolutional net, on any number of ranks.
// DistributedTrainer runs the training loop.
//
//   lockstep run --nproc-per-node 2 ./classify_images --output runs/digits
//
// Alone, or under torchrun --no-python, mpirun or srun, it runs the same. With --output it keeps
// checkpoints, metrics and a picture of the loss; started again, it goes on where it was.
//
// The number of ranks does not change the answer: --batch is divided among the ranks, the batch
// norms see the samples of all of them, and neither the order of samples nor their augmentation
// depends on how many ranks there are. 1, 2 or 4 ranks give the same losses but for rounding.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

namespace nn = torch::nn;

// ---- the data ----------------------------------------------------------------------------------

// Digits as pixels: ten of them side by side, 5 wide and 7 high, a column apart.
constexpr std::array<const char*, 7> kFont = {
    // clang-format off
    " ###    #    ###  #####    #  #####   ##  #####  ###   ### ",
    "#   #  ##   #   #    #    ##  #      #        # #   # #   #",
    "#  ##   #       #   #    # #  ####  #        #  #   # #   #",
    "# # #   #      #     #  #  #      # ####    #    ###   ####",
    "##  #   #     #       # #####     # #   #  #    #   #     #",
    "#   #   #    #    #   #    #  #   # #   #  #    #   #    # ",
    " ###   ###  #####  ###     #   ###   ###   #     ###   ##  ",
    // clang-format on
};
constexpr int kWidth = 5, kHeight = 7, kSide = 16;

// A dataset in the form of torch::data, with get() and size(). An image is one digit, somewhere in
// the image, more or less bright, under noise. It is a function of (seed, index), so every rank has
// the same images.
class Digits : public torch::data::datasets::Dataset<Digits> {
 public:
  Digits(std::size_t size, std::uint32_t seed) : size_(size), seed_(seed) {}

  torch::data::Example<> get(std::size_t index) override {
    std::seed_seq seeds{seed_, static_cast<std::uint32_t>(index)};
    std::minstd_rand random(seeds);
    std::normal_distribution<float> noise(0, 0.2f);
    const int digit = std::uniform_int_distribution(0, 9)(random);
    const int left = std::uniform_int_distribution(0, kSide - kWidth)(random);
    const int top = std::uniform_int_distribution(0, kSide - kHeight)(random);
    const float brightness = std::uniform_real_distribution(0.6f, 1.4f)(random);

    torch::Tensor image = torch::empty({1, kSide, kSide});
    auto pixels = image.accessor<float, 3>();
    for (int y = 0; y < kSide; ++y)
      for (int x = 0; x < kSide; ++x) {
        const bool inside =
            y >= top && y < top + kHeight && x >= left && x < left + kWidth &&
            kFont[static_cast<std::size_t>(y - top)][digit * (kWidth + 1) + x - left] == '#';
        pixels[0][y][x] = (inside ? brightness : 0) + noise(random);
      }
    return {image, torch::tensor(digit, torch::kLong)};
  }

  torch::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
  std::uint32_t seed_;
};

// A change of the training images, another one in each epoch: moved by up to a pixel, with more or
// less contrast. The numbers are drawn for the image, whichever rank and thread loads it.
torch::Tensor moved_and_faded(const torch::Tensor& image, const torch::Generator& random) {
  const auto corner = torch::randint(3, {2}, random, torch::kLong);
  const auto contrast = 0.8 + 0.4 * torch::rand({1}, random);
  const auto framed = nn::functional::pad(image, nn::functional::PadFuncOptions({1, 1, 1, 1}));
  return contrast * framed.narrow(1, corner[0].item<std::int64_t>(), kSide)
                        .narrow(2, corner[1].item<std::int64_t>(), kSide);
}

// ---- the model ---------------------------------------------------------------------------------

// Plain torch::nn, which knows nothing of ranks. SiLU and average pools are smooth. ReLU and max
// pools decide between values that may differ only by rounding, which would make runs on one and on
// two ranks differ by more.
struct Net : nn::Module {
  Net() {
    register_module("features", features);
    register_module("classes", classes);
  }

  // [images, 1, 16, 16] → [images, 10]
  torch::Tensor forward(const torch::Tensor& images) {
    return classes->forward(features->forward(images).flatten(1));
  }

  static nn::Conv2d convolution(int from, int to) {
    return nn::Conv2d(nn::Conv2dOptions(from, to, 3).padding(1).bias(false));
  }

  nn::Sequential features{
      convolution(1, 16),  nn::BatchNorm2d(16), nn::SiLU(), nn::AvgPool2d(2),  // [16, 8, 8]
      convolution(16, 32), nn::BatchNorm2d(32), nn::SiLU(), nn::AvgPool2d(2),  // [32, 4, 4]
      convolution(32, 64), nn::BatchNorm2d(64), nn::SiLU(), nn::AdaptiveAvgPool2d(1)};
  nn::Linear classes{64, 10};
};

// ---- the program -------------------------------------------------------------------------------

constexpr std::int64_t kTrainingImages = 4096, kValidationImages = 1024;

struct Flags {
  std::string output;  // empty: writes no files
  std::int64_t epochs = 3;
  std::int64_t batch = 64;  // of all ranks together
};

std::int64_t whole_number(const std::string& name, const std::string& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 1)
    throw lockstep::UsageError("{} is '{}': it must be a whole number from 1 on", name, text);
  return number;
}

constexpr const char* kHelp =
    "Teaches a small net to read digits, on one rank or many.\n"
    "\n"
    "Usage: classify_images [--output FOLDER] [--epochs N] [--batch N]\n"
    "\n"
    "  --output FOLDER  checkpoints, metrics and the loss curve (none: no files)\n"
    "  --epochs N       passes over the images (3)\n"
    "  --batch N        images of a step, on all ranks together (64)\n";

bool asks_for_help(int count, char** words) {
  return std::any_of(words + 1, words + count, [](const char* word) {
    return std::string_view(word) == "--help" || std::string_view(word) == "-h";
  });
}

Flags read_flags(int count, char** words) {
  Flags flags;
  for (int i = 1; i < count; i += 2) {
    const std::string name = words[i];
    if (i + 1 == count) throw lockstep::UsageError("{} needs a value", name);
    if (name == "--output")
      flags.output = words[i + 1];
    else if (name == "--epochs")
      flags.epochs = whole_number(name, words[i + 1]);
    else if (name == "--batch")
      flags.batch = whole_number(name, words[i + 1]);
    else
      throw lockstep::UsageError("{} is none of --output, --epochs and --batch", name);
  }
  return flags;
}

void train(const Flags& flags) {
  auto dist = lockstep::setup_distributed();
  if (flags.batch % dist.world_size() != 0)
    throw lockstep::UsageError("--batch {} cannot be divided among {} ranks: use a multiple",
                               flags.batch, dist.world_size());

  torch::manual_seed(1);  // for the initial weights; all ranks take rank 0's
  auto net = std::make_shared<Net>();
  // Without this, a rank's batch norms would see only its own images.
  dist.convert_sync_batchnorm(net);

  const std::int64_t num_steps = flags.epochs * ((kTrainingImages + flags.batch - 1) / flags.batch);
  lockstep::DistributedTrainer trainer(
      dist, net, nn::CrossEntropyLoss(),
      {.epochs = flags.epochs,
       .batch_size = flags.batch / dist.world_size(),
       .learning_rate = 5e-3,
       .schedule =
           lockstep::optim::WarmupCosineLR{.total_num_steps = num_steps, .warmup_num_steps = 10},
       .output = flags.output,
       .checkpoint_interval = 50});
  trainer.add_metric("accuracy", [](const torch::Tensor& scores, const torch::Tensor& digits) {
    return scores.argmax(1).eq(digits).sum();
  });
  const auto training_images =
      lockstep::data::augmented(Digits(kTrainingImages, /*seed=*/1), moved_and_faded);
  const auto result = trainer.fit(training_images, Digits(kValidationImages, /*seed=*/2));

  // Every rank has the result; the main rank prints it.
  if (!dist.is_main()) return;
  const long step = static_cast<long>(result.step);
  if (result.end == lockstep::TrainingResult::End::interrupted) {
    std::printf("interrupted after step %ld; start it again to go on\n", step);
    return;
  }
  if (result.resumed_after == result.step)
    std::printf("nothing was left to train; ask for more with --epochs\n");
  std::printf("step %ld: training loss %.6f, validation loss %.6f, accuracy %.2f%%\n", step,
              result.loss, result.validation_loss.value(),
              100 * result.validation_metrics.at(0).value);
  if (!result.checkpoint.empty()) std::printf("weights: %s\n", result.checkpoint.c_str());
}

int main(int count, char** words) {
  if (asks_for_help(count, words)) {
    std::printf("%s", kHelp);
    return 0;
  }
  try {
    train(read_flags(count, words));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "classify_images: %s\n", error.what());
    return 1;
  }
}
