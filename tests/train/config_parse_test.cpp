#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/comm/backends/table.h>

#include "tests/train/configs.h"

namespace lockstep::train {

namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// Every key away from its default.
const char* const kEverything = R"({
  "model": {"family": "llama", "vocab_size": 32000, "hidden_size": 512, "num_layers": 8,
            "num_heads": 8, "num_kv_heads": 2, "intermediate_size": 1408, "max_positions": 2048,
            "dropout": 0.1, "tie_embeddings": true, "norm_eps": 1e-6, "rope_theta": 500000.0},
  "data": {"train": ["/data/a.bin", "/data/b.bin"], "validation": ["/data/c.bin"],
           "format": "llm.c", "sequence_length": 1024, "num_workers": 3, "prefetch": 4},
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
  "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6,
                "weight_decay": 0.1, "adam_w_mode": false}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 4000,
                "warmup_min_ratio": 0.01, "warmup_num_steps": 100, "cos_min_ratio": 0.1,
                "warmup_type": "linear"}},
  "gradient_clipping": 0.5, "max_steps": 5000, "epochs": 3, "seed": 7, "output": "/out/here",
  "validation": {"interval": 100, "batches": 0},
  "checkpoint": {"interval": 20, "keep": 1, "memory_interval": 2, "resume": "/out/there"},
  "tensorboard": {"enabled": false, "output_path": "/out/tb", "job_name": "first"},
  "csv_monitor": {"enabled": false, "output_path": "/out/csv", "job_name": "second"},
  "steps_per_print": 1, "wall_clock_breakdown": true, "dataloader_drop_last": true,
  "on_non_finite_loss": "skip",
  "ddp": {"first_bucket_mb": 0.5, "bucket_mb": 10.0, "find_unused_parameters": false},
  "sharding_strategy": "HYBRID_SHARD", "fsdp": {"max_live_units": 3, "ranks_per_copy": 2},
  "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
                        "zero_quantized_weights": true, "zero_quantized_gradients": true,
                        "zero_hpz_partition_size": 2},
  "fp16": {"enabled": true, "loss_scale": 128.0, "initial_scale_power": 20,
           "loss_scale_window": 500, "hysteresis": 3, "consecutive_hysteresis": true,
           "min_loss_scale": 4.0},
  "communication_data_type": "bf16",
  "activation_checkpointing": {"ratio": 0.5},
  "device": "cuda", "threads_per_rank": 4, "consistency_check_interval": 50,
  "exchange_gradients": "last_pass"
})";

// Expects that everything in `part` is also in `whole`.
void expect_within(const json& part, const json& whole, const std::string& path) {
  if (!part.is_object()) {
    EXPECT_EQ(part, whole) << path;
    return;
  }
  for (const auto& [key, value] : part.items()) {
    ASSERT_TRUE(whole.contains(key)) << path << "/" << key;
    expect_within(value, whole.at(key), path + "/" + key);
  }
}

std::string written_again(const std::string& text) {
  return to_json(parse_config(text, {.name = "again.json", .folder = "/elsewhere"}));
}

}  // namespace

TEST(Config, least_has_sane_defaults) {
  const TrainConfig config = config_with({});
  EXPECT_EQ(config.model.family, "gpt2");
  EXPECT_EQ(config.model.vocab_size, 0);
  EXPECT_EQ(config.model.num_kv_heads, 4);
  EXPECT_EQ(config.model.intermediate_size, 256);
  EXPECT_EQ(config.model.max_positions, 32);
  EXPECT_TRUE(config.model.tie_embeddings);
  EXPECT_EQ(config.data.train.front(), "/data/input.txt");
  EXPECT_EQ(config.data.validation_fraction, 0.1);
  EXPECT_EQ(config.optimizer.type, "AdamW");
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_EQ(config.output, "/data/runs/gpt");
  EXPECT_EQ(config.tensorboard.folder(), "/data/runs/gpt/tensorboard");
  EXPECT_EQ(config.csv_monitor.folder(), "/data/runs/gpt");
  EXPECT_NE(config.scheduler.as<optim::Constant>(), nullptr);
  EXPECT_EQ(config.checkpoint.resume, Resume::automatic);
}

TEST(Config, llama_has_defaults_of_its_own) {
  const TrainConfig config = config_with({{"/model/family", "llama"}, {"/model/hidden_size", 64}});
  EXPECT_EQ(config.model.intermediate_size, 192);
  EXPECT_FALSE(config.model.tie_embeddings);
}

TEST(Config, auto_and_null_are_defaults) {
  const TrainConfig config = config_with({{"/model/num_kv_heads", "auto"},
                                          {"/gradient_clipping", nullptr},
                                          {"/scheduler", nullptr},
                                          {"/seed", "auto"},
                                          {"/data/validation", "auto"}});
  EXPECT_EQ(to_json(config), to_json(config_with({})));
}

TEST(Config, keeps_every_key_and_reads_back_the_same) {
  const std::string text = to_json(parse_config(kEverything, {}));
  expect_within(json::parse(kEverything), json::parse(text), "");
  EXPECT_EQ(written_again(text), text);
  const std::string least_text = to_json(config_with({}));
  EXPECT_EQ(written_again(least_text), least_text);
  const std::string from = to_json(config_with({{"/model", {{"from", "../gpt2"}}}}));
  EXPECT_EQ(json::parse(from)["model"], (json{{"from", "/gpt2"}}));
  EXPECT_EQ(written_again(from), from);
  const json sgd = {{"type", "SGD"},
                    {"params",
                     {{"lr", 0.5},
                      {"weight_decay", 0.25},
                      {"momentum", 0.75},
                      {"dampening", 0.0},
                      {"nesterov", true}}}};
  EXPECT_EQ(json::parse(to_json(config_with({{"/optimizer", sgd}})))["optimizer"], sgd);
}

TEST(Config, writes_out_every_default) {
  const json written = json::parse(to_json(config_with({})));
  for (const char* pointer :
       {"/model/dropout", "/model/norm_eps", "/data/format", "/data/num_workers", "/optimizer/type",
        "/optimizer/params/betas", "/optimizer/params/weight_decay", "/scheduler/type",
        "/gradient_clipping", "/seed", "/output", "/validation/interval", "/checkpoint/keep",
        "/tensorboard/output_path", "/csv_monitor/enabled", "/ddp/bucket_mb", "/sharding_strategy",
        "/fsdp/max_live_units", "/device"})
    EXPECT_TRUE(written.contains(json::json_pointer(pointer))) << pointer;
}

TEST(Config, takes_the_backends_of_the_table_and_those_that_a_program_added) {
  for (const std::string& name : comm::backends::names()) {
    const TrainConfig config = config_with({{"/communication/backend", name}});
    EXPECT_EQ(config.backend, name);
    EXPECT_EQ(json::parse(to_json(config))["communication"]["backend"], name);
  }
  EXPECT_THAT(
      mistake_with({{"/communication/backend", "of-a-program"}}),
      HasSubstr("communication.backend is \"of-a-program\": it must be 'auto', 'shm+tcp', "));
  comm::backends::add({.name = "of-a-program"});
  EXPECT_EQ(config_with({{"/communication/backend", "of-a-program"}}).backend, "of-a-program");
}

TEST(Config, types_are_read_whatever_their_capitals_and_large_numbers_as_people_write_them) {
  EXPECT_EQ(config_with({{"/optimizer/type", "adamw"}}).optimizer.type, "AdamW");
  EXPECT_EQ(config_with({{"/max_steps", 1e6}}).max_steps, 1'000'000);
}

TEST(Config, names_a_mistyped_key_once_and_what_was_meant) {
  EXPECT_EQ(usage_error([] {
              json config = least();
              config["train_bach_size"] = config["train_batch_size"];
              config.erase("train_batch_size");
              parse_config(config.dump(1), {.name = "gpt.json"});
            }),
            "gpt.json:17: train_bach_size is no key of a config: did you mean 'train_batch_size'?");
  EXPECT_EQ(mistake_with({{"/optimizer/params/weight_dacay", 0.1}}),
            "gpt.json:1: optimizer.params.weight_dacay is no key of AdamW: did you mean "
            "'weight_decay'?");
  EXPECT_EQ(mistake_with({{"/sequence_length", 64}}),
            "gpt.json:1: sequence_length is no key of a config: did you mean "
            "'data.sequence_length'?");
  EXPECT_EQ(mistake_with({{"/ddp/zzzzzzzz", 1}}),
            "gpt.json:1: ddp.zzzzzzzz is no key of ddp: its keys are first_bucket_mb, bucket_mb, "
            "find_unused_parameters");
  EXPECT_EQ(mistake_with({{"/qqqqqq", 1}}),
            "gpt.json:1: qqqqqq is no key of a config: docs/config.md lists them all");
}

TEST(Config, names_the_path_the_value_and_what_it_must_be) {
  EXPECT_EQ(mistake_with({{"/optimizer/params/lr", "abc"}}),
            "gpt.json:1: optimizer.params.lr is \"abc\": it must be a number");
  EXPECT_EQ(mistake_with({{"/optimizer/params/lr", 0}}),
            "gpt.json:1: optimizer.params.lr is 0: it must be above 0 and at most 1000");
  EXPECT_EQ(mistake_with({{"/max_steps", 0}}),
            "gpt.json:1: max_steps is 0: it must be a whole number from 1 to 1000000000000");
  EXPECT_EQ(mistake_with({{"/max_steps", 2.5}}),
            "gpt.json:1: max_steps is 2.5: it must be a whole number from 1 to 1000000000000");
  EXPECT_EQ(mistake_with({{"/ddp/find_unused_parameters", "yes"}}),
            "gpt.json:1: ddp.find_unused_parameters is \"yes\": it must be true or false");
  EXPECT_EQ(mistake_with({{"/consistency_check_interval", -1}}),
            "gpt.json:1: consistency_check_interval is -1: it must be a whole number from 0 to "
            "1000000000000");
  EXPECT_EQ(mistake_with({{"/device", "gpu"}}),
            "gpt.json:1: device is \"gpu\": it must be 'auto', 'cpu' or 'cuda'");
  EXPECT_EQ(mistake_with({{"/model", json::array({1})}}),
            "gpt.json:1: model is [1]: it must be a section, {...}");
  EXPECT_EQ(mistake_with({{"/data/train", json::array()}}),
            "gpt.json:1: data.train is []: it must be a text, or a list of 1 to 1000 texts, none "
            "of them empty");
  EXPECT_EQ(mistake_with({{"/output", ""}}), "gpt.json:1: output is empty: it must be a path");
  EXPECT_EQ(mistake_with({{"/optimizer/params/betas", {0.9, 1.0}}}),
            "gpt.json:1: optimizer.params.betas is [0.9,1.0]: it must be a list of two numbers, "
            "each at least 0 and below 1");
  EXPECT_EQ(mistake_with({{"/tensorboard/job_name", "a/b"}}),
            "gpt.json:1: tensorboard.job_name is \"a/b\": it must be the name of a folder, without "
            "'/'");
}

TEST(Config, reports_all_mistakes_at_once_in_the_order_of_the_file) {
  const std::string text = R"({
    "data": {"train": "input.txt", "sequence_length": 0},
    "model": {"hidden_size": 100, "num_layers": 2, "num_heads": 8},
    "optimizer": {"type": "AdamW",
                  "params": {"lr": -1}},
    "train_batch_size": 8,
    "amp": {"enabled": true},
    "seeds": 3
  })";
  EXPECT_EQ(
      usage_error(
          [&] { parse_config(text, {.name = "gpt.json", .overrides = {"ddp.bucket_mb=big"}}); }),
      "gpt.json has 7 mistakes:\n"
      "  max_steps is missing: say how long to train with max_steps, epochs, or both (then "
      "whichever ends first)\n"
      "  line 2: data.sequence_length is 0: it must be a whole number from 1 to 16777216\n"
      "  line 3: model.hidden_size is 100, which 8 heads do not divide: make it 96 or 104, or "
      "change model.num_heads\n"
      "  line 5: optimizer.params.lr is -1: it must be above 0 and at most 1000\n"
      "  line 7: amp is {...}, which DeepSpeed does and Lockstep does not: use bf16.enabled or "
      "fp16.enabled\n"
      "  line 8: seeds is no key of a config: did you mean 'seed'?\n"
      "  --set ddp.bucket_mb=big: ddp.bucket_mb is \"big\": it must be a number");
}

// A wrong value keeps only the checks that depend on it from being made.
TEST(Config, reports_what_does_not_fit_together_with_the_rest) {
  const std::string text = R"({
    "data": {"train": "input.txt", "sequence_length": 32, "sequence_length": 64},
    "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "dropout": 2},
    "elasticity": {"enabled": true, "max_train_batch_size": 8, "micro_batch_sizes": [16],
                   "min_gpus": 9, "max_gpus": 8, "version": 7},
    "optimizer": {"type": "SGD", "params": {"lr": "fast", "nesterov": true, "momentum": "some"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.1,
                  "warmup_min_lr": 0.2, "warmup_type": "steep"}},
    "parallel": {"tensr": 2, "pipeline": 0, "schedule": "zb-v", "sharding_strategy": "ALL"},
    "fsdp": {"ranks_per_copy": 2},
    "fp16": {"enabled": true, "initial_scale_power": 2, "min_loss_scale": 8, "hysteresis": 0},
    "max_steps": 10
  })";
  EXPECT_EQ(
      usage_error([&] {
        parse_config(text, {.name = "gpt.json", .overrides = {"seed", "=1"}});
      }),
      "gpt.json has 16 mistakes:\n"
      "  line 2: data.sequence_length is given twice, first in line 2: remove one of them\n"
      "  line 3: model.dropout is 2: it must be at least 0 and below 1\n"
      "  line 4: elasticity.micro_batch_sizes has 16, and max_train_batch_size is 8: leave it out, "
      "or make that larger\n"
      "  line 5: elasticity.version is 7: it must be from 0.1 to 0.2\n"
      "  line 5: elasticity.min_gpus is 9, and max_gpus 8: make it the smaller one\n"
      "  line 6: optimizer.params.lr is \"fast\": it must be a number\n"
      "  line 6: optimizer.params.momentum is \"some\": it must be a number\n"
      "  line 7: scheduler.params do not fit together: WarmupDecayLR: warmup_min_lr is 0.2, above "
      "warmup_max_lr, which is 0.1; and warmup_num_steps is 20, more than total_num_steps, which "
      "is 10: the warm-up would never end\n"
      "  line 8: scheduler.params.warmup_type is \"steep\": it must be 'log' or 'linear'\n"
      "  line 9: parallel.tensr is no key of parallel: did you mean 'tensor'?\n"
      "  line 9: parallel.pipeline is 0: it must be a whole number from 1 to 1048576\n"
      "  line 9: parallel.sharding_strategy is \"ALL\": it must be 'NO_SHARD', 'SHARD_OPTIMIZER', "
      "'SHARD_GRAD_OP', 'FULL_SHARD' or 'HYBRID_SHARD'\n"
      "  line 11: fp16.hysteresis is 0: it must be a whole number from 1 to 2147483647\n"
      "  line 11: fp16.min_loss_scale does not fit the others: min_loss_scale is 8: give a number "
      "above 0, up to the 4 that initial_scale_power 2 starts with\n"
      "  --set seed: it must be <key>=<value>, for example --set optimizer.params.lr=3e-4\n"
      "  --set =1: the part before '=' must be a key, with a dot between a section and what is in "
      "it, for example --set optimizer.params.lr=3e-4");
}

TEST(Config, takes_keys_that_begin_with_an_underscore_for_comments) {
  const TrainConfig config = parse_config(
      R"({"_comment": "for Ada", "_comment": "and for others", "//": ["x"],
          "model": {"_why": {"small": true}, "hidden_size": 64, "num_layers": 2, "num_heads": 4},
          "data": {"train": "input.txt", "sequence_length": 32, "_sequence_length": 64},
          "train_batch_size": 8, "optimizer": {"params": {"lr": 1e-3, "_lr": 3e-4}},
          "max_steps": 10})",
      {.name = "gpt.json", .folder = "/data"});
  EXPECT_EQ(to_json(config), to_json(config_with({})));
  EXPECT_EQ(usage_error([] {
              parse_config(text_with({}), {.name = "gpt.json", .overrides = {"_seed=5"}});
            }),
            "--set _seed=5: _seed is no key of a config: did you mean 'seed'?")
      << "what a flag sets is meant";
}

TEST(Config, takes_the_schema_that_an_editor_names) {
  EXPECT_EQ(to_json(config_with({{"/$schema", "./lockstep-schema.json"}})),
            to_json(config_with({})));
  EXPECT_EQ(mistake_with({{"/$schema", 7}}),
            "gpt.json:1: $schema is 7: it must be a text in double quotes");
  EXPECT_NE(mistake_with({{"/model/$schema", "x"}}).find("model.$schema is no key of model"),
            std::string::npos);
}

TEST(Config, shows_keys_and_values_as_they_were_written) {
  EXPECT_EQ(mistake_with({{"/modèle", 1}}),
            "gpt.json:1: modèle is no key of a config: did you mean 'model'?");
  EXPECT_EQ(mistake_with({{"/device", "größte"}}),
            "gpt.json:1: device is \"größte\": it must be 'auto', 'cpu' or 'cuda'");
}

TEST(Config, says_what_is_missing_with_an_example) {
  EXPECT_EQ(usage_error([] { parse_config("{}", {.name = "gpt.json"}); }),
            "gpt.json has 5 mistakes:\n"
            "  data is missing: say what is trained on, for example \"data\": {\"train\": "
            "\"input.txt\", \"sequence_length\": 256}\n"
            "  model is missing: say what is trained, for example \"model\": {\"family\": "
            "\"gpt2\", \"hidden_size\": 384, \"num_layers\": 6, \"num_heads\": 6}\n"
            "  optimizer is missing: say how to train, for example \"optimizer\": {\"type\": "
            "\"AdamW\", \"params\": {\"lr\": 3e-4}}\n"
            "  max_steps is missing: say how long to train with max_steps, epochs, or both (then "
            "whichever ends first)\n"
            "  train_batch_size is missing: set it to the samples of a step on all ranks, or "
            "train_micro_batch_size_per_gpu to those of one forward pass on one rank, or both");
}

TEST(Config, shows_no_more_mistakes_than_a_screen_holds) {
  json config = least();
  for (int i = 0; i < 30; ++i) config["zzzzzzzzzz" + std::to_string(i)] = i;
  EXPECT_THAT(
      usage_error([&] { parse_config(config.dump(), {.name = "gpt.json"}); }),
      ::testing::AllOf(HasSubstr("gpt.json has 30 mistakes:"), HasSubstr("\n  and 10 more")));
}

TEST(Config, checks_a_models_sizes_against_each_other) {
  EXPECT_EQ(mistake_with({{"/model/num_heads", 100}}),
            "gpt.json:1: model.hidden_size is 64, which 100 heads do not divide: make it 100, or "
            "change model.num_heads");
  EXPECT_EQ(mistake_with({{"/model/family", "llama"}, {"/model/num_kv_heads", 3}}),
            "gpt.json:1: model.num_kv_heads is 3, which does not divide the 4 heads of "
            "model.num_heads");
  EXPECT_EQ(mistake_with({{"/model/family", "llama"}, {"/model/num_heads", 64}}),
            "gpt.json:1: model.num_heads is 64, which leaves each head 1 of the 64 dimensions: "
            "rotary positions need an even number");
  EXPECT_EQ(mistake_with({{"/model/num_kv_heads", 2}}),
            "gpt.json:1: model.num_kv_heads is 2, but the family \"gpt2\" has as many as heads, 4: "
            "remove it, or make model.family \"llama\" or \"qwen2\"");
  EXPECT_EQ(mistake_with({{"/model/rope_theta", 500}}),
            "gpt.json:1: model.rope_theta is of rotary positions, which the family \"gpt2\" does "
            "not have: remove it, or make model.family \"llama\" or \"qwen2\"");
  EXPECT_EQ(mistake_with({{"/model/family", "lama"}}),
            "gpt.json:1: model.family is \"lama\": it must be 'gpt2', 'llama' or 'qwen2'");
  EXPECT_EQ(mistake_with({{"/model/max_positions", 16}}),
            "gpt.json:1: model.max_positions is 16, less than data.sequence_length, which is 32: "
            "make it at least that");
  EXPECT_EQ(
      mistake_with(
          {{"/model/from", "gpt2"}, {"/model/num_layers", nullptr}, {"/model/num_heads", nullptr}}),
      "gpt.json:1: model.hidden_size cannot stand beside model.from, whose folder says what "
      "the model is: remove one of them");
  EXPECT_EQ(mistake_with({{"/model/hidden_size", 99999999}}),
            "gpt.json:1: model.hidden_size is 99999999: it must be a whole number from 1 to "
            "1048576");
}

TEST(Config, validation_comes_from_files_or_from_a_fraction) {
  EXPECT_EQ(config_with({{"/data/validation", "v.txt"}}).data.validation_fraction, 0);
  EXPECT_EQ(config_with({{"/data/validation_fraction", 0}}).data.validation_fraction, 0);
  EXPECT_EQ(mistake_with({{"/data/validation", "v.txt"}, {"/data/validation_fraction", 0.2}}),
            "gpt.json:1: data.validation_fraction is 0.2, but data.validation names files of their "
            "own: remove one of them");
  EXPECT_EQ(mistake_with({{"/data/validation_fraction", 1}}),
            "gpt.json:1: data.validation_fraction is 1: it must be at least 0 and below 1");
}

TEST(Config, paths_start_from_the_file_and_those_of_flags_from_here) {
  const TrainConfig config =
      parse_config(text_with({{"/data/train", {"a.txt", "../b.txt", "/c.txt"}}}),
                   {.name = "gpt.json", .folder = "/data", .overrides = {"output=out"}});
  EXPECT_EQ(config.data.train,
            (std::vector<std::filesystem::path>{"/data/a.txt", "/b.txt", "/c.txt"}));
  EXPECT_EQ(config.output, std::filesystem::current_path() / "out");
  EXPECT_EQ(config.tensorboard.output_path, std::filesystem::current_path() / "out/tensorboard");
}

TEST(Config, resumes_as_it_is_told) {
  EXPECT_EQ(config_with({{"/checkpoint/resume", "never"}}).checkpoint.resume, Resume::never);
  const auto checkpoint = config_with({{"/checkpoint/resume", "old/run"}}).checkpoint;
  EXPECT_EQ(checkpoint.resume, Resume::from);
  EXPECT_EQ(checkpoint.resume_from, "/data/old/run");
}

}  // namespace lockstep::train
