// The words of a config for our enumerations: read and written by the same table.
#pragma once

#include <lockstep/train/config.h>
#include <lockstep/train/config/json_reader.h>

namespace lockstep::train {

inline constexpr Named<ModelFamily> kFamilies[] = {{"gpt2", ModelFamily::gpt2},
                                                   {"llama", ModelFamily::llama}};

inline constexpr Named<DataFormat> kFormats[] = {{"auto", DataFormat::automatic},
                                                 {"text", DataFormat::text},
                                                 {"nanogpt", DataFormat::nanogpt},
                                                 {"llm.c", DataFormat::llm_c},
                                                 {"megatron", DataFormat::megatron}};

inline constexpr Named<OnNonFiniteLoss> kOnNonFiniteLoss[] = {{"stop", OnNonFiniteLoss::stop},
                                                              {"skip", OnNonFiniteLoss::skip}};

// PyTorch's names; it has none for ZeRO-1.
inline constexpr Named<Sharding> kShardings[] = {{"NO_SHARD", Sharding::none},
                                                 {"SHARD_OPTIMIZER", Sharding::optimizer},
                                                 {"SHARD_GRAD_OP", Sharding::gradients},
                                                 {"FULL_SHARD", Sharding::full},
                                                 {"HYBRID_SHARD", Sharding::hybrid}};

inline constexpr Named<PipelineSchedule> kPipelineSchedules[] = {
    {"gpipe", PipelineSchedule::gpipe},
    {"1f1b", PipelineSchedule::one_forward_one_backward},
    {"interleaved", PipelineSchedule::interleaved},
    {"zb-h1", PipelineSchedule::zb_h1},
    {"zb-v", PipelineSchedule::zb_v}};

inline constexpr Named<StageBalance> kStageBalances[] = {{"layers", StageBalance::layers},
                                                         {"parameters", StageBalance::parameters},
                                                         {"compute", StageBalance::compute},
                                                         {"time", StageBalance::time}};

inline constexpr Named<ContextExchange> kContextExchanges[] = {
    {"ring", ContextExchange::ring}, {"all_to_all", ContextExchange::all_to_all}};

inline constexpr Named<OffloadDevice> kOffloadDevices[] = {{"none", OffloadDevice::none},
                                                           {"cpu", OffloadDevice::cpu}};

inline constexpr Named<Precision> kPrecisions[] = {
    {"fp32", Precision::fp32}, {"bf16", Precision::bf16}, {"fp16", Precision::fp16}};

inline constexpr Named<DeviceChoice> kDevices[] = {
    {"auto", DeviceChoice::automatic}, {"cpu", DeviceChoice::cpu}, {"cuda", DeviceChoice::cuda}};

inline constexpr Named<Backend> kBackends[] = {
    {"auto", Backend::automatic}, {"shm", Backend::shm}, {"tcp", Backend::tcp},
    {"gloo", Backend::gloo},      {"mpi", Backend::mpi}, {"nccl", Backend::nccl}};

}  // namespace lockstep::train
