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
  uint64_t max_bytes;
  rd_algorithm algorithm;
};

constexpr uint64_t kAny = UINT64_MAX;

// The first row that fits is taken.
// clang-format off
constexpr Row kTable[] = {
    {RD_ALLREDUCE,      HostSpread::kSingleHost,     kAny,      RD_DIRECT},
    {RD_ALLREDUCE,      HostSpread::kOnePerHost,     64 * 1024, RD_DOUBLING},
    {RD_ALLREDUCE,      HostSpread::kOnePerHost,     kAny,      RD_RING},
    {RD_ALLREDUCE,      HostSpread::kSeveralPerHost, kAny,      RD_TWO_LEVEL},
    {RD_BROADCAST,      HostSpread::kSingleHost,     kAny,      RD_DIRECT},
    {RD_BROADCAST,      HostSpread::kOnePerHost,     kAny,      RD_TREE},
    {RD_BROADCAST,      HostSpread::kSeveralPerHost, kAny,      RD_TREE},
    {RD_ALLGATHER,      HostSpread::kSingleHost,     kAny,      RD_DIRECT},
    {RD_ALLGATHER,      HostSpread::kOnePerHost,     kAny,      RD_RING},
    {RD_ALLGATHER,      HostSpread::kSeveralPerHost, kAny,      RD_RING},
    {RD_REDUCE_SCATTER, HostSpread::kSingleHost,     kAny,      RD_DIRECT},
    {RD_REDUCE_SCATTER, HostSpread::kOnePerHost,     kAny,      RD_RING},
    {RD_REDUCE_SCATTER, HostSpread::kSeveralPerHost, kAny,      RD_RING},
    {RD_ALLTOALL,       HostSpread::kSingleHost,     kAny,      RD_PAIRWISE},
    {RD_ALLTOALL,       HostSpread::kOnePerHost,     kAny,      RD_PAIRWISE},
    {RD_ALLTOALL,       HostSpread::kSeveralPerHost, kAny,      RD_PAIRWISE},
    {RD_REDUCE,         HostSpread::kSingleHost,     kAny,      RD_DIRECT},
    {RD_REDUCE,         HostSpread::kOnePerHost,     kAny,      RD_TREE},
    {RD_REDUCE,         HostSpread::kSeveralPerHost, kAny,      RD_TREE},
    {RD_GATHER,         HostSpread::kSingleHost,     kAny,      RD_DIRECT},
    {RD_GATHER,         HostSpread::kOnePerHost,     kAny,      RD_TREE},
    {RD_GATHER,         HostSpread::kSeveralPerHost, kAny,      RD_TREE},
    {RD_SCATTER,        HostSpread::kSingleHost,     kAny,      RD_DIRECT},
    {RD_SCATTER,        HostSpread::kOnePerHost,     kAny,      RD_TREE},
    {RD_SCATTER,        HostSpread::kSeveralPerHost, kAny,      RD_TREE},
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

rd_algorithm choose_algorithm(const Topology& topology, rd_kind kind, const ReduceParams& params, uint64_t count,
                              rd_algorithm demanded) {
  if (kind == RD_ALLREDUCE && params.op == RD_ADASUM) return RD_DOUBLING;  // Adasum is defined on pairs
  if (demanded != RD_AUTO) {
    if (!can_run(topology, kind, demanded)) throw CallError{RD_BAD_CALL};
    return demanded;
  }
  HostSpread spread = host_spread(topology);
  uint64_t bytes = count * partial_bytes(params);  // as partial results travel
  for (const Row& row : kTable) {
    if (row.kind != kind || row.spread != spread || bytes > row.max_bytes) continue;
    return row.algorithm == RD_RING && exchanges_inputs(topology, kind, params) ? RD_PAIRWISE : row.algorithm;
  }
  return RD_AUTO;
}

}  // namespace ronde
