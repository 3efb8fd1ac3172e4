// Adasum: adds two gradients so that what they have in common counts once. Each span of a call is a vector of its own.
//
// Vectors are combined in pairs, in the order of recursive doubling. Both members of a pair exchange whole vectors, so
// both compute the same coefficients without a second exchange.
#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"
#include "algorithm/recursive_doubling.h"

namespace ronde {

void adasum_allreduce(CallContext& context, const Call& call) {
  if (call.spans.bytes() == 0) return;
  ContiguousArray array(context, call);
  const ReduceParams& params = call.reduce_params;
  rd_dtype dtype = wide_dtype(params.dtype);
  uint64_t width = element_bytes(dtype), bytes = call.spans.count() * width;
  char* data = array.make_partials(context);
  char* theirs = context.incoming.get(bytes);
  auto mix = [&](bool mine_is_left) {
    uint64_t start = 0;
    for (const rd_span& span : call.spans) {
      char* left = (mine_is_left ? data : theirs) + start;
      char* right = (mine_is_left ? theirs : data) + start;
      double dots[3];
      adasum_dots(dtype, left, right, span.count, dots);
      adasum_mix(dtype, left, right, data + start, span.count, dots);
      start += span.count * width;
    }
  };
  recursive_doubling(context, context.all_members(), context.topology.member_index, data, theirs, bytes, mix);
  finish_partial(params, data, array.data(), call.spans.count());
  array.copy_out();
}

}  // namespace ronde
