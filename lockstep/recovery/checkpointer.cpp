#include <lockstep/recovery/checkpointer.h>

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <stop_token>
#include <thread>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/format/piece_file.h>
#include <lockstep/checkpoint/held_tensors.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/writer.h>
#include <lockstep/comm/open_groups.h>
#include <lockstep/recovery/load_together.h>

namespace lockstep {

namespace {

namespace fs = std::filesystem;
using checkpoint::Manifest;

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

// Lowers this thread's priority: the rest of the program comes first, on its cores and at its disk.
// A thread that nobody competes with is as fast as ever.
void yield_to_computing() {
#if defined(__linux__)
  const auto self = static_cast<id_t>(::gettid());
  constexpr int kFarBelow = 19;  // a seventieth of the time of a thread that computes beside it
  ::setpriority(PRIO_PROCESS, self, ::getpriority(PRIO_PROCESS, self) + kFarBelow);
#endif
}

}  // namespace

std::vector<mesh::HeldTensor> state_of(DistributedManager& dist, const ModelRef& model,
                                       const optim::Optimizer& optimizer) {
  auto all = internal::below("model/", dist.held_state(model));
  auto more = internal::below("optimizer/", dist.held_optimizer_state(model, optimizer));
  all.insert(all.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  return all;
}

void check_contents(const CheckpointContents& contents) {
  check_file_names(contents.files);
  checkpoint::held_pieces(contents.tensors);
  checkpoint::to_text(contents.state);
}

struct Checkpointer::State {
  RankMessages ranks;
  fs::path folder;
  CheckpointerOptions options;

  // The share of these that each rank writes: the same in every save of a run.
  std::vector<checkpoint::HeldPiece> shared;
  std::vector<checkpoint::WrittenPart> written;

  // The steps of a save under way: ranks do each thing together, and each tells the others how it
  // went before the next begins.
  enum class Phase { none, opening, writing, committing, dropping };
  enum class Where { this_thread, another_thread };
  Phase phase = Phase::none;
  Where where = Where::this_thread;
  std::int64_t step = 0;
  checkpoint::TrainingState training;                        // the main rank's
  std::map<std::string, std::string> files;                  // the main rank's
  std::unique_ptr<checkpoint::CheckpointWriter> checkpoint;  // the main rank's
  checkpoint::HostCopy copy;
  std::stop_source no_longer_wanted;
  std::thread worker;
  Outcome outcome;      // of this rank's part of the phase, once it is done
  std::string failure;  // of a save that is dropped
  std::atomic<bool> is_done{false};

  // All that touches a disk comes through here: training does not wait for one.
  void begin(Phase next, std::function<std::string()> work) {
    phase = next;
    is_done = false;
    const auto run = [this, work = std::move(work)] { done_with(outcome_of(work)); };
    if (where == Where::this_thread) return run();
    worker = std::thread([run] {
      yield_to_computing();
      run();
    });
  }

  // The main rank's work; the others have none.
  void begin_on_first(Phase next, std::function<std::string()> work) {
    if (ranks.is_first()) return begin(next, std::move(work));
    phase = next;
    done_with({});
  }

  void done_with(Outcome came_of_it) {
    outcome = std::move(came_of_it);
    is_done = true;
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

  void start(const CheckpointContents& contents, Where on, checkpoint::HostCopy::What what) {
    if (phase != Phase::none)
      throw UsageError("a checkpoint of step {} is still being written: poll() or finish() says "
                       "when it is done",
                       step);
    check_contents(contents);
    share_out(contents.tensors);
    step = contents.state.step;
    training = contents.state;
    files = contents.files;
    where = on;
    Outcome copied = outcome_of([&] {
      copy.take(contents.tensors, written, what);
      comm::check_device_results();
      return std::string();
    });
    if (copied.kind == Outcome::Kind::done)
      return begin_on_first(Phase::opening, [this] { return open(); });
    phase = Phase::opening;
    done_with(std::move(copied));
  }

  // Where the files go.
  std::string open() {
    checkpoint = std::make_unique<checkpoint::CheckpointWriter>(folder, step, options.lock);
    return checkpoint->path().string();
  }

  std::string write(const std::string& part) const {
    const auto& pieces = copy.pieces();
    checkpoint::check_free_space(part, checkpoint::piece_file_bytes(pieces) + kSpareBytes);
    Manifest mine = checkpoint::write_piece_file(part, checkpoint::piece_file_name(ranks.rank()),
                                                 pieces, no_longer_wanted.get_token());
    if (ranks.is_first())
      for (const auto& [name, text] : files)
        checkpoint::add(mine, checkpoint::write_text_file(part, name, text));
    return checkpoint::to_text(mine);
  }

  // Commits the parts of all ranks.
  std::string commit(const std::vector<Outcome>& written_parts) {
    Manifest manifest{.state = training, .files = {}, .tensors = {}};
    for (const Outcome& one : written_parts)
      checkpoint::add(manifest, checkpoint::parse_manifest(one.text, "a rank's part"));
    const fs::path& part = checkpoint->path();
    for (const auto& [name, file] : manifest.files) {
      std::error_code error;
      if (fs::file_size(part / name, error) != file.bytes || error)
        throw FileError("'{}' is not there as another rank wrote it: checkpoints want a folder "
                        "that all hosts share",
                        (part / name).string());
    }
    checkpoint::check_complete(manifest, fmt::format("the checkpoint of step {}", step));
    write_durably(part / checkpoint::kManifestFile, checkpoint::to_text(manifest),
                  DurableFile::Folder::is_left);
    const std::string path = checkpoint->commit().string();
    checkpoint.reset();
    try {
      if (options.committed) options.committed(step);
    } catch (const FileError& error) {
      log::warn("the checkpoint of step {} is complete, but: {}", step, error.what());
    }
    remove_old_or_warn(folder, options.keep_last);
    return path;
  }

  // Waits for the phase on all ranks and begins the next; the result after the last of them.
  std::optional<SaveResult> advance() {
    if (worker.joinable()) worker.join();
    const std::vector<Outcome> all = tell_all(ranks, outcome);
    const auto failed = std::ranges::find_if(
        all, [](const Outcome& one) { return one.kind != Outcome::Kind::done; });
    if (failed != all.end()) {
      failure = fmt::format("rank {}: {}", failed - all.begin(), failed->text);
      begin_on_first(Phase::dropping, [this] { return drop(); });
      return std::nullopt;
    }
    switch (phase) {
      case Phase::opening:
        begin(Phase::writing, [this, part = all.front().text] { return write(part); });
        return std::nullopt;
      case Phase::writing:
        begin_on_first(Phase::committing, [this, all] { return commit(all); });
        return std::nullopt;
      case Phase::committing: return end({.step = step, .path = all.front().text, .error = {}});
      case Phase::dropping: return end({.step = step, .path = {}, .error = failure});
      case Phase::none: break;
    }
    LOCKSTEP_CHECK(false, "there is no save to go on with");
    return std::nullopt;
  }

  // Removes what was written of a checkpoint that is not to be.
  std::string drop() {
    checkpoint.reset();
    return "";
  }

  SaveResult end(SaveResult result) {
    phase = Phase::none;
    return result;
  }

  SaveResult finish() {
    while (true)
      if (auto result = advance()) return *std::move(result);
  }
};

Checkpointer::Checkpointer(RankMessages ranks, fs::path folder, CheckpointerOptions options)
    : state_(new State{.ranks = std::move(ranks),
                       .folder = std::move(folder),
                       .options = std::move(options),
                       .shared = {},
                       .written = {},
                       .training = {},
                       .files = {},
                       .checkpoint = nullptr,
                       .copy = {},
                       .no_longer_wanted = {},
                       .worker = {},
                       .outcome = {},
                       .failure = {}}) {}

Checkpointer::~Checkpointer() {
  state_->no_longer_wanted.request_stop();
  if (state_->worker.joinable()) state_->worker.join();
}

void Checkpointer::save(const CheckpointContents& contents) {
  state_->start(contents, State::Where::another_thread, checkpoint::HostCopy::What::everything);
}

SaveResult Checkpointer::save_and_wait(const CheckpointContents& contents) {
  state_->start(contents, State::Where::this_thread, checkpoint::HostCopy::What::elsewhere);
  return state_->finish();
}

bool Checkpointer::under_way() const { return state_->phase != State::Phase::none; }

std::optional<SaveResult> Checkpointer::poll() {
  if (!under_way()) return std::nullopt;
  const RankMessages& ranks = state_->ranks;
  if (ranks.sum(state_->is_done ? 1 : 0) < ranks.size()) return std::nullopt;
  return state_->advance();
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

checkpoint::TrainingState load_checkpoint(DistributedManager& dist, const fs::path& checkpoint,
                                          const ModelRef& model, optim::Optimizer& optimizer,
                                          std::vector<mesh::HeldTensor> where_there) {
  return internal::load_state_of(dist, model, optimizer, std::move(where_there),
                                 [&](const auto& tensors, const LoadOptions& options) {
                                   return load_checkpoint(RankMessages(dist.world()), checkpoint,
                                                          tensors, options);
                                 });
}

namespace internal {

std::vector<mesh::HeldTensor> below(const std::string& prefix,
                                    std::vector<mesh::HeldTensor> tensors) {
  for (mesh::HeldTensor& tensor : tensors) tensor.name = prefix + tensor.name;
  return tensors;
}

checkpoint::TrainingState load_state_of(
    DistributedManager& dist, const ModelRef& model, optim::Optimizer& optimizer,
    std::vector<mesh::HeldTensor> where_there,
    const std::function<checkpoint::TrainingState(const std::vector<mesh::HeldTensor>& tensors,
                                                  const LoadOptions& options)>& load) {
  const auto of_model = below("model/", dist.held_state(model));
  const auto of_optimizer = dist.held_optimizer_state(model, optimizer);
  auto all = below("optimizer/", of_optimizer);
  all.insert(all.end(), of_model.begin(), of_model.end());
  auto loaded = load(all, LoadOptions{.complete = {"model/", "optimizer/"},
                                      .where_there = std::move(where_there)});
  dist.held_state_written(model);
  std::vector<NamedTensor> state;
  for (const mesh::HeldTensor& one : of_optimizer) state.push_back({one.name, one.values});
  optimizer.load_state(state);
  return loaded;
}

}  // namespace internal

}  // namespace lockstep
