// All collective algorithms, one file each. Every member of the team calls the same function for the same job.
#pragma once

#include "team.h"

namespace ronde {

// alone.cc: a channel of one member
void alone(Team& team, const Job& job);

// direct.cc: everybody on one host. direct_prepare puts the first chunk into my slot *before* the members meet, so that
// meeting is also "my data is there".
void direct_prepare(Team& team, const Job& job);
void direct_prepare_zeros(Team& team);  // for a member that has joined and does not know yet what will be asked
void direct_allreduce(Team& team, const Job& job);
void direct_broadcast(Team& team, const Job& job);
void direct_allgather(Team& team, const Job& job);
void direct_reduce_scatter(Team& team, const Job& job);

// ring.cc
void ring_allreduce(Team& team, const Job& job);
void ring_allgather(Team& team, const Job& job);
void ring_reduce_scatter(Team& team, const Job& job);
// In place on flat memory among some of the members, `order[position]` being myself.
void ring_allreduce_flat(Team& team, const std::vector<uint32_t>& order, uint32_t position,
                         const Arithmetic& arithmetic, char* data, uint64_t count);

// doubling.cc
void doubling_allreduce(Team& team, const Job& job);
void doubling_allreduce_flat(Team& team, const std::vector<uint32_t>& order, uint32_t position,
                             const Arithmetic& arithmetic, char* data, uint64_t count);

// adasum.cc
void adasum_allreduce(Team& team, const Job& job);

// two_level.cc
void two_level_allreduce(Team& team, const Job& job);

// tree.cc
void tree_broadcast(Team& team, const Job& job);

// pairwise.cc
void pairwise_alltoall(Team& team, const Job& job);

}  // namespace ronde
