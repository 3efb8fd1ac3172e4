// The collective algorithms, one file each. Every member of the group calls the same function for the same call.
#pragma once

#include "group.h"

namespace ronde {

// The memory of a reduction over links. All three arrays may be the same memory unless partial results are wide.
struct PartialArrays {
  const char* own;  // what this member gives
  Form own_form;    // inputs, or partial results of the members of its host
  char* partials;
  char* results;
};

// single_member.cc
void single_member(Group& group, const Call& call);

// shared_memory_direct.cc, when all members are on one host. direct_prepare copies the first chunk into this member's
// slot *before* the headers are matched, so that a match also means that all members' data is there.
void direct_prepare(Group& group, const Call& call);
void direct_prepare_zeros(Group& group);  // for a joined member, which does not know yet what will be asked
void direct_allreduce(Group& group, const Call& call);
void direct_broadcast(Group& group, const Call& call);
void direct_allgather(Group& group, const Call& call);
void direct_reduce_scatter(Group& group, const Call& call);
void direct_reduce(Group& group, const Call& call);
void direct_gather(Group& group, const Call& call);
void direct_scatter(Group& group, const Call& call);

// ring.cc
void ring_allreduce(Group& group, const Call& call);
void ring_allgather(Group& group, const Call& call);
void ring_reduce_scatter(Group& group, const Call& call);
// Gathers chunks in place: `starts` are the elements at which they begin, and the end of the last.
void ring_allgather_in_place(Group& group, const Call& call, char* data, std::vector<uint64_t> starts);
// Among some of the members, at least two; members[position] is this one.
void ring_allreduce_among(Group& group, const std::vector<uint32_t>& members, uint32_t position,
                          const ReduceParams& params, const PartialArrays& arrays, uint64_t count);

// recursive_doubling.cc
void recursive_doubling_allreduce(Group& group, const Call& call);
// Among some of the members, whose partial results are in `partials`; members[position] is this one. `results` may be
// the same memory unless partial results are wide.
void recursive_doubling_allreduce_among(Group& group, const std::vector<uint32_t>& members, uint32_t position,
                                        const ReduceParams& params, char* partials, char* results, uint64_t count);

// halving_doubling.cc
void halving_doubling_allreduce(Group& group, const Call& call);
// As recursive_doubling_allreduce_among.
void halving_doubling_allreduce_among(Group& group, const std::vector<uint32_t>& members, uint32_t position,
                                      const ReduceParams& params, char* partials, char* results, uint64_t count);

// adasum.cc
void adasum_allreduce(Group& group, const Call& call);

// two_level.cc
void two_level_allreduce(Group& group, const Call& call);

// binomial_tree.cc
void binomial_tree_broadcast(Group& group, const Call& call);
void binomial_tree_reduce(Group& group, const Call& call);
void binomial_tree_gather(Group& group, const Call& call);
void binomial_tree_scatter(Group& group, const Call& call);

// pairwise_exchange.cc
void pairwise_exchange_alltoall(Group& group, const Call& call);
void pairwise_exchange_reduce_scatter(Group& group, const Call& call);
void pairwise_exchange_allreduce(Group& group, const Call& call);

}  // namespace ronde
