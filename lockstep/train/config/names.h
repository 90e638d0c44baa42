// The words of a config for our enumerations: read and written by the same table.
#pragma once

#include <lockstep/train/config/config.h>
#include <lockstep/train/config/json_reader.h>

namespace lockstep::train {

inline constexpr Named<NonFinite> kOnNonFiniteLoss[] = {{"stop", NonFinite::stop},
                                                        {"skip", NonFinite::skip}};

struct NamedStrategies {
  Named<ShardingStrategy> all[kStrategies.size()];
};
inline constexpr NamedStrategies kNamedStrategies = [] {
  NamedStrategies named{};
  for (std::size_t i = 0; i < kStrategies.size(); ++i)
    named.all[i] = {kStrategies[i].name, kStrategies[i].strategy};
  return named;
}();
inline constexpr const Named<ShardingStrategy> (&kShardings)[kStrategies.size()] =
    kNamedStrategies.all;

inline constexpr Named<ExchangeGradients> kExchanges[] = {
    {name_of(ExchangeGradients::automatic), ExchangeGradients::automatic},
    {name_of(ExchangeGradients::each_pass), ExchangeGradients::each_pass},
    {name_of(ExchangeGradients::last_pass), ExchangeGradients::last_pass}};

inline constexpr Named<StageBalance> kStageBalances[] = {{"layers", StageBalance::layers},
                                                         {"parameters", StageBalance::parameters},
                                                         {"compute", StageBalance::compute},
                                                         {"time", StageBalance::time}};

inline constexpr Named<mesh::ContextAlgorithm> kContextAlgorithms[] = {
    {"ring", mesh::ContextAlgorithm::ring}, {"all_to_all", mesh::ContextAlgorithm::all_to_all}};

inline constexpr Named<LayerCut> kLayerCuts[] = {{"column", LayerCut::column},
                                                 {"row", LayerCut::row},
                                                 {"heads", LayerCut::heads},
                                                 {"qkv", LayerCut::qkv}};

inline constexpr Named<OffloadDevice> kOffloadDevices[] = {{"none", OffloadDevice::none},
                                                           {"cpu", OffloadDevice::cpu}};

inline constexpr Named<Precision> kPrecisions[] = {
    {"fp32", Precision::fp32}, {"bf16", Precision::bf16}, {"fp16", Precision::fp16}};

inline constexpr Named<DeviceChoice> kDevices[] = {
    {"auto", DeviceChoice::automatic}, {"cpu", DeviceChoice::cpu}, {"cuda", DeviceChoice::cuda}};

}  // namespace lockstep::train
