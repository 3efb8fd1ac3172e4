// A channel with one member: every collective is a copy, and a reduction of one array is its scaling.
#include "algorithm/algorithm.h"
#include "algorithm/flat_array.h"

namespace ronde {

void alone(Team& team, const Job& job) {
  if (job.parts.bytes() == 0) return;
  FlatArray array(team, job);
  if (job.kind == RD_ALLREDUCE || job.kind == RD_REDUCE_SCATTER)
    finish(job.arithmetic, array.data(), job.parts.count());
  array.deliver();
}

}  // namespace ronde
