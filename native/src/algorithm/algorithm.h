// The collective algorithms, one file each. Every member of the group calls the same function for the same call.
#pragma once

#include "call_context.h"

namespace ronde {

// The memory of a reduction over links. All three arrays may be the same memory unless partial results are wide.
struct PartialArrays {
  const char* own;  // what this member gives
  Form own_form;    // inputs, or partial results of the members of its host
  char* partials;
  char* results;
};

// single_member.cc
void single_member(CallContext& context, const Call& call);

// shared_memory_direct.cc, when all members are on one host. direct_prepare copies the first chunk into this member's
// slot *before* the headers are matched, so that a match also means that all members' data is there.
void direct_prepare(CallContext& context, const Call& call);
void direct_prepare_zeros(CallContext& context);  // for a joined member, which does not know yet what will be asked
void direct_allreduce(CallContext& context, const Call& call);
void direct_broadcast(CallContext& context, const Call& call);
void direct_allgather(CallContext& context, const Call& call);
void direct_reduce_scatter(CallContext& context, const Call& call);
void direct_reduce(CallContext& context, const Call& call);
void direct_gather(CallContext& context, const Call& call);
void direct_scatter(CallContext& context, const Call& call);

// ring.cc
void ring_allreduce(CallContext& context, const Call& call);
void ring_allgather(CallContext& context, const Call& call);
void ring_reduce_scatter(CallContext& context, const Call& call);
// Gathers chunks in place: `starts` are the elements at which they begin, and the end of the last.
void ring_allgather_in_place(CallContext& context, const Call& call, char* data, std::vector<uint64_t> starts);
// Among some of the members, at least two; members[position] is this one.
void ring_allreduce_among(CallContext& context, const std::vector<uint32_t>& members, uint32_t position,
                          const ReduceParams& params, const PartialArrays& arrays, uint64_t count);

// recursive_doubling.cc
void recursive_doubling_allreduce(CallContext& context, const Call& call);
// Among some of the members, whose partial results are in `partials`; members[position] is this one. `results` may be
// the same memory unless partial results are wide.
void recursive_doubling_allreduce_among(CallContext& context, const std::vector<uint32_t>& members, uint32_t position,
                                        const ReduceParams& params, char* partials, char* results, uint64_t count);

// halving_doubling.cc
void halving_doubling_allreduce(CallContext& context, const Call& call);
// As recursive_doubling_allreduce_among.
void halving_doubling_allreduce_among(CallContext& context, const std::vector<uint32_t>& members, uint32_t position,
                                      const ReduceParams& params, char* partials, char* results, uint64_t count);

// adasum.cc
void adasum_allreduce(CallContext& context, const Call& call);

// two_level.cc
void two_level_allreduce(CallContext& context, const Call& call);

// binomial_tree.cc
void binomial_tree_broadcast(CallContext& context, const Call& call);
void binomial_tree_reduce(CallContext& context, const Call& call);
void binomial_tree_gather(CallContext& context, const Call& call);
void binomial_tree_scatter(CallContext& context, const Call& call);

// pairwise_exchange.cc
void pairwise_exchange_alltoall(CallContext& context, const Call& call);
void pairwise_exchange_reduce_scatter(CallContext& context, const Call& call);
void pairwise_exchange_allreduce(CallContext& context, const Call& call);

}  // namespace ronde
