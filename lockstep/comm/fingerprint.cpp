#include <lockstep/comm/fingerprint.h>

#include <spdlog/fmt/fmt.h>

namespace lockstep::comm {

std::string Fingerprint::text() const {
  std::string text = name(operation);
  if (sequence != 0) text += fmt::format(" #{}", sequence);
  switch (operation) {
    case Operation::barrier:
    case Operation::split: return text;
    case Operation::all_reduce:
    case Operation::reduce_scatter:
      text += fmt::format(" ({} of {} {}", name(reduce_op), count, name(dtype));
      break;
    case Operation::broadcast:
      text += fmt::format(" ({} {} from root {}", count, name(dtype), root);
      break;
    default: text += fmt::format(" ({} {}", count, name(dtype)); break;
  }
  if (root >= 0 && operation != Operation::broadcast) text += fmt::format(", tag {}", root);
  if (tensors != 1) text += fmt::format(" in {} tensors", tensors);
  if (sizes != 0) text += fmt::format(" of lengths [{:04x}]", sizes);
  if (algorithm != Algorithm::automatic) text += fmt::format(", {}", name(algorithm));
  return text + ")";
}

}  // namespace lockstep::comm
