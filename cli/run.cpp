// `lockstep run`: torchrun's flags, turned into what the launcher needs to know.
#include <array>
#include <cmath>
#include <sstream>

#include <lockstep/base/error.h>
#include <lockstep/launch/launch.h>
#include <lockstep/net/secret.h>

#include <cli/flags.h>

namespace lockstep::cli {

namespace {

constexpr int kDefaultPort = 29500;  // torchrun's
constexpr int kEtcdPort = 2379;      // etcd's own

// The flags' texts, as far as they need more than storing.
struct Texts {
  std::string num_local_ranks = "1", num_nodes = "1", node_rank;
  std::string master_addr, master_port, rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf;
  std::string max_restarts = "0", spares = "0", redirects, tee, bind_to = "core", timeout,
              last_call, grace, stuck_after, leave_within;
  std::string start_method, monitor_interval;
  bool standalone = false, module = false, no_python = false;
};

// "3", or "2:4": from two to four.
void apply_num_nodes(const std::string& text, launch::LaunchOptions& options) {
  const auto colon = text.find(':');
  options.min_nodes = parse_integer(text.substr(0, colon), "--nnodes", 1, kMostRanks);
  options.max_nodes = colon == std::string::npos
                          ? options.min_nodes
                          : parse_integer(text.substr(colon + 1), "--nnodes", 1, kMostRanks);
  if (options.min_nodes > options.max_nodes)
    throw UsageError("--nnodes {}: the least number of nodes comes first: give --nnodes {}:{}",
                     text, options.max_nodes, options.min_nodes);
}

// Settings of torchrun's rendezvous, as far as they mean something here.
void apply_rdzv_conf(const std::string& text, launch::LaunchOptions& options) {
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto equals = entry.find('=');
    const std::string key = entry.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : entry.substr(equals + 1);
    if (key == "timeout" || key == "join_timeout") {
      options.timeout = parse_seconds(value, "--rdzv-conf " + key);
    } else if (key == "last_call_timeout") {
      options.last_call = parse_seconds(value, "--rdzv-conf " + key);
    } else if (key == "rank") {
      options.node_rank = parse_integer(value, "--rdzv-conf rank", 0, kMostRanks);
    } else {
      throw UsageError(
          "--rdzv-conf: '{}' has no meaning for lockstep; it knows timeout, "
          "join_timeout (both are --timeout), last_call_timeout (--rdzv-last-call) and "
          "rank (--node-rank)",
          key);
    }
  }
}

std::vector<net::Address> parse_endpoints(const std::string& text, int default_port) {
  std::vector<net::Address> endpoints;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');)
    endpoints.push_back(net::Address::parse(entry, default_port, "--rdzv-endpoint"));
  return endpoints;
}

// etcd settles who is node 0: the endpoints are etcd's, and no host has an address of its own.
void apply_etcd(const Texts& texts, launch::LaunchOptions& options) {
  if (texts.rdzv_endpoint.empty())
    throw UsageError("--rdzv-backend etcd needs etcd's address: give --rdzv-endpoint HOST:PORT, "
                     "with commas between several members of its cluster");
  if (texts.rdzv_endpoint.find("://") != std::string::npos)
    throw UsageError("--rdzv-endpoint {}: lockstep speaks plain HTTP with etcd, without TLS: give "
                     "HOST:PORT",
                     texts.rdzv_endpoint);
  if (options.run_id == "none" || options.run_id.empty())
    throw UsageError("--rdzv-backend etcd needs a name for the job, under which its launchers find "
                     "each other there: give --rdzv-id NAME, the same on all hosts");
  if (texts.standalone || !texts.master_addr.empty() || !texts.master_port.empty())
    throw UsageError("--standalone, --master-addr and --master-port do not go with --rdzv-backend "
                     "etcd, where any host may be node 0: leave them out");
  const auto endpoints = parse_endpoints(texts.rdzv_endpoint, kEtcdPort);
  for (const net::Address& endpoint : endpoints)
    if (endpoint.port == 0)
      throw UsageError("--rdzv-endpoint {}: etcd's port must be from 1 to 65535",
                       texts.rdzv_endpoint);
  if (options.max_nodes == 1) return;  // a single host has nobody to find
  options.rendezvous = launch::Rendezvous::etcd;
  options.endpoints = endpoints;
}

// Where the launchers meet, and what the ranks are told of it.
void apply_addresses(const Texts& texts, launch::LaunchOptions& options) {
  if (texts.rdzv_backend == "etcd") {
    apply_etcd(texts, options);
    return;
  }
  if (!texts.rdzv_backend.empty() && texts.rdzv_backend != "c10d" && texts.rdzv_backend != "static")
    throw UsageError("--rdzv-backend {}: give etcd, or leave the flag out to have the launchers "
                     "meet by themselves, as c10d and static do here",
                     texts.rdzv_backend);
  const bool several = options.max_nodes > 1;
  std::optional<int> port;
  if (!texts.master_port.empty())
    port = parse_integer(texts.master_port, "--master-port", 1, 65535);
  if (texts.standalone) {
    if (several)
      throw UsageError("--standalone means one node, but --nnodes is {}: leave one of them out",
                       texts.num_nodes);
    if (options.run_id == "none") {
      std::array<std::byte, 8> random;
      net::fill_random(random);
      options.run_id.clear();
      for (const std::byte byte : random)
        options.run_id += fmt::format("{:02x}", std::to_integer<int>(byte));
    }
    options.master_port = port;
    return;
  }
  if (!texts.rdzv_endpoint.empty()) {
    options.endpoints = parse_endpoints(texts.rdzv_endpoint, kDefaultPort);
    for (const net::Address& endpoint : options.endpoints)
      if (endpoint.port == 0 && several)
        throw UsageError(
            "--rdzv-endpoint {}: several nodes need a port that all of them know, from "
            "1 to 65535",
            texts.rdzv_endpoint);
    const net::Address& first = options.endpoints.front();
    if (several && ((!texts.master_addr.empty() && texts.master_addr != first.host) ||
                    (port && *port != first.port)))
      throw UsageError("--rdzv-endpoint {} and --master-addr or --master-port name two places to "
                       "meet: leave one of them out",
                       texts.rdzv_endpoint);
  } else if (several && !texts.master_addr.empty()) {
    options.endpoints = {{texts.master_addr, port.value_or(kDefaultPort)}};
  }
  if (!several) {
    options.master_addr = texts.master_addr;
    options.master_port = port;
  }
}

void describe(CLI::App& app, Texts& texts, launch::LaunchOptions& options) {
  app.footer("Example: lockstep run --nproc-per-node 4 ./my_program --its-own-flag\n"
             "Flags may be spelled with underscores. All after PROGRAM belongs to it.");
  app.option_defaults()->take_last();  // as torchrun does with a flag given twice
  app.add_option("--nproc-per-node", texts.num_local_ranks,
                 "ranks on this host: a number, auto, cpu, gpu, or gpu:N (a GPU each)");
  app.add_option("--nnodes", texts.num_nodes,
                 "hosts of the job, or MIN:MAX; each runs 'lockstep run'");
  app.add_option("--node-rank", texts.node_rank,
                 "number of this host; left out: in order of arrival");
  app.add_option("--master-addr", texts.master_addr, "host of node 0");
  app.add_option("--master-port", texts.master_port, "port where the launchers meet (29500)");
  app.add_option(
      "--rdzv-endpoint", texts.rdzv_endpoint,
      "HOST:PORT where the launchers meet: the same as the two above; more of them, with "
      "commas, for hosts that come when the first is lost; with etcd, its members");
  app.add_option("--rdzv-backend", texts.rdzv_backend,
                 "etcd: it settles which host is node 0, so that any may be lost; c10d or static: "
                 "the launchers do so by themselves, as without the flag");
  app.add_option("--rdzv-id", options.run_id, "name of the job; all hosts must agree");
  app.add_option("--rdzv-conf", texts.rdzv_conf,
                 "timeout=S, join_timeout=S, last_call_timeout=S, rank=N");
  app.add_flag("--standalone", texts.standalone, "a job on this host alone");
  app.add_option(
      "--local-addr", options.local_addr,
      "what other hosts call this one in messages; with etcd, an address of this host is also "
      "where they reach it");
  app.add_option("--secret-file", options.secret_file,
                 "the job's secret (mode 0600), needed for several hosts");
  app.add_option("--timeout", texts.timeout, "seconds for all hosts to meet (300)");
  app.add_option("--rdzv-last-call", texts.last_call,
                 "seconds for more than MIN hosts to come, since the last one came (10)");
  app.add_option("--grace", texts.grace,
                 "seconds between SIGTERM and SIGKILL (0.4; 2 after Ctrl-C)");
  app.add_option("--bind-to", texts.bind_to,
                 "core: ranks get cores of their own where there are enough; none");
  app.add_option("--max-restarts", texts.max_restarts,
                 "how often ranks are started anew after a failure (0)");
  app.add_option("--spares", texts.spares,
                 "processes that stand by on this host to take the place of lost ranks (0)");
  app.add_option("--leave-within", texts.leave_within,
                 "seconds for ranks that stay through a failure to leave their step (30)");
  app.add_option("--stuck-after", texts.stuck_after,
                 "seconds without progress after which a rank that reports it has failed (never)");
  app.add_option("--role", options.role, "value of ROLE_NAME");
  app.add_option("--log-dir", options.log_directory, "folder for --redirects and --tee");
  app.add_option("-r,--redirects", texts.redirects,
                 "output to files only: 1 standard output, 2 error, 3 both; or 0:1,1:3 by rank");
  app.add_option("-t,--tee", texts.tee,
                 "output to files as well as here, whatever --redirects says; its values");
  app.add_flag("-m,--module", texts.module, "PROGRAM is a Python module");
  app.add_flag("--no-python", texts.no_python, "execute PROGRAM itself even where it ends in .py");
  app.add_option("--monitor-interval", texts.monitor_interval,
                 "accepted for torchrun's sake: ranks are watched at every moment");
  app.add_option("--start-method", texts.start_method,
                 "accepted for torchrun's sake: ranks are programs, not functions");
}

}  // namespace

int run(Arguments arguments) {
  CLI::App app("Starts the ranks of a job on this host, as torchrun does.", "lockstep run");
  show_usage(app, "[FLAGS] PROGRAM [ARGUMENTS]");
  Texts texts;
  launch::LaunchOptions options;
  describe(app, texts, options);
  SplitArguments split = split_at_program(app, arguments);
  if (!parse_flags(app, std::move(split.flags))) return 0;

  options.program = std::move(split.program);
  if (texts.module && texts.no_python)
    throw UsageError("--module and --no-python contradict each other: leave one out");
  if (texts.module) options.program_kind = launch::ProgramKind::python_module;
  if (texts.no_python) options.program_kind = launch::ProgramKind::executable;
  options.num_local_ranks = num_local_ranks(texts.num_local_ranks);
  apply_num_nodes(texts.num_nodes, options);
  if (!texts.timeout.empty()) options.timeout = parse_seconds(texts.timeout, "--timeout");
  if (!texts.last_call.empty())
    options.last_call = parse_seconds(texts.last_call, "--rdzv-last-call");
  if (!texts.stuck_after.empty())
    options.stuck_after = parse_seconds(texts.stuck_after, "--stuck-after");
  if (!texts.leave_within.empty())
    options.leave_within = parse_seconds(texts.leave_within, "--leave-within");
  if (!texts.grace.empty()) options.grace = parse_seconds(texts.grace, "--grace");
  apply_rdzv_conf(texts.rdzv_conf, options);
  if (!texts.node_rank.empty())
    options.node_rank = parse_integer(texts.node_rank, "--node-rank", 0, kMostRanks);
  if (options.node_rank && *options.node_rank >= options.max_nodes)
    throw UsageError("--node-rank {} is not below --nnodes {}: nodes are numbered from 0 to {}",
                     *options.node_rank, texts.num_nodes, options.max_nodes - 1);
  apply_addresses(texts, options);
  options.max_restarts = parse_integer(texts.max_restarts, "--max-restarts", 0, kMostRanks);
  options.num_spares = parse_integer(texts.spares, "--spares", 0, kMostRanks);
  if (options.num_spares > 0 && options.max_restarts == 0)
    throw UsageError("--spares {} is for restarts, and there are none: give --max-restarts too",
                     options.num_spares);
  if (texts.bind_to == "none") {
    options.binding = launch::Binding::none;
  } else if (texts.bind_to != "core") {
    throw UsageError("--bind-to is '{}': it must be core or none", texts.bind_to);
  }
  if (!texts.redirects.empty())
    options.streams.redirects =
        launch::StreamChoice::parse(texts.redirects, "--redirects", options.num_local_ranks);
  if (!texts.tee.empty())
    options.streams.tee = launch::StreamChoice::parse(texts.tee, "--tee", options.num_local_ranks);
  return launch::launch(options);
}

}  // namespace lockstep::cli
