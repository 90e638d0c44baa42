// Reads any part of any tensor, whatever pieces it was written in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <lockstep/checkpoint/format/reader.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "pieces.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::part_of;
using testing::Placement;
using testing::random_cut;
using testing::random_tensor;
using testing::TemporaryFolder;
using testing::WholeTensor;

std::vector<std::byte> read(CheckpointReader& reader, const std::string& name,
                            const Placement& placement) {
  std::vector<std::byte> bytes(piece_bytes(reader.find(name)->dtype, placement));
  reader.read(name, placement, bytes);
  return bytes;
}

TEST(CheckpointReader, ReadsAnyPartOfWhateverPieces) {
  std::mt19937 random(5);
  for (int round = 0; round < 40; ++round) {
    const TemporaryFolder folder;
    std::map<std::string, WholeTensor> tensors = {
        {"model/a", random_tensor(DType::f32, {6, 5}, random)},
        {"model/b", random_tensor(DType::bf16, {4, 3, 2}, random)},
        {"model/empty", random_tensor(DType::f32, {0, 3}, random)},
        {"optimizer/step.a", random_tensor(DType::i64, {}, random)},
        {"optimizer/x", random_tensor(DType::f64, {17}, random)}};
    std::map<std::string, std::vector<Placement>> cuts;
    for (const auto& [name, tensor] : tensors) cuts[name] = random_cut(tensor.shape, random);
    testing::write_checkpoint(folder / "c", tensors, cuts);
    CheckpointReader reader(folder / "c", static_cast<int>(random() % 4));
    EXPECT_EQ(reader.manifest().state.step, 7);
    EXPECT_EQ(reader.read_text_file("config.json"), "{\"a\": 1}");
    EXPECT_THAT(reader.damages(), IsEmpty());
    for (const auto& [name, tensor] : tensors)
      for (const Placement& wanted : random_cut(tensor.shape, random))
        EXPECT_EQ(read(reader, name, wanted), part_of(tensor, wanted)) << name << wanted.text();
  }
}

// A tensor [2·n, m] that was cut as [2, n, m], and is read as one again, or in parts of the flat
// order.
TEST(CheckpointReader, ReadsWhatWasCutAsAnotherShape) {
  std::mt19937 random(6);
  const TemporaryFolder folder;
  const WholeTensor tensor = random_tensor(DType::f32, {8, 3}, random);
  const Placement as = Placement::full({2, 4, 3});
  testing::write_checkpoint(folder / "c", {{"w", tensor}},
                            {{"w", {as.cut_dim(1, 0, 2), as.cut_dim(1, 1, 2)}}});
  CheckpointReader reader(folder / "c");
  for (const Placement& wanted : {Placement::full({8, 3}), Placement::full({8, 3}).cut_flat(1, 3),
                                  as.cut_dim(1, 3, 4), as.cut_dim(1, 1, 2).cut_flat(0, 2)})
    EXPECT_EQ(read(reader, "w", wanted), part_of(tensor, wanted)) << wanted.text();
  EXPECT_THAT(usage_error([&] {
                read(reader, "w", Placement::full({8, 3}).cut_dim(0, 0, 2));
              }),
              HasSubstr("'w' was cut along the dims of [2, 4, 3]"));
}

TEST(CheckpointReader, ReadsNoMoreThanItNeeds) {
  std::mt19937 random(7);
  const TemporaryFolder folder;
  // Three stretches with a hash each, and a bit more.
  constexpr auto kElements = static_cast<std::int64_t>(3 * kHashedBytes / 4 + 100);
  const WholeTensor tensor = random_tensor(DType::f32, {kElements}, random);
  const Placement whole = Placement::full({kElements});
  testing::write_checkpoint(folder / "c", {{"w", tensor}},
                            {{"w", {whole.cut_flat(0, 2), whole.cut_flat(1, 2)}}}, 2);
  CheckpointReader reader(folder / "c");
  const Placement few = whole.cut_flat(mesh::Interval{1000, 1010});
  EXPECT_EQ(read(reader, "w", few), part_of(tensor, few));
  EXPECT_LE(reader.bytes_read(), kHashedBytes + 4096) << "one stretch, and a header";
  const Placement others = whole.cut_flat(mesh::Interval{2000, 2010});
  EXPECT_EQ(read(reader, "w", others), part_of(tensor, others));
  EXPECT_LE(reader.bytes_read(), kHashedBytes + 4096) << "which is here already";
  const std::uint64_t before = reader.bytes_read();
  EXPECT_EQ(read(reader, "w", whole), tensor.bytes);
  EXPECT_LE(reader.bytes_read() - before, tensor.bytes.size() + 4096) << "each byte once";
}

TEST(CheckpointReader, SaysWhatItHasNot) {
  std::mt19937 random(8);
  const TemporaryFolder folder;
  const Placement whole = Placement::full({6});
  testing::write_checkpoint(folder / "c", {{"w", random_tensor(DType::f32, {6}, random)}},
                            {{"w", {whole.cut_flat(0, 3), whole.cut_flat(2, 3)}}});
  CheckpointReader reader(folder / "c");
  EXPECT_THAT(usage_error([&] { read(reader, "w", whole); }), HasSubstr("w"));
  EXPECT_THAT(usage_error([&] { check_complete(reader.manifest(), "it"); }),
              HasSubstr("of the 6 elements of 'w' there are 4"));
  std::byte one[4];
  EXPECT_THAT(usage_error([&] { reader.read("v", Placement::full({}), one); }),
              HasSubstr("has no 'v'"));
  EXPECT_THAT(usage_error([&] { CheckpointReader(folder.path()); }),
              AllOf(HasSubstr("is no checkpoint"), HasSubstr("manifest.json")));
}

// The pieces have as many elements as the tensor, all as they were written, but one element is
// missing.
TEST(CheckpointReader, FindsAHoleThatAnotherPieceMakesUpFor) {
  std::mt19937 random(8);
  const TemporaryFolder folder;
  const Placement whole = Placement::full({6});
  testing::write_checkpoint(
      folder / "c", {{"w", random_tensor(DType::f32, {6}, random)}},
      {{"w", {whole.cut_flat(mesh::Interval{0, 4}), whole.cut_flat(mesh::Interval{3, 5})}}});
  CheckpointReader reader(folder / "c");
  EXPECT_THROW(reader.check_files(), DamagedCheckpoint);
  EXPECT_THAT(reader.damages(), ElementsAre(HasSubstr("of the 6 elements of 'w' there are 5")));
}

// Flips every bit of every file of a small checkpoint; the manifest's in memory, because every
// reader of a checkpoint parses it.
TEST(DamagedCheckpoint, IsFoundWhereverItIs) {
  std::mt19937 random(9);
  const TemporaryFolder folder;
  const std::map<std::string, WholeTensor> tensors = {
      {"model/a", random_tensor(DType::f32, {3, 2}, random)},
      {"model/b", random_tensor(DType::u8, {5}, random)}};
  testing::write_checkpoint(
      folder / "c", tensors,
      {{"model/a", {Placement::full({3, 2})}}, {"model/b", {Placement::full({5})}}}, 2);
  for (const auto& entry : std::filesystem::directory_iterator(folder / "c")) {
    const std::string whole = testing::read_file(entry.path());
    const std::string file = entry.path().filename().string();
    const bool in_memory = file == kManifestFile;
    for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
      const std::size_t at = bit / 8;
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit % 8));
      if (in_memory) {
        ASSERT_THROW(parse_manifest(flipped, file), checkpoint::DamagedCheckpoint) << "bit " << bit;
        if (random() % 100 != 0) continue;
      }
      testing::write_file(entry.path(), flipped);
      std::string found;
      try {
        CheckpointReader reader(folder / "c");
        const auto damages = reader.damages();
        if (!damages.empty()) found = damages.front();
        // A reader that loads the tensors finds the damage, too.
        if (file.ends_with(".safetensors")) {
          EXPECT_THROW(
              {
                for (const auto& [name, tensor] : tensors)
                  read(reader, name, Placement::full(tensor.shape));
              },
              checkpoint::DamagedCheckpoint)
              << file << " byte " << at;
        }
      } catch (const checkpoint::DamagedCheckpoint& damage) {
        found = damage.what();
      }
      ASSERT_THAT(found, HasSubstr(file)) << "byte " << at;
    }
    for (const std::size_t size : {whole.size() - 1, whole.size() / 2, std::size_t{0}}) {
      testing::write_file(entry.path(), whole.substr(0, size));
      EXPECT_THROW(CheckpointReader(folder / "c").check_files(), checkpoint::DamagedCheckpoint)
          << file << " of " << size << " bytes";
    }
    remove(entry.path());
    EXPECT_THROW(CheckpointReader(folder / "c").check_files(), UsageError) << "without " << file;
    testing::write_file(entry.path(), whole);
  }
  EXPECT_THAT(CheckpointReader(folder / "c").damages(), IsEmpty());
}

TEST(DamagedCheckpoint, NamesTheTensor) {
  std::mt19937 random(10);
  const TemporaryFolder folder;
  testing::write_checkpoint(
      folder / "c", {{"model/a", random_tensor(DType::f32, {4}, random)}},
      {{"model/a", {Placement::full({4}).cut_flat(0, 2), Placement::full({4}).cut_flat(1, 2)}}}, 1);
  std::string bytes = testing::read_file(folder / "c" / piece_file_name(0));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  testing::write_file(folder / "c" / piece_file_name(0), bytes);
  EXPECT_THAT(CheckpointReader(folder / "c").damages(),
              ::testing::ElementsAre(AllOf(HasSubstr("shard-00000.safetensors"),
                                           HasSubstr("'model/a' (elements 2:4 of [0:4] of [4])"))));
}

TEST(DamagedCheckpoint, TheOneBeforeIsTaken) {
  std::mt19937 random(11);
  const TemporaryFolder folder;
  const WholeTensor tensor = random_tensor(DType::f32, {4}, random);
  for (const int step : {1, 2, 3})
    testing::write_checkpoint(folder / checkpoint_name(step), {{"a", tensor}},
                              {{"a", {Placement::full({4})}}});
  EXPECT_EQ(newest_usable(folder.path()).checkpoint->step, 3);
  remove(folder / checkpoint_name(3) / piece_file_name(0));
  testing::write_file(folder / checkpoint_name(2) / kManifestFile, "{}");
  const UsableCheckpoint usable = newest_usable(folder.path());
  EXPECT_EQ(usable.checkpoint->step, 1);
  EXPECT_THAT(usable.damages, ::testing::ElementsAre(HasSubstr("step-00000003/shard-00000"),
                                                     HasSubstr("step-00000002/manifest.json")));
  remove(folder / checkpoint_name(2) / kManifestFile);
  EXPECT_THAT(newest_usable(folder.path()).damages,
              ::testing::ElementsAre(HasSubstr("step-00000003/shard-00000"),
                                     HasSubstr("step-00000002' has lost its manifest.json")));
}

// Whatever takes a file's place, the reader does not wait for it.
TEST(DamagedCheckpoint, OnlyRegularFilesAreRead) {
  std::mt19937 random(12);
  const TemporaryFolder folder;
  testing::write_checkpoint(folder / "c", {{"a", random_tensor(DType::f32, {4}, random)}},
                            {{"a", {Placement::full({4})}}}, 1);
  for (const std::string file : {"shard-00000.safetensors", "config.json", "manifest.json"}) {
    const std::string bytes = testing::read_file(folder / "c" / file);
    remove(folder / "c" / file);
    ASSERT_EQ(::mkfifo((folder / "c" / file).c_str(), 0600), 0);
    try {
      CheckpointReader(folder / "c").check_files();
      ADD_FAILURE() << file;
    } catch (const checkpoint::DamagedCheckpoint& damage) {
      EXPECT_THAT(damage.what(), AllOf(HasSubstr(file), HasSubstr("is a FIFO")));
    }
    remove(folder / "c" / file);
    testing::write_file(folder / "c" / file, bytes);
  }
  EXPECT_NO_THROW(CheckpointReader(folder / "c").check_files());
}

}  // namespace
}  // namespace lockstep::checkpoint
