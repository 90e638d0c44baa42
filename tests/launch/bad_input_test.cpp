// A mistake gets a message that says what is wrong, where and what to do, and exit code 2.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <lockstep/net/socket.h>

#include "launched.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

void expect_mistake(std::vector<std::string> arguments, const std::vector<std::string>& parts,
                    std::vector<std::string> variables = {}) {
  std::string shown;
  for (const std::string& word : arguments) shown += word + " ";
  SCOPED_TRACE(shown);
  arguments.insert(arguments.begin(), LOCKSTEP_PROGRAM);
  Launched job(std::move(arguments), std::move(variables));
  EXPECT_EQ(job.wait(), 2);
  EXPECT_EQ(lines_of(job.error()).size(), 1u) << job.error();
  for (const std::string& part : parts) EXPECT_THAT(job.error(), HasSubstr(part));
  EXPECT_THAT(job.error(), Not(HasSubstr("terminate called")));
}

TEST(BadInput, VerbsAndFlags) {
  expect_mistake({"rnu"}, {"'rnu'", "did you mean 'run'?"});
  expect_mistake({"run", "--nproc-per-nod", "2", "true"},
                 {"'--nproc-per-nod'", "did you mean '--nproc-per-node'?"});
  expect_mistake({"run", "--rdzv_end=1", "true"}, {"'--rdzv_end=1'", "'--rdzv-endpoint'"});
  expect_mistake({"run", "--nnodes"}, {"'--nnodes' needs a value"});
  expect_mistake({"run"}, {"no program was given"});
  expect_mistake({"run", "--max-restarts", "-1", "true"}, {"--max-restarts is '-1'"});
  expect_mistake({"run", "--rdzv-backend", "etcd-v2", "true"}, {"etcd-v2", "c10d"});
  expect_mistake({"run", "--rdzv-backend", "etcd", "true"}, {"--rdzv-endpoint HOST:PORT"});
  expect_mistake({"run", "--rdzv-backend", "etcd", "--rdzv-endpoint", "127.0.0.1:2379", "true"},
                 {"--rdzv-id"});
  expect_mistake({"run", "--rdzv-backend", "etcd", "--rdzv-endpoint", "https://127.0.0.1:2379",
                  "--rdzv-id", "job", "true"},
                 {"without TLS", "HOST:PORT"});
  expect_mistake({"run", "--rdzv-backend", "etcd", "--rdzv-endpoint", "127.0.0.1", "--rdzv-id",
                  "job", "--master-addr", "127.0.0.1", "true"},
                 {"--master-addr", "leave them out"});
  expect_mistake({"run", "--rdzv-conf", "read_timeout=3", "true"}, {"'read_timeout'"});
  expect_mistake({"run", "--bind-to", "socket", "true"}, {"'socket'", "core or none"});
  expect_mistake({"run", "--timeout", "soon", "true"}, {"--timeout is 'soon'", "seconds"});
  expect_mistake({"run", "--redirects", "9", "true"}, {"--redirects", "'9'"});
  expect_mistake({"run", "-m", "--no-python", "x"}, {"--module and --no-python"});
  for (const std::string flag : {"--redirects", "--tee"})
    expect_mistake({"run", "--nproc-per-node", "2", flag, "0:1,7:3", "true"},
                   {flag, "local rank 7", "runs 2 ranks", "0 to 1"});
  expect_mistake({"run", "--nproc-per-node", "2", "--redirects", "1:3,0:1,1:1", "true"},
                 {"--redirects", "names local rank 1 twice"});
}

TEST(BadInput, TemporaryFolders) {
  const Folder folder;
  const std::string file = folder.write("file", "");
  for (const std::string& wrong : {(folder.path() / "none").string(), file, file + "/below"})
    for (const bool logs : {false, true}) {
      std::vector<std::string> arguments = {"run", "true"};
      std::vector<std::string> variables = {"TMPDIR=" + wrong};
      // The flight recorder's folder is set elsewhere, so that the missing folder is the logs'.
      if (logs) {
        arguments = {"run", "--redirects", "3", "true"};
        variables.push_back("LOCKSTEP_FLIGHT_DIR=" + folder.path().string() + "/flight");
      }
      expect_mistake(arguments, {"TMPDIR is '" + wrong + "'", "unset it for /tmp"}, variables);
    }
}

TEST(BadInput, Sizes) {
  expect_mistake({"run", "--nproc-per-node", "0", "true"}, {"--nproc-per-node is '0'"});
  expect_mistake({"run", "--nproc-per-node", "-2", "true"}, {"--nproc-per-node is '-2'"});
  expect_mistake({"run", "--nproc-per-node", "many", "true"}, {"'many'", "auto, cpu, gpu"});
  expect_mistake({"run", "--nproc-per-node", "99999999999999999999", "true"}, {"from 1 to"});
  expect_mistake({"run", "--nproc-per-node", "gpu:4096", "true"}, {"gpu:4096", "this host has"});
  expect_mistake({"run", "--nproc-per-node", "gpu", "true"}, {"this host has no GPU"},
                 {"CUDA_VISIBLE_DEVICES=-1"});
  expect_mistake({"run", "--nnodes", "4:1", "true"}, {"--nnodes 4:1", "--nnodes 1:4"});
  expect_mistake({"run", "--nnodes", "1:", "true"}, {"--nnodes is ''"});
  expect_mistake({"run", "--nnodes", "1:4", "true"}, {"1:4 hosts needs a secret"},
                 {"LOCKSTEP_SECRET_FILE="});
  expect_mistake({"run", "--nnodes", "2", "--node-rank", "2", "true"}, {"--node-rank 2", "0 to 1"});
  expect_mistake({"run", "--standalone", "--nnodes", "2", "true"}, {"--standalone"});
  expect_mistake({"run", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29533", "--master-addr",
                  "127.0.0.2", "true"},
                 {"127.0.0.1:29533", "two places to meet"});
  expect_mistake({"run", "true"}, {"OMP_NUM_THREADS", "'lots'"}, {"OMP_NUM_THREADS=lots"});
}

TEST(BadInput, Programs) {
  const Folder folder;
  const std::string missing = (folder.path() / "missing").string();
  expect_mistake({"run", missing}, {missing, "does not exist"});
  expect_mistake({"run", "no-such-program-at-all"}, {"'no-such-program-at-all'", "PATH"});
  expect_mistake({"run", missing + ".py"}, {"Python script", missing + ".py"});
  const std::string plain = folder.write("plain", "#!/bin/sh\n", 0644);
  expect_mistake({"run", plain}, {plain, "not executable", "chmod +x"});
  expect_mistake({"run", folder.path().string() + "/"}, {"is a directory"});
}

TEST(BadInput, AddressesAndPorts) {
  const Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  const net::Fd taken = net::listen_tcp({"127.0.0.1", 0});
  const std::string port = std::to_string(net::local_port(taken));
  expect_mistake({"run", "--master-port", port, "true"}, {"port " + port, "in use"});
  expect_mistake({"run", "--rdzv-endpoint", "127.0.0.1:" + port, "true"},
                 {"port " + port, "in use"});
  expect_mistake({"run", "--nnodes", "2", "--node-rank", "0", "--secret-file", secret,
                  "--master-addr", "127.0.0.1", "--master-port", port, "true"},
                 {"port " + port, "in use"});
  // The launcher that comes first is node 0; but a port held by something else cannot be joined.
  expect_mistake({"run", "--nnodes", "2", "--secret-file", secret, "--rdzv-endpoint",
                  "127.0.0.1:" + port, "true"},
                 {"port " + port, "in use"});
  expect_mistake({"run", "--nnodes", "2", "--node-rank", "0", "--secret-file", secret,
                  "--master-addr", "192.0.2.1", "true"},
                 {"192.0.2.1 is not an address of this host"});
  expect_mistake({"run", "--nnodes", "2", "--secret-file", secret, "--rdzv-endpoint",
                  "no-such-host.invalid:1234", "true"},
                 {"'no-such-host.invalid' does not resolve"});
  expect_mistake({"run", "--master-addr", "no-such-host.invalid", "true"},
                 {"'no-such-host.invalid' does not resolve"});
  expect_mistake({"run", "--nnodes", "2", "--secret-file", secret, "true"},
                 {"--rdzv-endpoint HOST:PORT"});
  expect_mistake({"run", "--rdzv-endpoint", "host:port", "true"}, {"--rdzv-endpoint", "'port'"});
}

TEST(BadInput, Secrets) {
  const Folder folder;
  const std::vector<std::string> several = {"run",           "--nnodes",  "2",
                                            "--master-addr", "127.0.0.1", "--secret-file"};
  const auto with = [&several](const std::string& file) {
    std::vector<std::string> arguments = several;
    arguments.insert(arguments.end(), {file, "true"});
    return arguments;
  };
  expect_mistake({"run", "--nnodes", "2", "--master-addr", "127.0.0.1", "true"},
                 {"needs a secret", "/dev/urandom", "--secret-file"}, {"LOCKSTEP_SECRET_FILE="});
  expect_mistake(with((folder.path() / "none").string()),
                 {"the secret file: cannot open", "/dev/urandom"});
  expect_mistake(with(folder.write("open", std::string(32, 's'), 0644)), {"0644", "chmod 600"});
  expect_mistake(with(folder.write("short", "abc", 0600)), {"3 bytes"});
  expect_mistake(with(folder.path().string()), {folder.path().string(), "is a folder"});
  const std::string fifo = (folder.path() / "fifo").string();
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_mistake(with(fifo), {fifo, "is a FIFO"});
}

}  // namespace
}  // namespace lockstep::launch::testing
