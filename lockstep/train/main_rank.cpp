#include <lockstep/train/main_rank.h>

#include <exception>

#include <lockstep/base/error.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/train/options.h>

namespace lockstep::train {

std::string on_main_rank(const DistributedManager& dist, const std::function<std::string()>& work) {
  constexpr char kDone = 'd';
  constexpr char kFailed = 'f';
  constexpr char kLost = 'l';
  std::string message;
  std::exception_ptr failure;
  if (dist.is_main()) {
    try {
      message = kDone + work();
    } catch (const CommError& error) {
      failure = std::current_exception();
      message = kLost + error.details().operation + '\n' + error.details().explanation;
    } catch (const std::exception& error) {
      failure = std::current_exception();
      message = kFailed + std::string(error.what());
    } catch (...) {
      failure = std::current_exception();
      message = kFailed + std::string("the main rank failed with something that is no exception of "
                                      "the standard library, which tells no more");
    }
  }
  message = dist.broadcast(message);
  if (failure) std::rethrow_exception(failure);
  if (message.front() == kLost)
    throw CommError({.fault = Fault::aborted,
                     .operation = message.substr(1, message.find('\n') - 1),
                     .ranks = {0},
                     .explanation = message.substr(message.find('\n') + 1)});
  if (message.front() == kFailed) throw TrainingStopped(message.substr(1));
  return message.substr(1);
}

std::string asked_of_main_rank(const DistributedManager& dist,
                               const std::function<std::string()>& work) {
  return say_together(RankMessages(dist.world()),
                      [&] { return dist.is_main() ? work() : std::string(); })
      .front();
}

}  // namespace lockstep::train
