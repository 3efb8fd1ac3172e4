// Pairwise exchange: in n - 1 steps every member sends something to each other one. In step s it sends to the member s
// positions ahead and receives from the one s positions behind, so each member has one message in each direction at a
// time.
//
// A reduction is such an exchange, too: every member sends each other one that member's chunk of its input, and reduces
// its own chunk of all inputs. No partial result travels, which is for those that are wide.
#include <algorithm>
#include <cstring>

#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"

namespace ronde {

namespace {

constexpr uint64_t kSegmentBytes = 128 * 1024;  // received bytes are reduced in segments of this size

// `starts` are the elements at which the members' chunks begin, and the end of the last. `result` is this member's
// chunk, and may be the place of that chunk in `input`.
void reduce_own_chunk(CallContext& context, const ReduceParams& params, const char* input, char* result,
                      const std::vector<uint64_t>& starts) {
  uint32_t size = context.topology.size, me = context.topology.member_index;
  uint64_t width = element_bytes(params.dtype), wide = partial_bytes(params);
  uint64_t count = starts[me + 1] - starts[me], segment = kSegmentBytes / width;
  const char* own = input + starts[me] * width;
  char* partials = context.partials.get(count * wide);
  char* incoming = context.incoming.get(kSegmentBytes);
  for (uint32_t step = 1; step < size; ++step) {
    uint32_t to = (me + step) % size, from = (me + size - step) % size;
    const char* sent = input + starts[to] * width;
    uint64_t num_sent = 0, send_bytes = (starts[to + 1] - starts[to]) * width;
    uint64_t num_reduced = 0, num_received = 0;  // elements; bytes of the segment being received
    context.wait.run_steps([&] {
      StepResult result_of_step;
      size_t moved = num_sent < send_bytes ? context.link(to)->try_send(sent + num_sent, send_bytes - num_sent) : 0;
      num_sent += moved;
      uint64_t wanted = std::min(segment, count - num_reduced);
      if (wanted > 0) {
        size_t received = context.link(from)->try_receive(incoming + num_received, wanted * width - num_received);
        num_received += received;
        moved += received;
      }
      if (wanted > 0 && num_received == wanted * width) {
        char* kept = partials + num_reduced * wide;
        Operand left = step == 1 ? Operand{own + num_reduced * width, Form::kInput} : Operand{kept, Form::kPartial};
        bool is_last = step + 1 == size;
        combine(params, left, {incoming, Form::kInput}, is_last ? result + num_reduced * width : kept,
                is_last ? Form::kResult : Form::kPartial, wanted);
        num_reduced += wanted;
        num_received = 0;
      }
      result_of_step.progress = moved > 0;
      result_of_step.done = num_sent == send_bytes && num_reduced == count;
      if (num_sent < send_bytes) result_of_step.sending = context.link(to);
      if (num_reduced < count) result_of_step.receiving = context.link(from);
      return result_of_step;
    });
  }
}

}  // namespace

void pairwise_exchange_reduce_scatter(CallContext& context, const Call& call) {
  const rd_span& span = call.spans[0];
  reduce_own_chunk(context, call.reduce_params, static_cast<const char*>(span.input), static_cast<char*>(span.output),
                   starts_of(call.counts, 1));
}

void pairwise_exchange_allreduce(CallContext& context, const Call& call) {
  if (call.spans.bytes() == 0) return;
  ContiguousArray array(context, call);
  uint64_t width = call.element_bytes();
  std::vector<uint64_t> starts{0};
  for (uint32_t member = 0; member < context.topology.size; ++member)
    starts.push_back(share_of(call.spans.count(), member, context.topology.size, width).end);
  char* own = array.data() + starts[context.topology.member_index] * width;
  reduce_own_chunk(context, call.reduce_params, array.data(), own, starts);
  ring_allgather_in_place(context, call, array.data(), starts);
  array.copy_out();
}

void pairwise_exchange_alltoall(CallContext& context, const Call& call) {
  uint32_t size = context.topology.size, me = context.topology.member_index;
  std::vector<uint64_t> send_starts = starts_of(call.splits, call.element_bytes());
  std::vector<uint64_t> receive_starts = starts_of(call.counts, call.element_bytes());
  auto send_bytes = [&](uint32_t member) { return send_starts[member + 1] - send_starts[member]; };
  auto receive_bytes = [&](uint32_t member) { return receive_starts[member + 1] - receive_starts[member]; };
  const char* input = static_cast<const char*>(call.spans[0].input);
  char* output = static_cast<char*>(call.spans[0].output);
  if (send_bytes(me) > 0) std::memcpy(output + receive_starts[me], input + send_starts[me], send_bytes(me));
  for (uint32_t step = 1; step < size; ++step) {
    uint32_t to = (me + step) % size, from = (me + size - step) % size;
    send_receive(context.wait, context.link(to), input + send_starts[to], send_bytes(to), context.link(from),
                 output + receive_starts[from], receive_bytes(from));
  }
}

}  // namespace ronde
