#include <lockstep/observe/tensorboard_file.h>

#include <unistd.h>

#include <chrono>
#include <system_error>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/hash.h>
#include <lockstep/observe/protobuf_writer.h>

namespace lockstep::observe {

namespace {

// Field numbers of tensorflow.Event, Summary, Summary.Value and SessionLog.
constexpr std::uint32_t kEventWallTime = 1;
constexpr std::uint32_t kEventStep = 2;
constexpr std::uint32_t kEventFileVersion = 3;
constexpr std::uint32_t kEventSummary = 5;
constexpr std::uint32_t kEventSessionLog = 7;
constexpr std::uint32_t kSummaryValue = 1;
constexpr std::uint32_t kValueTag = 1;
constexpr std::uint32_t kValueSimpleValue = 2;
constexpr std::uint32_t kSessionLogStatus = 1;
constexpr std::uint64_t kSessionStart = 1;

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "unknown";
  return name;
}

AppendedFile create(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw FileError("cannot make folder '{}': {}", folder.string(), error.message());
  const auto seconds = static_cast<std::int64_t>(wall_time());
  // Two files of one process within a second differ in the number.
  for (int number = 0;; ++number) {
    AppendedFile file(folder / fmt::format("events.out.tfevents.{:010}.{}.{}.{}", seconds,
                                           host_name(), ::getpid(), number),
                      AppendedFile::Existing::refuse);
    if (!file.refused()) return file;
  }
}

ProtobufWriter event_now() {
  ProtobufWriter event;
  event.real64(kEventWallTime, wall_time());
  return event;
}

void append_fixed(std::string& text, std::uint64_t bits, int size) {
  for (int i = 0; i < size; ++i) text.push_back(static_cast<char>(bits >> (8 * i)));
}

// A CRC of bytes that hold a CRC has little worth, so TensorFlow rotates it and adds a constant.
std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(std::as_bytes(std::span(bytes)));
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

}  // namespace

TensorBoardFile::TensorBoardFile(const std::filesystem::path& folder,
                                 std::optional<std::int64_t> resume_after)
    : file_(create(folder)) {
  ProtobufWriter version = event_now();
  version.text(kEventFileVersion, "brain.Event:2");
  write(version.bytes());
  if (resume_after) {
    // TensorBoard drops the events of this step and later ones.
    ProtobufWriter start = event_now();
    start.integer(kEventStep, static_cast<std::uint64_t>(*resume_after) + 1);
    ProtobufWriter session;
    session.integer(kSessionLogStatus, kSessionStart);
    start.message(kEventSessionLog, session);
    write(start.bytes());
  }
}

void TensorBoardFile::record(std::int64_t step, std::span<const Metric> metrics) {
  ProtobufWriter summary;
  for (const auto& metric : metrics) {
    ProtobufWriter value;
    value.text(kValueTag, metric.name);
    value.real32(kValueSimpleValue, static_cast<float>(metric.value));
    summary.message(kSummaryValue, value);
  }
  ProtobufWriter event = event_now();
  event.integer(kEventStep, static_cast<std::uint64_t>(step));
  event.message(kEventSummary, summary);
  write(event.bytes());
}

void TensorBoardFile::write(std::string_view event) {
  std::string record;
  append_fixed(record, event.size(), 8);
  append_fixed(record, masked_crc(record), 4);
  record.append(event);
  append_fixed(record, masked_crc(event), 4);
  file_.append(record);
}

}  // namespace lockstep::observe
