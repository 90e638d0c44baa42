#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

bool read_files(JsonSection& section, std::string_view key, const PathReader& paths,
                std::vector<std::filesystem::path>& files) {
  std::vector<std::string> texts;
  if (!section.texts(key, texts)) return false;
  for (const std::string& text : texts) files.push_back(paths.absolute(section.path(key), text));
  return true;
}

}  // namespace

void read_data(JsonSection& top, const PathReader& paths, DataSection& data) {
  JsonSection section = top.section("data");
  if (!section.present())
    top.missing("data", "say what is trained on, for example \"data\": {\"train\": \"input.txt\", "
                        "\"sequence_length\": 256}");
  if (!read_files(section, "train", paths, data.train))
    section.missing("train", "the text or token file to train on, or a list of them");
  if (read_files(section, "validation", paths, data.validation)) data.validation_fraction = 0;
  const bool cut = section.number("validation_fraction", data.validation_fraction,
                                  {.lowest = 0, .highest = 1, .below_highest = true});
  if (cut && data.validation_fraction > 0 && !data.validation.empty())
    section.mistake("validation_fraction",
                    fmt::format("is {}, but data.validation names files of their own: remove one "
                                "of them",
                                data.validation_fraction));
  section.choice("format", data.format, kFormats);
  if (!section.integer("sequence_length", data.sequence_length, 1, kMostTokens))
    section.missing("sequence_length", "the number of tokens of one sample, for example 256");
  section.integer("num_workers", data.num_workers, 0, 256);
  section.integer("prefetch", data.prefetch, 1, 1024);
}

}  // namespace lockstep::train
