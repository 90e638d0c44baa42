// Tells answers over HTTP from other bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include <lockstep/launch/rendezvous/etcd.h>
#include <lockstep/net/socket.h>

#include "../base/errors.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;

void expect_no_answer(const std::string& bytes) {
  EXPECT_EQ(comm_error([&] { parse_http_answer(bytes); }).first, Fault::corrupted) << bytes;
}

TEST(Http, AnswersOfEveryLengthAreRead) {
  HttpAnswer answer = parse_http_answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body, "{}");
  answer = parse_http_answer("HTTP/1.1 404 Not Found\r\n\r\nuntil the end");
  EXPECT_EQ(answer.status, 404);
  EXPECT_EQ(answer.body, "until the end");
  answer = parse_http_answer("HTTP/1.1 200 OK\r\ntransfer-encoding:  Chunked\r\nTrailer: X\r\n\r\n"
                             "5\r\nabcde\r\nA;note=1\r\n0123456789\r\n0\r\nX: y\r\n\r\n");
  EXPECT_EQ(answer.body, "abcde0123456789");
}

TEST(Http, EverythingElseIsNone) {
  const std::string head = "HTTP/1.1 200 OK\r\n";
  expect_no_answer("");
  expect_no_answer("\r\n\r\n");
  expect_no_answer("SSH-2.0-OpenSSH_9.2\r\n");
  expect_no_answer("HTTP/1.1 20");
  expect_no_answer("HTTP/1.1 abc OK\r\n\r\n");
  expect_no_answer("HTTP/1.1 999 OK\r\n\r\n");
  expect_no_answer(head);
  expect_no_answer(head + "no colon\r\n\r\n");
  expect_no_answer(head + "Content-Length: 3\r\n\r\n{}");
  expect_no_answer(head + "Content-Length: -1\r\n\r\n{}");
  expect_no_answer(head + "Content-Length: 99999999999999999999\r\n\r\n{}");
  expect_no_answer(head + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}");
  expect_no_answer(head + "Transfer-Encoding: gzip\r\n\r\n{}");
  for (const char* chunks : {"", "2\r\n{", "2\r\n{}", "2\r\n{}xx0\r\n\r\n", "-2\r\n{}\r\n0\r\n\r\n",
                             "ffffffffffffffff\r\n{}\r\n", "2\r\n{}\r\n"})
    expect_no_answer(head + "Transfer-Encoding: chunked\r\n\r\n" + chunks);
}

// Answers once with the given bytes, and then closes the connection or not.
class Stranger {
 public:
  enum class Then { closes, stays };

  Stranger(std::string bytes, Then then)
      : listener_(net::listen_tcp({"127.0.0.1", 0})),
        thread_([this, bytes = std::move(bytes), then](const std::stop_token& stop) {
          net::Fd guest;
          while (!guest && !stop.stop_requested()) {
            guest = net::accept(listener_);
            std::this_thread::sleep_for(milliseconds(2));
          }
          try {
            net::write_all(guest, std::as_bytes(std::span(bytes)),
                           Deadline::after(milliseconds(5000)));
          } catch (const CommError&) {  // enough was read
          }
          if (then == Then::closes) guest.reset();
          while (!stop.stop_requested()) std::this_thread::sleep_for(milliseconds(2));
        }) {}

  net::Address address() const { return {"127.0.0.1", net::local_port(listener_)}; }

 private:
  net::Fd listener_;
  std::jthread thread_;
};

Fault fault_with(const Stranger& stranger, milliseconds longest) {
  return comm_error([&] { http_post(stranger.address(), "/", "{}", Deadline::after(longest)); })
      .first;
}

TEST(Http, NobodyIsWaitedForOrReadWithoutEnd) {
  EXPECT_EQ(fault_with({"", Stranger::Then::stays}, milliseconds(200)), Fault::timeout);
  EXPECT_EQ(fault_with({"HTTP/1.1 200 OK\r\n", Stranger::Then::stays}, milliseconds(200)),
            Fault::timeout);
  EXPECT_EQ(fault_with({std::string(1 << 20, 'x'), Stranger::Then::stays}, milliseconds(20'000)),
            Fault::corrupted);
  const net::Address nowhere{"127.0.0.1", net::local_port(net::listen_tcp({"127.0.0.1", 0}))};
  const auto [fault, text] =
      comm_error([&] { http_post(nowhere, "/", "{}", Deadline::after(milliseconds(20'000))); });
  EXPECT_EQ(fault, Fault::peer_lost);
  EXPECT_THAT(text, HasSubstr("refused"));
}

}  // namespace
}  // namespace lockstep::launch::testing
