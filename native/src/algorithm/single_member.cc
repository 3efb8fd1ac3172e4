// A channel with one member: every collective is a copy, and a reduction only scales.
#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"

namespace ronde {

namespace {

bool reduces(rd_kind kind) { return kind == RD_ALLREDUCE || kind == RD_REDUCE_SCATTER || kind == RD_REDUCE; }

}  // namespace

void single_member(CallContext& context, const Call& call) {
  if (call.spans.bytes() == 0) return;
  ContiguousArray array(context, call);
  if (reduces(call.kind))
    finish_partial(call.reduce_params, array.make_partials(context), array.data(), call.spans.count());
  array.copy_out();
}

}  // namespace ronde
