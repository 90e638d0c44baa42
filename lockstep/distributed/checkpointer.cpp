#include <lockstep/distributed/checkpointer.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/folder.h>
#include <lockstep/checkpoint/host_copy.h>
#include <lockstep/checkpoint/manifest.h>
#include <lockstep/checkpoint/piece_file.h>
#include <lockstep/checkpoint/safetensors/free_space.h>
#include <lockstep/checkpoint/safetensors/quote.h>

namespace lockstep {

namespace {

namespace fs = std::filesystem;
using checkpoint::Manifest;

// What a rank says to the others: how it went, and then what.
constexpr char kDone = 'd';
constexpr char kFailed = 'f';

// For the manifest, folders and what a file system adds to them.
constexpr std::uint64_t kSpareBytes = 1 << 16;

void check_file_names(const std::map<std::string, std::string>& files) {
  for (const auto& [name, text] : files) {
    const bool ours = name == checkpoint::kManifestFile || name.ends_with(".safetensors");
    if (ours || name.empty() || name.front() == '.' || name.find('/') != std::string::npos)
      throw UsageError("{} cannot be added to a checkpoint: {}", checkpoint::quote(name),
                       ours ? "the name is taken" : "it is not the name of a file");
  }
}

// The new one is safe: that an old one stays costs nothing but room on the disk.
void remove_old_or_warn(const fs::path& folder, int keep_last) {
  try {
    checkpoint::remove_old(folder, keep_last);
  } catch (const Error& error) {
    log::warn("an old checkpoint stays where it is: {}", error.what());
  }
}

// The first of all ranks' messages that is no good.
const std::string* find_failure(const std::vector<std::string>& messages) {
  const auto found =
      std::ranges::find_if(messages, [](const std::string& one) { return one.front() != kDone; });
  return found == messages.end() ? nullptr : &*found;
}

}  // namespace

void check_contents(const CheckpointContents& contents) {
  check_file_names(contents.files);
  checkpoint::held_pieces(contents.tensors);
  checkpoint::to_text(contents.state);
}

struct Checkpointer::State {
  RankMessages ranks;
  fs::path folder;
  CheckpointerOptions options;

  // Who writes what of these: the same in every save of a run.
  std::vector<checkpoint::HeldPiece> shared;
  std::vector<checkpoint::WrittenPart> written;

  // Of a save under way.
  bool under_way = false;
  std::int64_t step = 0;
  checkpoint::TrainingState training;                        // the main rank's
  std::unique_ptr<checkpoint::CheckpointWriter> checkpoint;  // the main rank's
  checkpoint::HostCopy copy;
  std::thread writer;
  std::string message;  // the writer's
  std::atomic<bool> is_written{false};

  // Runs while ranks are to go on together, whatever happens to this one.
  std::string tried(const std::function<std::string()>& work) const {
    try {
      return kDone + work();
    } catch (const std::exception& error) {
      return kFailed + fmt::format("rank {}: {}", ranks.rank(), error.what());
    }
  }

  void share_out(const std::vector<mesh::HeldTensor>& tensors) {
    auto pieces = checkpoint::held_pieces(tensors);
    // Ranks that have other tensors than before have so together.
    if (ranks.sum(pieces == shared ? 0 : 1) == 0) return;
    std::vector<std::vector<checkpoint::HeldPiece>> all;
    for (const std::string& text : ranks.gather(checkpoint::to_text(pieces)))
      all.push_back(checkpoint::parse_held_pieces(text));
    written = checkpoint::share_out(all)[static_cast<std::size_t>(ranks.rank())];
    shared = std::move(pieces);
  }

  // Where the files go; the main rank makes it.
  std::string open_folder() {
    if (!ranks.is_first()) return "";
    return tried([&] {
      checkpoint = std::make_unique<checkpoint::CheckpointWriter>(folder, step);
      return checkpoint->path().string();
    });
  }

  // Whether there is a copy to write; where there is not, the message says why.
  bool take_copy(const std::vector<mesh::HeldTensor>& tensors, checkpoint::HostCopy::What what) {
    message = tried([&] {
      copy.take(tensors, written, what);
      return std::string();
    });
    is_written = message.front() != kDone;
    return !is_written;
  }

  void write(const std::string& part, const std::map<std::string, std::string>& files) {
    message = tried([&] {
      const auto& pieces = copy.pieces();
      checkpoint::check_free_space(part, checkpoint::piece_file_bytes(pieces) + kSpareBytes);
      Manifest mine =
          checkpoint::write_piece_file(part, checkpoint::piece_file_name(ranks.rank()), pieces);
      if (ranks.is_first())
        for (const auto& [name, text] : files)
          checkpoint::add(mine, checkpoint::write_text_file(part, name, text));
      return checkpoint::to_text(mine);
    });
    is_written = true;
  }

  // Of all ranks' parts; the main rank's part.
  std::string commit(const std::vector<std::string>& messages) {
    return tried([&] {
      Manifest manifest{.state = training, .files = {}, .tensors = {}};
      for (const std::string& one : messages)
        checkpoint::add(manifest, checkpoint::parse_manifest(one.substr(1), "a rank's part"));
      const fs::path& part = checkpoint->path();
      for (const auto& [name, file] : manifest.files) {
        std::error_code error;
        if (fs::file_size(part / name, error) != file.bytes || error)
          throw FileError("'{}' is not there as another rank wrote it: checkpoints want a folder "
                          "that all hosts share",
                          (part / name).string());
      }
      checkpoint::check_complete(manifest, fmt::format("the checkpoint of step {}", step));
      write_durably(part / checkpoint::kManifestFile, checkpoint::to_text(manifest));
      const std::string path = checkpoint->commit().string();
      checkpoint.reset();
      remove_old_or_warn(folder, options.keep_last);
      return path;
    });
  }

  SaveResult finish() {
    if (writer.joinable()) writer.join();
    under_way = false;
    const std::vector<std::string> messages = ranks.gather(message);
    const std::string* failure = find_failure(messages);
    std::string end;
    if (failure == nullptr) {
      end = ranks.broadcast(ranks.is_first() ? commit(messages) : "");
      if (end.front() != kDone) failure = &end;
    }
    checkpoint.reset();
    if (failure != nullptr) return {.step = step, .path = {}, .error = failure->substr(1)};
    return {.step = step, .path = end.substr(1), .error = {}};
  }
};

Checkpointer::Checkpointer(RankMessages ranks, fs::path folder, CheckpointerOptions options)
    : state_(new State{.ranks = std::move(ranks),
                       .folder = std::move(folder),
                       .options = options,
                       .shared = {},
                       .written = {},
                       .training = {},
                       .checkpoint = nullptr,
                       .copy = {},
                       .writer = {},
                       .message = {}}) {}

Checkpointer::~Checkpointer() {
  if (state_->writer.joinable()) state_->writer.join();
}

bool Checkpointer::begin(const CheckpointContents& contents) {
  State& state = *state_;
  if (state.under_way)
    throw UsageError("a checkpoint of step {} is still being written: poll() or finish() says when "
                     "it is done",
                     state.step);
  check_contents(contents);
  state.step = contents.state.step;
  state.training = contents.state;
  state.share_out(contents.tensors);
  state.message = state.ranks.broadcast(state.open_folder());
  state.under_way = true;
  state.is_written = state.message.front() != kDone;
  return !state.is_written;
}

void Checkpointer::save(const CheckpointContents& contents) {
  if (!begin(contents)) return;
  State& state = *state_;
  const std::string part = state.message.substr(1);
  if (!state.take_copy(contents.tensors, checkpoint::HostCopy::What::everything)) return;
  state.writer = std::thread([&state, part, files = contents.files] { state.write(part, files); });
}

SaveResult Checkpointer::save_and_wait(const CheckpointContents& contents) {
  State& state = *state_;
  if (begin(contents)) {
    const std::string part = state.message.substr(1);
    if (state.take_copy(contents.tensors, checkpoint::HostCopy::What::elsewhere))
      state.write(part, contents.files);
  }
  return state.finish();
}

bool Checkpointer::under_way() const { return state_->under_way; }

std::optional<SaveResult> Checkpointer::poll() {
  if (!under_way()) return std::nullopt;
  const RankMessages& ranks = state_->ranks;
  if (ranks.sum(state_->is_written ? 1 : 0) < ranks.size()) return std::nullopt;
  return state_->finish();
}

SaveResult Checkpointer::finish() {
  if (!under_way()) throw UsageError("there is no checkpoint being written to wait for");
  return state_->finish();
}

std::int64_t Checkpointer::bytes_written() const {
  std::int64_t bytes = 0;
  for (const auto& piece : state_->copy.pieces())
    bytes += static_cast<std::int64_t>(piece.bytes.size());
  return bytes;
}

checkpoint::TrainingState load_checkpoint(const RankMessages& ranks, const fs::path& path,
                                          const std::vector<mesh::HeldTensor>& tensors,
                                          const LoadOptions& options) {
  std::unique_ptr<checkpoint::CheckpointReader> reader;
  do_together(ranks, [&] {
    reader = std::make_unique<checkpoint::CheckpointReader>(path, ranks.rank());
    reader->check_files(ranks.size());
  });
  const auto& stored = reader->manifest().tensors;
  check_fit_together(ranks, fmt::format("the checkpoint '{}'", path.string()), stored, tensors,
                     options);
  do_together(ranks, [&] {
    checkpoint::load_held(*reader, tensors);
    for (const mesh::HeldTensor& one : options.where_there)
      if (checkpoint::fit_fault(stored, {&one, 1}).empty())
        checkpoint::load_held(*reader, {&one, 1});
  });
  return reader->manifest().state;
}

}  // namespace lockstep
