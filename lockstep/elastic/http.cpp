#include <lockstep/elastic/http.h>

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>

#include <lockstep/base/error.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

namespace {

constexpr std::string_view kLineEnd = "\r\n";

[[noreturn]] void fail_http(Fault fault, const std::string& explanation) {
  throw CommError({.fault = fault, .operation = "HTTP request", .explanation = explanation});
}

[[noreturn]] void no_answer(const std::string& what) {
  fail_http(Fault::corrupted, fmt::format("What answered does not speak HTTP/1.1 ({}).", what));
}

// The whole text as a number that is not below zero and fits what may come.
std::optional<std::size_t> number(std::string_view text, int base) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size() || value > kLongestAnswer)
    return std::nullopt;
  return value;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char one, char other) {
    return std::tolower(static_cast<unsigned char>(one)) ==
           std::tolower(static_cast<unsigned char>(other));
  });
}

// Takes the next line off the front of `text`.
std::string_view next_line(std::string_view& text) {
  const auto end = text.find(kLineEnd);
  if (end == std::string_view::npos) no_answer("a line has no end");
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end + kLineEnd.size());
  return line;
}

int parse_status(std::string_view line) {
  constexpr std::string_view kVersion = "HTTP/1.";
  // "HTTP/1.1 200 OK"
  if (!line.starts_with(kVersion) || line.size() < 12 || line[8] != ' ')
    no_answer("it does not begin with a status");
  const auto status = number(line.substr(9, 3), 10);
  if (!status || *status < 100 || *status > 599) no_answer("its status is no number");
  return static_cast<int>(*status);
}

// What follows the last chunk (trailers) says nothing that is needed here.
std::string join_chunks(std::string_view text) {
  std::string body;
  while (true) {
    std::string_view line = next_line(text);
    line = trimmed(line.substr(0, line.find(';')));
    const auto size = number(line, 16);
    if (!size) no_answer("the size of a chunk is no number, or too large");
    if (*size == 0) return body;
    if (text.size() < *size + kLineEnd.size() || text.substr(*size, kLineEnd.size()) != kLineEnd)
      no_answer("it ends within a chunk");
    body += text.substr(0, *size);
    text.remove_prefix(*size + kLineEnd.size());
  }
}

std::string read_until_closed(const net::Fd& socket, const Deadline& deadline) {
  std::string all;
  std::array<char, 4096> bytes;
  while (true) {
    const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got == 0) return all;
    if (got > 0) {
      all.append(bytes.data(), static_cast<std::size_t>(got));
      if (all.size() > kLongestAnswer) no_answer("it is too long");
      if (deadline.passed())
        fail_http(Fault::timeout,
                  fmt::format("The answer did not end within {:.1f} s.", deadline.span_seconds()));
    } else if (errno == EAGAIN) {
      if (!net::wait_ready(socket.get(), POLLIN, deadline))
        fail_http(Fault::timeout,
                  fmt::format("No answer within {:.1f} s.", deadline.span_seconds()));
    } else if (errno != EINTR) {
      fail_http(Fault::peer_lost, std::strerror(errno));
    }
  }
}

}  // namespace

HttpAnswer parse_http_answer(std::string_view bytes) {
  HttpAnswer answer;
  answer.status = parse_status(next_line(bytes));
  std::optional<std::size_t> length;
  bool chunked = false;
  for (std::string_view line = next_line(bytes); !line.empty(); line = next_line(bytes)) {
    const auto colon = line.find(':');
    if (colon == std::string_view::npos) no_answer("a header has no value");
    const std::string_view name = line.substr(0, colon);
    const std::string_view value = trimmed(line.substr(colon + 1));
    if (same_word(name, "Content-Length")) {
      const auto said = number(value, 10);
      if (!said || (length && *length != *said)) no_answer("its length is no number, or too large");
      length = said;
    } else if (same_word(name, "Transfer-Encoding")) {
      if (!same_word(value, "chunked")) no_answer("it comes in an encoding that was not asked for");
      chunked = true;
    }
  }
  if (chunked) {
    answer.body = join_chunks(bytes);
  } else {
    if (length && bytes.size() < *length) no_answer("it ends too early");
    answer.body = bytes.substr(0, length.value_or(bytes.size()));
  }
  return answer;
}

HttpAnswer http_post(const net::Address& server, const std::string& path, const std::string& json,
                     const Deadline& deadline) {
  int error = 0;
  const net::Fd socket = net::try_connect_tcp(server, deadline, error);
  if (!socket)
    fail_http(error == ETIMEDOUT ? Fault::timeout : Fault::peer_lost, std::strerror(error));
  const std::string request = fmt::format("POST {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n"
                                          "Content-Type: application/json\r\n"
                                          "Content-Length: {}\r\n\r\n{}",
                                          path, server.text(), json.size(), json);
  net::write_all(socket, std::as_bytes(std::span(request)), deadline);
  return parse_http_answer(read_until_closed(socket, deadline));
}

}  // namespace lockstep::elastic
