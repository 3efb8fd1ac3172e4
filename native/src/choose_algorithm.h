// Which algorithm runs a call: a table of operation kind, spread of the members over hosts, and bytes.
#pragma once

#include "reduce/reduce.h"
#include "topology.h"

namespace ronde {

// Returns the same algorithm on every member for the same call. Throws CallError{RD_BAD_CALL} when the algorithm that
// the caller demands cannot run this kind of operation on these hosts.
rd_algorithm choose_algorithm(const Topology& topology, rd_kind kind, const ReduceParams& params, uint64_t count,
                              rd_algorithm demanded);

}  // namespace ronde
