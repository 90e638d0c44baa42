#include <lockstep/comm/operations/operation.h>

#include <charconv>
#include <cstring>
#include <string_view>
#include <type_traits>

#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>

namespace lockstep::comm {

const char* name(Operation operation) {
  switch (operation) {
    case Operation::all_reduce: return "all_reduce";
    case Operation::all_gather: return "all_gather";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::all_to_all: return "all_to_all";
    case Operation::broadcast: return "broadcast";
    case Operation::exchange: return "exchange";
    case Operation::barrier: return "barrier";
    case Operation::split: return "split";
  }
  return "unknown operation";  // only a peer's bytes can hold such a value
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::float64: return "float64";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::uint8: return "uint8";
    case DType::boolean: return "bool";
  }
  return "unknown dtype";
}

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::mean: return "mean";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
  }
  return "unknown reduction";
}

namespace {
constexpr Algorithm kAlgorithms[] = {
    Algorithm::automatic, Algorithm::direct,           Algorithm::tree,
    Algorithm::ring,      Algorithm::halving_doubling, Algorithm::hierarchical};
}  // namespace

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic: return "automatic";
    case Algorithm::direct: return "direct";
    case Algorithm::tree: return "tree";
    case Algorithm::ring: return "ring";
    case Algorithm::halving_doubling: return "halving_doubling";
    case Algorithm::hierarchical: return "hierarchical";
    case Algorithm::nccl: return "nccl";
  }
  return "unknown algorithm";
}

Algorithm algorithm_from_name(const std::string& text) {
  std::string known;
  for (const Algorithm algorithm : kAlgorithms) {
    if (text == name(algorithm)) return algorithm;
    known += known.empty() ? name(algorithm) : std::string(", ") + name(algorithm);
  }
  throw UsageError("there is no algorithm '{}': choose one of {}", text, known);
}

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::float16:
    case DType::bfloat16: return 2;
    case DType::uint8:
    case DType::boolean: return 1;
  }
  LOCKSTEP_CHECK(false, "dtype {}", static_cast<int>(dtype));
  return 0;
}

bool Fingerprint::operator==(const Fingerprint& other) const {
  static_assert(std::has_unique_object_representations_v<Fingerprint>);
  return std::memcmp(this, &other, sizeof(Fingerprint)) == 0;
}

namespace {

// How a subject's number begins in a text.
constexpr std::string_view kSubject = ", subject ";

std::string text_of(const Fingerprint& call, const std::string& subject) {
  std::string text = name(call.operation);
  if (call.sequence != 0) text += fmt::format(" #{}", call.sequence);
  switch (call.operation) {
    case Operation::barrier:
    case Operation::split: return text;
    case Operation::all_reduce:
    case Operation::reduce_scatter:
      text += fmt::format(" ({} of {} {}", name(call.reduce_op), call.count, name(call.dtype));
      break;
    case Operation::broadcast:
      text += fmt::format(" ({} {} from root {}", call.count, name(call.dtype), call.root);
      break;
    default: text += fmt::format(" ({} {}", call.count, name(call.dtype)); break;
  }
  text += subject;
  if (call.tensors != 1) text += fmt::format(" in {} tensors", call.tensors);
  if (call.sizes != 0) text += fmt::format(" of lengths [{:04x}]", call.sizes);
  if (call.algorithm != Algorithm::automatic) text += fmt::format(", {}", name(call.algorithm));
  return text + ")";
}

}  // namespace

std::string Fingerprint::text() const { return text_of(*this, ""); }

std::string Fingerprint::text_with_subject() const {
  const bool has_subject = root >= 0 && operation != Operation::broadcast;
  return text_of(*this, has_subject ? fmt::format("{}{}", kSubject, root) : "");
}

std::string name_subjects(std::string message,
                          const std::function<std::string(std::int32_t)>& name_of) {
  for (std::size_t at = 0; (at = message.find(kSubject, at)) != message.npos;) {
    const std::size_t begin = at + kSubject.size();
    std::int32_t subject = -1;
    const char* const digits = message.data() + begin;
    const char* const end = std::from_chars(digits, message.data() + message.size(), subject).ptr;
    if (end == digits) {
      at = begin;
      continue;
    }
    std::string name = name_of(subject);
    if (!name.empty()) name.insert(0, ", ");
    message.replace(at, static_cast<std::size_t>(end - message.data()) - at, name);
    at += name.size();
  }
  return message;
}

}  // namespace lockstep::comm
