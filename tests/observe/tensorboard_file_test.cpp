#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>

#include <lockstep/base/durable_file.h>
#include <lockstep/observe/tensorboard_file.h>

#include "../base/files.h"

namespace lockstep::observe {
namespace {

using lockstep::testing::read_file;
using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

// A reader that shares no code with the writer: it computes the checksum a bit at a time, and reads
// fields by the protobuf specification. It throws if something is wrong.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  bool done() const { return rest_.empty(); }
  std::uint64_t fixed(std::size_t size) {
    std::uint64_t value = 0;
    const auto bytes = take(size);
    for (std::size_t i = 0; i < size; ++i)
      value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    return value;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    throw std::runtime_error("a varint without an end");
  }
  std::string_view take(std::uint64_t size) {
    if (size > rest_.size()) throw std::runtime_error("the bytes end too early");
    const auto taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  std::string_view record() {
    const auto header = take(8);
    if (fixed(4) != masked(header)) throw std::runtime_error("wrong checksum of a length");
    const auto data = take(Reader(header).fixed(8));
    if (fixed(4) != masked(data)) throw std::runtime_error("wrong checksum of a record");
    return data;
  }

 private:
  static std::uint32_t masked(std::string_view bytes) {
    std::uint32_t crc = 0xffffffffu;
    for (const char byte : bytes) {
      crc ^= static_cast<unsigned char>(byte);
      for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
    }
    crc = ~crc;
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  }

  std::string_view rest_;
};

struct Field {
  std::uint64_t number = 0;  // value of a varint or a fixed field
  std::string_view bytes;
};

std::multimap<std::pair<std::uint64_t, std::uint64_t>, Field> fields(std::string_view message) {
  std::multimap<std::pair<std::uint64_t, std::uint64_t>, Field> found;
  Reader reader(message);
  while (!reader.done()) {
    const auto tag = reader.varint();
    Field field;
    switch (tag & 7) {
      case 0: field.number = reader.varint(); break;
      case 1: field.number = reader.fixed(8); break;
      case 2: field.bytes = reader.take(reader.varint()); break;
      case 5: field.number = reader.fixed(4); break;
      default: throw std::runtime_error("an unknown wire type");
    }
    found.insert({{tag >> 3, tag & 7}, field});
  }
  return found;
}

struct Event {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string file_version;
  bool session_start = false;
  std::vector<std::pair<std::string, float>> scalars;
};

Event decode(std::string_view record) {
  Event event;
  for (const auto& [key, field] : fields(record)) {
    if (key == std::pair<std::uint64_t, std::uint64_t>{1, 1}) {
      event.wall_time = std::bit_cast<double>(field.number);
    } else if (key == std::pair<std::uint64_t, std::uint64_t>{2, 0}) {
      event.step = static_cast<std::int64_t>(field.number);
    } else if (key == std::pair<std::uint64_t, std::uint64_t>{3, 2}) {
      event.file_version = field.bytes;
    } else if (key == std::pair<std::uint64_t, std::uint64_t>{5, 2}) {
      for (const auto& [value_key, value] : fields(field.bytes)) {
        EXPECT_EQ(value_key, (std::pair<std::uint64_t, std::uint64_t>{1, 2}));
        auto parts = fields(value.bytes);
        const auto bits = static_cast<std::uint32_t>(parts.find({2, 5})->second.number);
        event.scalars.emplace_back(parts.find({1, 2})->second.bytes, std::bit_cast<float>(bits));
      }
    } else if (key == std::pair<std::uint64_t, std::uint64_t>{7, 2}) {
      event.session_start = fields(field.bytes).find({1, 0})->second.number == 1;
    } else {
      ADD_FAILURE() << "a field that does not belong here: " << key.first;
    }
  }
  return event;
}

std::vector<Event> events_of(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  std::vector<Event> events;
  for (Reader reader(bytes); !reader.done();) events.push_back(decode(reader.record()));
  return events;
}

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

TEST(TensorBoardFile, HoldsTheScalarsOfEachStep) {
  const TemporaryFolder folder;
  const double before = now();
  TensorBoardFile file(folder / "tensorboard");
  const std::vector<Metric> first = {{"loss", 2.5}, {"train/learning rate", 3e-4}};
  const std::vector<Metric> second = {{"loss", std::numeric_limits<double>::quiet_NaN()},
                                      {"tokens", 1e300}};
  file.record(1, first);
  file.record(std::int64_t{1} << 40, second);
  file.flush();

  EXPECT_THAT(file.path().filename().string(),
              MatchesRegex("events\\.out\\.tfevents\\.[0-9]{10}\\..+\\." +
                           std::to_string(::getpid()) + "\\.0"));
  const auto events = events_of(file.path());
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].file_version, "brain.Event:2");
  EXPECT_TRUE(events[0].scalars.empty());
  EXPECT_EQ(events[1].step, 1);
  EXPECT_EQ(events[1].scalars, (std::vector<std::pair<std::string, float>>{
                                   {"loss", 2.5f}, {"train/learning rate", 3e-4f}}));
  EXPECT_EQ(events[2].step, std::int64_t{1} << 40);
  ASSERT_EQ(events[2].scalars.size(), 2u);
  EXPECT_TRUE(std::isnan(events[2].scalars[0].second));
  EXPECT_EQ(events[2].scalars[1].second, std::numeric_limits<float>::infinity());
  for (const auto& event : events) {
    EXPECT_GE(event.wall_time, before);
    EXPECT_LE(event.wall_time, now());
    EXPECT_FALSE(event.session_start);
  }
}

TEST(TensorBoardFile, AResumedRunAsksForLaterStepsToBeForgotten) {
  const TemporaryFolder folder;
  const TensorBoardFile before(folder.path());
  const TensorBoardFile resumed(folder.path(), 40);
  EXPECT_NE(before.path(), resumed.path());
  const auto events = events_of(resumed.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_TRUE(events[1].session_start);
  EXPECT_EQ(events[1].step, 41);
}

TEST(TensorBoardFile, AFolderThatCannotBeMadeIsAFileError) {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  EXPECT_THROW(TensorBoardFile(folder / "file" / "tensorboard"), FileError);
}

TEST(TensorBoardFile, ProtocReadsItToo) {
  if (std::system("protoc --version >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "protoc is not installed (package protobuf-compiler)";
  const TemporaryFolder folder;
  TensorBoardFile file(folder.path());
  const std::vector<Metric> metrics = {{"loss", 2.5}};
  file.record(300, metrics);
  const std::string bytes = read_file(file.path());
  Reader reader(bytes);
  reader.record();
  write_file(folder / "event", std::string(reader.record()));
  const std::string command =
      fmt::format("protoc --decode_raw <'{0}/event' >'{0}/text' 2>&1", folder.path().string());
  ASSERT_EQ(std::system(command.c_str()), 0) << read_file(folder / "text");
  // 0x40200000 is 2.5 as a float.
  EXPECT_THAT(read_file(folder / "text"),
              HasSubstr("2: 300\n5 {\n  1 {\n    1: \"loss\"\n    2: 0x40200000\n  }\n}\n"));
}

}  // namespace
}  // namespace lockstep::observe
