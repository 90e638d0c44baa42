// Token files that are one file each: text, nanoGPT's, llm.c's. (Megatron's pair: megatron_index.h)
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

#include <lockstep/data/tokens/token_layout.h>

namespace lockstep::data {

// Each takes the whole file and its path for messages; UsageError that names the file, the place,
// what is there and what to do.

// Text, or anything else: each byte is a token.
TokenLayout bytes_layout(std::span<const std::byte> file, const std::filesystem::path& path);

// Headerless 16-bit tokens.
TokenLayout nanogpt_layout(std::span<const std::byte> file, const std::filesystem::path& path);

// A header of 1024 bytes, then 16-bit tokens (GPT-2) or 32-bit tokens (Llama 3).
TokenLayout llm_c_layout(std::span<const std::byte> file, const std::filesystem::path& path);

// Whether it begins with one of llm.c's two magic numbers.
bool is_llm_c(std::span<const std::byte> file);

}  // namespace lockstep::data
