// A channel with one member: every collective is a copy, and a reduction only scales.
#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"

namespace ronde {

void single_member(Group& group, const Call& call) {
  if (call.spans.bytes() == 0) return;
  ContiguousArray array(group, call);
  if (call.kind == RD_ALLREDUCE || call.kind == RD_REDUCE_SCATTER)
    apply_postscale(call.reduce_params, array.data(), call.spans.count());
  array.copy_out();
}

}  // namespace ronde
