// The words of a config for our enumerations: read and written by the same table.
#pragma once

#include <lockstep/train/config/config.h>
#include <lockstep/train/config/json_reader.h>

namespace lockstep::train {

inline constexpr Named<NonFinite> kOnNonFiniteLoss[] = {{"stop", NonFinite::stop},
                                                        {"skip", NonFinite::skip}};

// PyTorch's names; it has none for ZeRO-1.
inline constexpr Named<ShardingStrategy> kShardings[] = {
    {"NO_SHARD", ShardingStrategy::NO_SHARD},
    {"SHARD_OPTIMIZER", ShardingStrategy::SHARD_OPTIMIZER},
    {"SHARD_GRAD_OP", ShardingStrategy::SHARD_GRAD_OP},
    {"FULL_SHARD", ShardingStrategy::FULL_SHARD},
    {"HYBRID_SHARD", ShardingStrategy::HYBRID_SHARD}};

inline constexpr Named<StageBalance> kStageBalances[] = {{"layers", StageBalance::layers},
                                                         {"parameters", StageBalance::parameters},
                                                         {"compute", StageBalance::compute},
                                                         {"time", StageBalance::time}};

inline constexpr Named<mesh::ContextAlgorithm> kContextAlgorithms[] = {
    {"ring", mesh::ContextAlgorithm::ring}, {"all_to_all", mesh::ContextAlgorithm::all_to_all}};

inline constexpr Named<OffloadDevice> kOffloadDevices[] = {{"none", OffloadDevice::none},
                                                           {"cpu", OffloadDevice::cpu}};

inline constexpr Named<Precision> kPrecisions[] = {
    {"fp32", Precision::fp32}, {"bf16", Precision::bf16}, {"fp16", Precision::fp16}};

inline constexpr Named<DeviceChoice> kDevices[] = {
    {"auto", DeviceChoice::automatic}, {"cpu", DeviceChoice::cpu}, {"cuda", DeviceChoice::cuda}};

}  // namespace lockstep::train
