#include "choose_algorithm.h"

#include "base/error.h"

namespace ronde {

namespace {

enum class HostSpread {
  kSingleHost,      // all members share memory
  kOnePerHost,      // several hosts with one member each
  kSeveralPerHost,  // several hosts, some with several members
};

HostSpread host_spread(const Topology& topology) {
  if (topology.single_host()) return HostSpread::kSingleHost;
  return topology.num_hosts() == topology.size ? HostSpread::kOnePerHost : HostSpread::kSeveralPerHost;
}

struct Row {
  rd_kind kind;
  HostSpread spread;
  rd_algorithm algorithm;
};

// For an allreduce with one member per host see choose_allreduce_between_hosts.
// clang-format off
constexpr Row kTable[] = {
    {RD_ALLREDUCE,      HostSpread::kSingleHost,     RD_DIRECT},
    {RD_ALLREDUCE,      HostSpread::kSeveralPerHost, RD_TWO_LEVEL},
    {RD_BROADCAST,      HostSpread::kSingleHost,     RD_DIRECT},
    {RD_BROADCAST,      HostSpread::kOnePerHost,     RD_TREE},
    {RD_BROADCAST,      HostSpread::kSeveralPerHost, RD_TREE},
    {RD_ALLGATHER,      HostSpread::kSingleHost,     RD_DIRECT},
    {RD_ALLGATHER,      HostSpread::kOnePerHost,     RD_RING},
    {RD_ALLGATHER,      HostSpread::kSeveralPerHost, RD_RING},
    {RD_REDUCE_SCATTER, HostSpread::kSingleHost,     RD_DIRECT},
    {RD_REDUCE_SCATTER, HostSpread::kOnePerHost,     RD_RING},
    {RD_REDUCE_SCATTER, HostSpread::kSeveralPerHost, RD_RING},
    {RD_ALLTOALL,       HostSpread::kSingleHost,     RD_PAIRWISE},
    {RD_ALLTOALL,       HostSpread::kOnePerHost,     RD_PAIRWISE},
    {RD_ALLTOALL,       HostSpread::kSeveralPerHost, RD_PAIRWISE},
    {RD_REDUCE,         HostSpread::kSingleHost,     RD_DIRECT},
    {RD_REDUCE,         HostSpread::kOnePerHost,     RD_TREE},
    {RD_REDUCE,         HostSpread::kSeveralPerHost, RD_TREE},
    {RD_GATHER,         HostSpread::kSingleHost,     RD_DIRECT},
    {RD_GATHER,         HostSpread::kOnePerHost,     RD_TREE},
    {RD_GATHER,         HostSpread::kSeveralPerHost, RD_TREE},
    {RD_SCATTER,        HostSpread::kSingleHost,     RD_DIRECT},
    {RD_SCATTER,        HostSpread::kOnePerHost,     RD_TREE},
    {RD_SCATTER,        HostSpread::kSeveralPerHost, RD_TREE},
};
// clang-format on

// With one member per host, each member can send its input straight to the members that reduce it, as narrow as it is.
// In a ring wide partial results would travel; but a ring needs two neighbours only, and with two members it is the
// same.
bool exchanges_inputs(const Topology& topology, rd_kind kind, const ReduceParams& params) {
  constexpr uint32_t kMaxMembers = 16;
  return (kind == RD_ALLREDUCE || kind == RD_REDUCE_SCATTER) && has_wide_partials(params) &&
         host_spread(topology) == HostSpread::kOnePerHost && topology.size > 2 && topology.size <= kMaxMembers;
}

bool can_run(const Topology& topology, rd_kind kind, rd_algorithm algorithm) {
  switch (algorithm) {
    case RD_DIRECT:
      return topology.single_host() && kind != RD_ALLTOALL;
    case RD_TWO_LEVEL:
      return !topology.single_host() && kind == RD_ALLREDUCE;
    case RD_DOUBLING:
    case RD_HALVING:
      return kind == RD_ALLREDUCE;
    case RD_RING:
      return kind == RD_ALLREDUCE || kind == RD_ALLGATHER || kind == RD_REDUCE_SCATTER;
    case RD_TREE:
      return kind == RD_BROADCAST || kind == RD_REDUCE || kind == RD_GATHER || kind == RD_SCATTER;
    case RD_PAIRWISE:
      return kind == RD_ALLTOALL || kind == RD_ALLREDUCE || kind == RD_REDUCE_SCATTER;
    default:
      return false;
  }
}

}  // namespace

// A ring sends an array in 2 (hosts - 1) steps. With many hosts and not very many bytes, the time of a step is its
// latency, and 2 log2(hosts) steps are better. A number of hosts that is not a power of two makes halving send an array
// more.
rd_algorithm choose_allreduce_between_hosts(uint32_t num_hosts, uint64_t bytes) {
  constexpr uint64_t kDoublingBytes = 64 * 1024;
  constexpr uint32_t kManyHosts = 8;
  constexpr uint64_t kShortStepBytes = 64 * 1024;
  if (bytes <= kDoublingBytes) return RD_DOUBLING;
  bool is_power_of_two = (num_hosts & (num_hosts - 1)) == 0;
  uint64_t step_bytes = bytes / num_hosts;
  bool short_steps = step_bytes < (is_power_of_two ? kShortStepBytes : kShortStepBytes / 4);
  return num_hosts >= kManyHosts && short_steps ? RD_HALVING : RD_RING;
}

rd_algorithm choose_algorithm(const Topology& topology, rd_kind kind, const ReduceParams& params, uint64_t count,
                              rd_algorithm demanded) {
  if (kind == RD_ALLREDUCE && params.op == RD_ADASUM) return RD_DOUBLING;  // Adasum is defined on pairs
  if (demanded != RD_AUTO) {
    if (!can_run(topology, kind, demanded)) throw CallError{RD_BAD_CALL};
    return demanded;
  }
  HostSpread spread = host_spread(topology);
  uint64_t bytes = count * partial_bytes(params);  // as partial results travel
  rd_algorithm found = RD_AUTO;
  if (kind == RD_ALLREDUCE && spread == HostSpread::kOnePerHost)
    found = choose_allreduce_between_hosts(topology.num_hosts(), bytes);
  for (const Row& row : kTable)
    if (found == RD_AUTO && row.kind == kind && row.spread == spread) found = row.algorithm;
  return found == RD_RING && exchanges_inputs(topology, kind, params) ? RD_PAIRWISE : found;
}

}  // namespace ronde
