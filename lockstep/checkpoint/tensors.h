// Writes LibTorch's tensors to safetensors files and reads them back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <lockstep/checkpoint/safetensors/folder.h>
#include <lockstep/checkpoint/safetensors/header.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::checkpoint {

// Converts between the element types of LibTorch and safetensors. Nothing if the other side has no
// such type, or this version of LibTorch lacks it.
std::optional<DType> dtype_of(c10::ScalarType type);
std::optional<c10::ScalarType> scalar_type_of(DType dtype);

// How a tensor is stored: under which name, and whether as its transpose (Hugging Face's GPT-2
// keeps the weights of its linear layers as [in, out]).
struct StoredForm {
  std::string name;
  bool transposed = false;
};

// Maps our name of a tensor to its form in the file; an empty function stores each tensor as it is.
using StoredForms = std::function<StoredForm(const std::string& name)>;

struct SaveOptions {
  Metadata metadata = {{"format", "pt"}};
  StoredForms stored;
};

// Writes one file, which appears when all of it is on disk. Tensors may be on any device, have any
// strides and share storage; they are copied to the host one at a time. Threading: like any reader
// of the tensors. Failure: FileError for the disk; UsageError, with the tensor's name, if it is
// undefined, sparse, quantized or on no device, if it is to be transposed and does not have two
// dims, or if safetensors has no such dtype.
void save_tensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                  const SaveOptions& options = {});

// The size on disk of a file with these tensors.
std::uint64_t file_bytes(std::span<const NamedTensor> tensors, const SaveOptions& options = {});

enum class Conversion {
  refused,   // dtypes must be the same: a resumed run continues to the bit
  floating,  // float16, bfloat16, float32 and float64 into each other, as copy_ rounds
};

enum class Unexpected {
  refused,  // every tensor of the file must have a target
  ignored,
};

struct LoadOptions {
  Conversion conversion = Conversion::refused;
  Unexpected unexpected = Unexpected::refused;
  // Tensors of the file that may be left over without an error, such as derived ones in old models.
  std::function<bool(const std::string& name)> skipped;
  StoredForms stored;
};

struct LoadReport {
  // Our names of the targets whose values were converted; only with Conversion::floating.
  std::vector<std::string> converted;
};

// Copies into existing tensors, of any device and strides, which stay the same objects, even if
// they are leaves that require grad. Either all of it fits or nothing is changed: the UsageError
// names the tensors that are missing, unexpected, or of another shape or dtype, with counts and
// both shapes.
LoadReport load_tensors_into(const SafetensorsFolder& source, std::span<const NamedTensor> targets,
                             const LoadOptions& options = {});
// `source` is a file or folder that SafetensorsFolder takes.
LoadReport load_tensors_into(const std::filesystem::path& source,
                             std::span<const NamedTensor> targets, const LoadOptions& options = {});

// Only checks, and throws what load_tensors_into would: for callers that load several files or
// none.
void check_fit(const SafetensorsFolder& source, std::span<const NamedTensor> targets,
               const LoadOptions& options = {});

// Loads all tensors of a file or folder as new tensors on the CPU, in the order of names.
// UsageError for a dtype that this LibTorch does not have.
std::vector<NamedTensor> load_tensors(const std::filesystem::path& source);

}  // namespace lockstep::checkpoint
