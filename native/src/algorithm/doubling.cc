// Recursive doubling: few steps, for small arrays.
//
// In step k a member swaps its whole array with the one whose position differs in bit k and both add the two up, so
// after log2(n) steps everyone has everything. When n is not a power of two, the members beyond it first hand their
// arrays to a partner below and get the result back at the end. The lower position's array is always the left operand:
// both sides compute the same bits.
#include "algorithm/doubling.h"

#include "algorithm/algorithm.h"
#include "algorithm/flat_array.h"

namespace ronde {

void doubling_allreduce_flat(Team& team, const std::vector<uint32_t>& order, uint32_t position,
                             const Arithmetic& arithmetic, char* data, uint64_t count) {
  uint64_t bytes = count * element_bytes(arithmetic.dtype);
  char* theirs = team.passing.room(bytes);
  pair_up(team, order, position, data, theirs, bytes, [&](bool mine_is_left) {
    combine(arithmetic.dtype, arithmetic.op, mine_is_left ? data : theirs, mine_is_left ? theirs : data, data, count);
  });
  finish(arithmetic, data, count);
}

void doubling_allreduce(Team& team, const Job& job) {
  if (job.parts.bytes() == 0) return;
  FlatArray array(team, job);
  doubling_allreduce_flat(team, team.everyone(), team.topology.member_index, job.arithmetic, array.data(),
                          job.parts.count());
  array.deliver();
}

}  // namespace ronde
