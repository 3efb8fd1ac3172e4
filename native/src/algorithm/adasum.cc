// Adasum: adds two gradients so that what they share counts once. Each array of a call is its own vector.
//
// The combination is pairwise, in the order of recursive doubling. Whole vectors are swapped, so both partners see both
// and compute the same coefficients without a second exchange.
#include "algorithm/algorithm.h"
#include "algorithm/doubling.h"
#include "algorithm/flat_array.h"

namespace ronde {

void adasum_allreduce(Team& team, const Job& job) {
  if (job.parts.bytes() == 0) return;
  FlatArray array(team, job);
  char* data = array.data();
  char* theirs = team.passing.room(job.parts.bytes());
  rd_dtype dtype = job.arithmetic.dtype;
  pair_up(team, team.everyone(), team.topology.member_index, data, theirs, job.parts.bytes(), [&](bool mine_is_left) {
    uint64_t start = 0;
    for (const rd_part& part : job.parts.pieces()) {
      char* left = (mine_is_left ? data : theirs) + start;
      char* right = (mine_is_left ? theirs : data) + start;
      double dots[3];
      adasum_dots(dtype, left, right, part.count, dots);
      adasum_mix(dtype, left, right, data + start, part.count, dots);
      start += part.count * job.element_bytes();
    }
  });
  finish(job.arithmetic, data, job.parts.count());
  array.deliver();
}

}  // namespace ronde
