// Which algorithm runs a call: a table of operation kind, spread of the members over hosts, and bytes.
#pragma once

#include "reduce/reduce.h"
#include "topology.h"

namespace ronde {

// Returns the algorithm for an allreduce of so many bytes between hosts, each with one of its members.
rd_algorithm choose_allreduce_between_hosts(uint32_t num_hosts, uint64_t bytes);

// Returns the same algorithm on every member for the same call. Throws CallError{RD_BAD_CALL} when the algorithm that
// the caller demands cannot run this kind of operation on these hosts.
rd_algorithm choose_algorithm(const Topology& topology, rd_kind kind, const ReduceParams& params, uint64_t count,
                              rd_algorithm demanded);

}  // namespace ronde
