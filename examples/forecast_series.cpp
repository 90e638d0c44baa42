// An LSTM forecasts a series, trained by an engine as forecast_series.json says: on any number of
// ranks, with whatever strategy stands there. Started again, it goes on from its last checkpoint.
//
//   lockstep run --nproc-per-node 2 ./forecast_series examples/forecast_series.json checkpoints
#include <cstdio>
#include <exception>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

constexpr std::int64_t kPast = 24;  // points that the forecast is made from

struct Forecaster : torch::nn::Module {
  Forecaster() {
    register_module("lstm", lstm);
    register_module("head", head);
  }
  torch::Tensor forward(const torch::Tensor& past) {  // [samples, kPast, 1] → [samples, 1]
    const auto output = std::get<0>(lstm->forward(past));
    return head->forward(output.select(1, kPast - 1));
  }

  torch::nn::LSTM lstm{torch::nn::LSTMOptions(1, 32).batch_first(true)};
  torch::nn::Linear head{32, 1};
};

// Windows of a series with two periods, and the point after each.
class Windows : public torch::data::datasets::Dataset<Windows> {
 public:
  Windows(std::int64_t first, std::int64_t count) {
    const auto time = torch::arange(first, first + count + kPast, torch::kFloat);
    series_ = torch::sin(time / 5) + 0.5 * torch::cos(time / 3);
    size_ = static_cast<std::size_t>(count);
  }
  torch::data::Example<> get(std::size_t index) override {
    const auto begin = static_cast<std::int64_t>(index);
    return {series_.narrow(0, begin, kPast).unsqueeze(1), series_.narrow(0, begin + kPast, 1)};
  }
  torch::optional<std::size_t> size() const override { return size_; }

 private:
  torch::Tensor series_;
  std::size_t size_;
};

void train(const char* config, const char* checkpoints) {
  auto engine = lockstep::initialize(config, [] { return Forecaster(); });
  engine.load_checkpoint(checkpoints);

  const auto loss_of = [&](const lockstep::EngineBatch& batch) {
    return torch::mse_loss(engine.forward(batch.data), batch.target);
  };
  const auto training = engine.loader(Windows(0, 1000));
  const Windows validation(5000, 200);
  while (engine.epoch() < 10) {
    for (const auto& batch : training) {
      engine.backward(loss_of(batch));
      engine.step();
    }
    const double loss = engine.evaluate(validation, loss_of);
    if (engine.dist().is_main())
      std::printf("epoch %ld: validation loss %.6f\n", static_cast<long>(engine.epoch()), loss);
    engine.save_checkpoint(checkpoints, "epoch-" + std::to_string(engine.epoch()));
  }
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: forecast_series CONFIG CHECKPOINTS\n");
    return 2;
  }
  try {
    train(argv[1], argv[2]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "forecast_series: %s\n", error.what());
    return 1;
  }
}
