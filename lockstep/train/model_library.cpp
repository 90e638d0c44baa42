#include <lockstep/train/model_library.h>

#include <dlfcn.h>

#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/base/version.h>

namespace lockstep::train {

namespace {

std::map<std::string, MakeOwnModel>& own_models() {
  static std::map<std::string, MakeOwnModel> models;
  return models;
}

constexpr std::string_view kMark = "LockstepModelLibrary";

// "Lockstep 0.1.0, LibTorch 2.6.0, libstdc++"; empty where the file does not say.
std::string built_with(const std::filesystem::path& library) {
  const MappedFile file(library);
  const std::string_view bytes(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  constexpr std::size_t kLongest = 200;
  for (auto at = bytes.find(kMark); at != bytes.npos; at = bytes.find(kMark, at + 1)) {
    const std::string_view text = bytes.substr(at + kMark.size(), kLongest);
    const auto end = text.find('}');
    // This file's own text is in every library that has it.
    if (text.starts_with("{Lockstep ") && !text.starts_with("{Lockstep ?") && end != text.npos)
      return std::string(text.substr(1, end - 1));
  }
  return "";
}

// The same of this program.
std::string own_build() {
  std::string text = LOCKSTEP_BUILT_WITH("?");
  text = text.substr(kMark.size() + 1, text.size() - kMark.size() - 2);
  return text.replace(text.find('?'), 1, version());
}

}  // namespace

bool register_own_model(const std::string& name, MakeOwnModel make) {
  own_models()[name] = std::move(make);
  return true;
}

MakeOwnModel load_own_model(const std::filesystem::path& library, const std::string& name) {
  const std::string theirs = built_with(library), ours = own_build();
  if (theirs.empty())
    throw UsageError("model.library is '{}', which has no model for lockstep train: register one "
                     "with LOCKSTEP_MODEL(\"{}\", …), and link Lockstep::model_library",
                     library.string(), name);
  if (theirs != ours)
    throw UsageError("model.library is '{}', built with {}, and this is {}: build the library "
                     "anew against this installation",
                     library.string(), theirs, ours);
  // A library registers its models once, however often it is asked for.
  static std::map<std::filesystem::path, std::map<std::string, MakeOwnModel>> loaded;
  if (!loaded.contains(library)) {
    own_models().clear();
    if (::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) == nullptr)
      throw UsageError("model.library cannot be loaded: {}", ::dlerror());
    loaded[library] = own_models();
  }
  const auto& models = loaded[library];
  std::vector<std::string> names;
  for (const auto& [one, make] : models) names.push_back(fmt::format("\"{}\"", one));
  const auto found = models.find(name);
  if (found == models.end())
    throw UsageError("model.name is \"{}\", and '{}' has {}", name, library.string(),
                     names.empty() ? "no model" : fmt::format("{}", fmt::join(names, ", ")));
  return found->second;
}

}  // namespace lockstep::train
