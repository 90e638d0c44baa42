// `lockstep check`: `check hang` here, what needs LibTorch in lockstep-torch.
#include <vector>

#include <cli/dispatch.h>
#include <cli/hang.h>

namespace lockstep::cli {

int check(Arguments arguments) {
  if (!arguments.empty() && arguments.front() == "hang") return check_hang(arguments.subspan(1));
  std::vector<std::string> words = {"lockstep", "check"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  become_torch_program("check", argv.data());
}

}  // namespace lockstep::cli
