// Starts a store and uses it.
#include <cstdio>
#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/store/client.h>
#include <lockstep/store/server.h>

int main() {
  using namespace lockstep;
  const auto deadline = Deadline::after(milliseconds(10'000));
  const auto secret = net::Secret::random();
  store::Server server({.host = "127.0.0.1", .port = 0}, secret);
  store::Client client(server.address(), secret, deadline);
  client.set("greeting", "hello", deadline);
  const std::string answer = client.get("greeting", deadline).value_or("nothing");
  std::printf("%s\n", answer.c_str());
  return answer == "hello" ? 0 : 1;
}
