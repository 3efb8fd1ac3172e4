// Recursive doubling: few steps, for small arrays.
//
// In step k a member exchanges its whole array with the member whose position differs in bit k, and both reduce the two
// arrays, so after log2(n) steps every member has the result. When n is not a power of two, the members beyond it first
// send their arrays to a partner below it and receive the result at the end. The array of the lower position is always
// the left operand, so both sides compute the same bits. What travels are partial results.
#include "algorithm/recursive_doubling.h"

#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"

namespace ronde {

void recursive_doubling_allreduce_among(CallContext& context, const std::vector<uint32_t>& members, uint32_t position,
                                        const ReduceParams& params, char* partials, char* results, uint64_t count) {
  uint64_t bytes = count * partial_bytes(params);
  char* theirs = context.incoming.get(bytes);
  recursive_doubling(context, members, position, partials, theirs, bytes, [&](bool mine_is_left) {
    Operand left{mine_is_left ? partials : theirs, Form::kPartial};
    Operand right{mine_is_left ? theirs : partials, Form::kPartial};
    combine(params, left, right, partials, Form::kPartial, count);
  });
  finish_partial(params, partials, results, count);
}

void recursive_doubling_allreduce(CallContext& context, const Call& call) {
  if (call.spans.bytes() == 0) return;
  ContiguousArray array(context, call);
  recursive_doubling_allreduce_among(context, context.all_members(), context.topology.member_index, call.reduce_params,
                                     array.make_partials(context), array.data(), call.spans.count());
  array.copy_out();
}

}  // namespace ronde
