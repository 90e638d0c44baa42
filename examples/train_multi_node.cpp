// A program that is its own launcher: started once on each host, it trains on all of them.
//
//   ./train_multi_node                                           two ranks on this host
//   ./train_multi_node 2 4 HOST0:29400 job-secret                on each of two hosts, with 4 ranks
//
// Several hosts need a file that only its owner can read, with the same random bytes on each host:
// head -c 32 /dev/urandom > job-secret; chmod 600 job-secret.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

// Learns a straight line; every rank has some of its points.
int train(lockstep::DistributedManager dist) {
  torch::manual_seed(1);
  const auto x = torch::rand({64, 1}).to(dist.device());
  const auto y = 3 * x - 2;
  auto model = dist.wrap_model(torch::nn::Linear(1, 1));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.3));
  for (int step = 1; step <= 40; ++step) {
    const auto mine = [&](const auto& all) {
      return all.slice(0, dist.rank(), {}, dist.world_size());
    };
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(mine(x)), mine(y), torch::Reduction::Sum);
    dist.backward(model, loss, mine(x).size(0));
    optimizer.step();
    const double mean = dist.sum(loss.item<double>()) / static_cast<double>(x.size(0));
    if (dist.is_main() && step % 10 == 0) std::printf("step %d: loss %.6f\n", step, mean);
  }
  return 0;
}

int main(int argc, char** argv) {
  try {
    lockstep::MultiNodeOptions options;
    if (argc > 3) options.endpoint = argv[3];
    if (argc > 4) options.secret_file = argv[4];
    options.min_nodes = 1;
    options.max_restarts = 2;
    lockstep::MultiNodeTrainingManager manager(options);
    manager.setup(argc > 1 ? std::atoi(argv[1]) : 1, argc > 2 ? std::atoi(argv[2]) : 2);
    if (!manager.is_rank()) std::printf("%s\n", manager.description().c_str());
    return manager.run(argc, argv, train);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_multi_node: %s\n", error.what());
    return 1;
  }
}
