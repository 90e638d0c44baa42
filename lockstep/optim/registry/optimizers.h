// Every optimizer: a new one is a folder that looks like its siblings, and a row here.
#pragma once

#include <string>
#include <vector>

#include <lockstep/optim/adagrad/plain/options.h>
#include <lockstep/optim/adamw/plain/options.h>
#include <lockstep/optim/lamb/plain/options.h>
#include <lockstep/optim/lion/plain/options.h>
#include <lockstep/optim/muon/plain/options.h>
#include <lockstep/optim/sgd/plain/options.h>

namespace lockstep::optim {

// Calls row(names, options) for each optimizer: what configs call it, the name that is written
// first and then those that DeepSpeed has besides; and the options that it has unless others are
// given.
template <typename Row>
void for_each_optimizer(const Row& row) {
  using Names = std::vector<std::string>;
  row(Names{"AdamW", "FusedAdam", "DeepSpeedCPUAdam"}, AdamWOptions{});
  row(Names{"Adam"}, AdamWOptions{});
  row(Names{"AdamW8bit"}, AdamW8bitOptions{});
  row(Names{"Adam8bit"}, AdamW8bitOptions{});
  row(Names{"SGD"}, SGDOptions{});
  row(Names{"Lion", "FusedLion", "DeepSpeedCPULion"}, LionOptions{});
  row(Names{"Adagrad", "DeepSpeedCPUAdagrad"}, AdagradOptions{});
  row(Names{"Lamb", "FusedLamb"}, LambOptions{});
  row(Names{"Muon"}, MuonOptions{});
}

}  // namespace lockstep::optim
