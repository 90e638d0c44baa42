#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <future>
#include <thread>

#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

#include "../base/errors.h"
#include "deadlines.h"

namespace lockstep::net {
namespace {

using testing::HasSubstr;

class Handshake : public testing::Test {
 protected:
  // Runs the acceptor's side in a thread.
  std::future<std::string> welcoming(const Secret& secret) {
    return std::async(std::launch::async, [this, secret] {
      try {
        return welcome(far_, secret, soon());
      } catch (const CommError& error) {
        far_.reset();
        throw;
      }
    });
  }

  Secret secret_ = Secret::random();
  std::pair<Fd, Fd> ends_ = socket_pair();
  Fd& near_ = ends_.first;
  Fd& far_ = ends_.second;
};

std::vector<std::byte> hello(std::uint32_t purpose_bytes) {
  std::vector<std::byte> bytes(32);
  std::memcpy(bytes.data(), "LOCKSTP1", 8);
  std::memcpy(bytes.data() + 8, &purpose_bytes, 4);
  return bytes;
}

TEST_F(Handshake, BothWhoKnowTheSecretMeet) {
  for (const std::string& purpose :
       {std::string(), std::string("store x"), std::string(kLongestPurpose, 'p')}) {
    auto welcomed = welcoming(secret_);
    introduce(near_, secret_, purpose, soon());
    EXPECT_EQ(welcomed.get(), purpose);
  }
  // The handshake leaves no bytes on the connection, and takes none of those that follow.
  auto welcomed = welcoming(secret_);
  introduce(near_, secret_, "again", soon());
  write_all(near_, std::as_bytes(std::span("after", 5)), soon());
  EXPECT_EQ(welcomed.get(), "again");
  std::array<std::byte, 5> after;
  read_all(far_, after, soon());
  EXPECT_EQ(std::memcmp(after.data(), "after", 5), 0);
  EXPECT_FALSE(wait_ready(near_.get(), POLLIN, in(10)));
}

TEST_F(Handshake, AWrongSecretIsRefusedOnBothSides) {
  auto welcomed = welcoming(Secret::random());
  const auto [fault, text] = comm_error([&] { introduce(near_, secret_, "x", soon()); });
  EXPECT_EQ(fault, Fault::refused);
  EXPECT_THAT(text, HasSubstr("LOCKSTEP_SECRET_FILE"));
  near_.reset();
  EXPECT_THROW(welcomed.get(), CommError);
}

TEST_F(Handshake, AConnectorThatDoesNotCareForTheProofIsRefused) {
  auto welcomed = welcoming(secret_);
  write_all(near_, hello(0), soon());
  std::array<std::byte, 48> challenge;
  read_all(near_, challenge, soon());
  write_all(near_, std::array<std::byte, 32>{}, soon());
  EXPECT_EQ(comm_error([&] { welcomed.get(); }).first, Fault::refused);
}

TEST_F(Handshake, TheProofOfTheOtherDirectionIsRefused) {
  auto welcomed = welcoming(secret_);
  write_all(near_, hello(0), soon());
  std::array<std::byte, 48> challenge;
  read_all(near_, challenge, soon());
  write_all(near_, std::span(challenge).subspan(16), soon());
  EXPECT_EQ(comm_error([&] { welcomed.get(); }).first, Fault::refused);
}

TEST_F(Handshake, OtherProtocolsAreRefused) {
  const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
  auto welcomed = welcoming(secret_);
  write_all(near_, std::as_bytes(std::span(request)), soon());
  EXPECT_EQ(comm_error([&] { welcomed.get(); }).first, Fault::refused);
}

TEST_F(Handshake, LongPurposesAreRefusedBeforeTheyAreRead) {
  auto welcomed = welcoming(secret_);
  write_all(near_, hello(kLongestPurpose + 1), soon());
  EXPECT_EQ(comm_error([&] { welcomed.get(); }).first, Fault::refused);
}

TEST_F(Handshake, SilenceIsATimeout) {
  EXPECT_EQ(comm_error([&] { introduce(near_, secret_, "x", in(50)); }).first, Fault::timeout);
  EXPECT_EQ(comm_error([&] { welcome(near_, secret_, in(50)); }).first, Fault::timeout);
}

TEST_F(Handshake, AHangUpIsPeerLost) {
  far_.reset();
  const auto [fault, text] = comm_error([&] { introduce(near_, secret_, "x", soon()); });
  EXPECT_EQ(fault, Fault::peer_lost);
  EXPECT_THAT(text, HasSubstr("hung up"));
}

TEST_F(Handshake, TheAcceptorTakesByteAfterByte) {
  auto introduced =
      std::async(std::launch::async, [&] { introduce(near_, secret_, "slow", soon()); });
  Acceptor acceptor(secret_);
  std::size_t taken = 0;
  while (acceptor.state() == Acceptor::State::reading) {
    std::byte byte;
    read_all(far_, std::span(&byte, 1), soon());
    write_all(far_, acceptor.take(std::span(&byte, 1)), soon());
    ++taken;
  }
  introduced.get();
  EXPECT_EQ(taken, 32u + 4u + 32u);
  EXPECT_EQ(acceptor.state(), Acceptor::State::welcomed);
  EXPECT_EQ(acceptor.purpose(), "slow");
  EXPECT_EQ(acceptor.wanted(), 0u);
}

TEST_F(Handshake, ARecordingOpensNothing) {
  std::vector<std::byte> recording;
  {
    auto introduced =
        std::async(std::launch::async, [&] { introduce(near_, secret_, "x", soon()); });
    Acceptor acceptor(secret_);
    while (acceptor.wanted() > 0) {
      std::vector<std::byte> bytes(acceptor.wanted());
      read_all(far_, bytes, soon());
      recording.insert(recording.end(), bytes.begin(), bytes.end());
      write_all(far_, acceptor.take(bytes), soon());
    }
    introduced.get();
    ASSERT_EQ(acceptor.state(), Acceptor::State::welcomed);
  }
  Acceptor acceptor(secret_);
  std::span<const std::byte> rest(recording);
  while (acceptor.wanted() > 0) {
    const auto piece = rest.first(acceptor.wanted());
    acceptor.take(piece);
    rest = rest.subspan(piece.size());
  }
  EXPECT_EQ(acceptor.state(), Acceptor::State::refused);
}

TEST_F(Handshake, ADecidedAcceptorWantsNothing) {
  Acceptor acceptor(secret_);
  EXPECT_EQ(acceptor.wanted(), 32u);
  EXPECT_TRUE(acceptor.take(std::vector<std::byte>(32)).empty());
  EXPECT_EQ(acceptor.state(), Acceptor::State::refused);
  EXPECT_EQ(acceptor.wanted(), 0u);
  EXPECT_THROW(acceptor.take(std::vector<std::byte>(1)), InternalError);
}

}  // namespace
}  // namespace lockstep::net
