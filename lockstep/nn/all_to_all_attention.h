// Attention by two all-to-alls (Ulysses, Jacobs et al., 2023).
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/nn/attention.h>
#include <lockstep/nn/sequence_split.h>

namespace lockstep::nn::internal {

// The shapes are those of context_parallel.h, checked there but for the heads: UsageError where
// they do not divide by the ranks. Differentiable; `subject` is that of the group's calls.
at::Tensor all_to_all_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const std::shared_ptr<comm::Communicator>& group, SplitKind split,
                                const AttentionOptions& options, std::int32_t subject);

}  // namespace lockstep::nn::internal
