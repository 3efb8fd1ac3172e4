// Ring: every member sends to the next member and receives from the previous one.
//
// The data is cut into *chunks*, one per member. At step t the member at position p sends chunk p - t and receives
// chunk p - t - 1 (all modulo n), so at step t it sends what it received at step t - 1. In the first n - 1 steps of an
// allreduce a member reduces what it receives with its own data; in the last n - 1 steps it only stores it. After the
// first half, chunk p + 1 is complete at position p.
//
// In the first step a member sends what is its own, then partial results, then results. Partial results may be wider
// (see Form), so the bytes of a chunk depend on the step. With two members no partial result travels at all.
//
// There is no barrier between steps: the whole run is one outgoing and one incoming stream of bytes. A byte may be sent
// as soon as it was received (and reduced) in the step before, so sending, receiving and reducing overlap.
#include <algorithm>
#include <cstring>

#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"

namespace ronde {

namespace {

constexpr uint64_t kSegmentBytes = 128 * 1024;  // received bytes are reduced in segments of this size

class RingRun {
 public:
  // `starts` are the elements at which the chunks begin, and the end of the last.
  RingRun(CallContext& context, const std::vector<uint32_t>& members, uint32_t position, const ReduceParams& params,
          const PartialArrays& arrays, std::vector<uint64_t> starts)
      : context_(context),
        num_(uint32_t(members.size())),
        position_(position),
        params_(params),
        arrays_(arrays),
        starts_(std::move(starts)),
        next_(context.ring_link(members[(position + 1) % num_])),
        previous_(context.ring_link(members[(position + num_ - 1) % num_])) {}

  // Assigns the chunks one position further, so that position p ends with chunk p itself complete. Only that chunk gets
  // results, and the array of results has nothing else.
  void end_with_own_chunk() {
    shift_ = 1;
    results_begin_ = starts_[position_];
  }

  // Runs num_steps steps, of which the first num_reducing reduce and the others store. The last reducing step makes
  // results.
  void run(uint32_t num_reducing, uint32_t num_steps) {
    num_reducing_ = num_reducing;
    num_steps_ = num_steps;
    context_.wait.run_steps([&] {
      StepResult result;
      result.progress = receive_available();
      result.progress |= send_available();
      result.done = sending_step_ == num_steps_ && receiving_step_ == num_steps_;
      if (sending_step_ < num_steps_ && sent_ < sendable()) result.sending = next_;
      if (receiving_step_ < num_steps_) result.receiving = previous_;
      return result;
    });
  }

 private:
  uint32_t chunk_at(uint32_t step, uint32_t back) const {
    return (position_ + 3 * num_ - step % num_ - back - shift_) % num_;
  }
  uint64_t length(uint32_t chunk) const { return starts_[chunk + 1] - starts_[chunk]; }

  // What is sent and received at a step.
  Form form_at(uint32_t step) const {
    if (step >= num_reducing_) return Form::kResult;
    return step == 0 ? arrays_.own_form : Form::kPartial;
  }
  uint64_t width(Form form) const {
    return form == Form::kPartial ? partial_bytes(params_) : element_bytes(params_.dtype);
  }
  const char* own_at(uint64_t element) const { return arrays_.own + element * width(arrays_.own_form); }
  char* kept_at(Form form, uint64_t element) const {
    if (form == Form::kPartial) return arrays_.partials + element * width(form);
    return arrays_.results + (element - results_begin_) * width(form);
  }

  // How many bytes of the chunk being sent are complete here.
  uint64_t sendable() const {
    uint64_t whole = length(chunk_at(sending_step_, 0)) * width(form_at(sending_step_));
    if (sending_step_ == 0 || receiving_step_ >= sending_step_) return whole;
    return receiving_step_ + 1 == sending_step_ ? ready_ : 0;
  }

  bool send_available() {
    bool moved = false;
    while (sending_step_ < num_steps_) {
      uint32_t chunk = chunk_at(sending_step_, 0);
      Form form = form_at(sending_step_);
      bool is_own = sending_step_ == 0 && num_reducing_ > 0;
      const char* data = is_own ? own_at(starts_[chunk]) : kept_at(form, starts_[chunk]);
      uint64_t limit = sendable();
      size_t moved_bytes = limit > sent_ ? next_->try_send(data + sent_, limit - sent_) : 0;
      sent_ += moved_bytes;
      moved |= moved_bytes > 0;
      if (sent_ < length(chunk) * width(form)) break;
      if (receiving_step_ < sending_step_ && sending_step_ > 0) break;
      ++sending_step_;
      sent_ = 0;
      moved = true;
    }
    return moved;
  }

  bool receive_available() {
    bool moved = false;
    while (receiving_step_ < num_steps_) {
      uint32_t chunk = chunk_at(receiving_step_, 1);
      size_t received = receiving_step_ < num_reducing_ ? reduce_received(chunk) : store_received(chunk);
      moved |= received > 0;
      if (ready_ < length(chunk) * width(form_at(receiving_step_ + 1))) {
        if (received == 0) break;
        continue;
      }
      ++receiving_step_;
      ready_ = received_ = 0;
      moved = true;
    }
    return moved;
  }

  size_t store_received(uint32_t chunk) {
    char* chunk_data = kept_at(Form::kResult, starts_[chunk]);
    size_t received = previous_->try_receive(chunk_data + ready_, length(chunk) * width(Form::kResult) - ready_);
    ready_ += received;
    return received;
  }

  size_t reduce_received(uint32_t chunk) {
    Form form = form_at(receiving_step_), kept_form = form_at(receiving_step_ + 1);
    uint64_t done = ready_ / width(kept_form);
    uint64_t count = std::min(kSegmentBytes / width(form), length(chunk) - done), bytes = count * width(form);
    char* incoming = context_.incoming.get(kSegmentBytes);
    size_t received = previous_->try_receive(incoming + received_, bytes - received_);
    received_ += received;
    if (received_ < bytes || bytes == 0) return received;
    uint64_t first = starts_[chunk] + done;
    combine(params_, {incoming, form}, {own_at(first), arrays_.own_form}, kept_at(kept_form, first), kept_form, count);
    ready_ += count * width(kept_form);
    received_ = 0;
    return received;
  }

  CallContext& context_;
  uint32_t num_, position_;
  const ReduceParams& params_;
  const PartialArrays arrays_;
  std::vector<uint64_t> starts_;  // of the chunks, in elements
  Link* next_;
  Link* previous_;
  uint64_t results_begin_ = 0;  // the element at which the array of results begins
  uint32_t shift_ = 0, num_reducing_ = 0, num_steps_ = 0;
  uint32_t sending_step_ = 0, receiving_step_ = 0;
  uint64_t sent_ = 0;      // bytes of the chunk being sent
  uint64_t received_ = 0;  // of the segment being received, in a reducing step
  uint64_t ready_ = 0;     // of the chunk being received, as it is kept: stored or reduced
};

std::vector<uint64_t> even_chunks(uint64_t count, uint32_t num, uint64_t width) {
  std::vector<uint64_t> starts{0};
  for (uint32_t chunk = 0; chunk < num; ++chunk) starts.push_back(share_of(count, chunk, num, width).end);
  return starts;
}

// Members in the order of their hosts, so that the members of a host are neighbours and each host's network carries one
// edge of the ring.
std::vector<uint32_t> members_in_host_order(const CallContext& context, uint32_t* position) {
  std::vector<uint32_t> ordered;
  for (const auto& members : context.topology.members_by_host)
    ordered.insert(ordered.end(), members.begin(), members.end());
  *position = uint32_t(std::find(ordered.begin(), ordered.end(), context.topology.member_index) - ordered.begin());
  return ordered;
}

}  // namespace

void ring_allreduce_among(CallContext& context, const std::vector<uint32_t>& members, uint32_t position,
                          const ReduceParams& params, const PartialArrays& arrays, uint64_t count) {
  uint32_t num = uint32_t(members.size());
  RingRun run(context, members, position, params, arrays, even_chunks(count, num, element_bytes(params.dtype)));
  run.run(num - 1, 2 * (num - 1));
}

void ring_allreduce(CallContext& context, const Call& call) {
  if (call.spans.bytes() == 0) return;
  ContiguousArray array(context, call);
  uint32_t position;
  std::vector<uint32_t> members = members_in_host_order(context, &position);
  PartialArrays arrays = array.partial_arrays(context);
  ring_allreduce_among(context, members, position, call.reduce_params, arrays, call.spans.count());
  array.copy_out();
}

void ring_allgather(CallContext& context, const Call& call) {
  uint64_t width = call.element_bytes();
  std::vector<uint64_t> starts = starts_of(call.counts, 1);
  char* out = static_cast<char*>(call.spans[0].output);
  uint32_t me = context.topology.member_index;
  if (call.counts[me] > 0) std::memmove(out + starts[me] * width, call.spans[0].input, call.counts[me] * width);
  ring_allgather_in_place(context, call, out, std::move(starts));
}

void ring_allgather_in_place(CallContext& context, const Call& call, char* data, std::vector<uint64_t> starts) {
  PartialArrays arrays{nullptr, Form::kResult, nullptr, data};
  RingRun run(context, context.all_members(), context.topology.member_index, call.reduce_params, arrays,
              std::move(starts));
  run.run(0, context.topology.size - 1);
}

void ring_reduce_scatter(CallContext& context, const Call& call) {
  uint32_t size = context.topology.size;
  const rd_span& span = call.spans[0];
  char* partials = context.partials.get(call.spans.count() * partial_bytes(call.reduce_params));
  PartialArrays arrays{static_cast<const char*>(span.input), Form::kInput, partials, static_cast<char*>(span.output)};
  RingRun run(context, context.all_members(), context.topology.member_index, call.reduce_params, arrays,
              starts_of(call.counts, 1));
  run.end_with_own_chunk();
  run.run(size - 1, size - 1);
}

}  // namespace ronde
