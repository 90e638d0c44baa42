// The messages of ranks about calls that take long: questions, answers, and news of circles.
#include <string>
#include <string_view>

#include <lockstep/flight/circle.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());

  if (const auto question = flight::Question::decode(text)) {
    const std::string again = question->encode();
    const auto same = flight::Question::decode(again);
    require(same && same->encode() == again, "a question can be passed on");
    flight::OpenCalls nothing(0);
    require(nothing.answer(*question).state == flight::Answer::State::at_large,
            "a rank without groups knows of nothing");
  }

  if (const auto news = flight::CircleNews::decode(text))
    require(flight::CircleNews::decode(news->encode())->ranks == news->ranks, "news are passed on");
  if (const auto call = flight::CallToEnd::decode(text))
    require(flight::CallToEnd::decode(call->encode())->entry == call->entry, "a call is named");

  const flight::Answer answer = flight::Answer::decode(text);
  const std::string again = answer.encode();
  require(flight::Answer::decode(again).encode() == again, "an answer can be passed on");
  if (answer.state != flight::Answer::State::blocked) return;

  // All ranks always give the same answer.
  int asked = 0;
  const auto circle = flight::find_circle(answer.call, [&](int, const flight::Question&) {
    ++asked;
    return answer;
  });
  require(asked <= 2 * static_cast<int>(answer.call.needs.size()), "a search is short");
  if (!circle) return;
  require(!circle->calls.empty() && circle->text().ends_with("."), "a circle has calls");
}

}  // namespace lockstep::fuzz
