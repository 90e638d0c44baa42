#include <lockstep/observe/tensorboard_file.h>

#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/hash.h>

namespace lockstep::observe {

namespace {

void append_fixed(std::string& bytes, std::uint64_t bits, int size) {
  for (int i = 0; i < size; ++i) bytes.push_back(static_cast<char>(bits >> (8 * i)));
}

// A message of protobuf, field by field: the few types of field that TensorBoard's messages have.
class ProtobufWriter {
 public:
  void integer(std::uint32_t field, std::uint64_t value) {
    tag(field, 0);
    varint(value);
  }
  void real64(std::uint32_t field, double value) {
    tag(field, 1);
    append_fixed(bytes_, std::bit_cast<std::uint64_t>(value), 8);
  }
  void text(std::uint32_t field, std::string_view value) {
    tag(field, 2);
    varint(value.size());
    bytes_.append(value);
  }
  void message(std::uint32_t field, const ProtobufWriter& value) { text(field, value.bytes_); }
  void real32(std::uint32_t field, float value) {
    tag(field, 5);
    append_fixed(bytes_, std::bit_cast<std::uint32_t>(value), 4);
  }

  const std::string& bytes() const { return bytes_; }

 private:
  void tag(std::uint32_t field, std::uint32_t wire_type) { varint(field << 3 | wire_type); }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }

  std::string bytes_;
};

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
  // The number tells two files apart that a process makes within a second.
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

// A CRC of bytes that contain a CRC detects little, so TensorFlow rotates it and adds a constant.
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
