// Every verb of the program, in the order in which --help lists them. To add one, add its line
// here and a file that defines `int lockstep::cli::<name>(Arguments)`: in cli/ for HERE (no
// LibTorch), in cli/torch/ for TORCH (a verb of lockstep-torch), in both for BOTH: `lockstep`
// checks and launches, and the ranks are `lockstep-torch`.
#pragma once

#define LOCKSTEP_VERBS(HERE, TORCH, BOTH)                                                   \
  BOTH(train, "train a language model as a config file says, on one rank or many")          \
  TORCH(sample, "write text with a model that was trained here or by Hugging Face's tools") \
  HERE(ckpt, "look into checkpoints, check them, take them to and from Hugging Face")       \
  HERE(plan, "tell what training takes in memory, and draw pipeline schedules")             \
  HERE(run, "start the ranks of a job on this host, and watch over them")                   \
  BOTH(check, "tell what this machine and these ranks can do, and what is wrong")           \
  TORCH(bench, "measure the collectives")
