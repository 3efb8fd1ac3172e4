// Ring: every member sends to the next member and receives from the previous one.
//
// The data is cut into *chunks*, one per member. At step t the member at position p sends chunk p - t and receives
// chunk p - t - 1 (all modulo n), so at step t it sends what it received at step t - 1. In the first n - 1 steps of an
// allreduce a member reduces what it receives with its own data; in the last n - 1 steps it only stores it. After the
// first half, chunk p + 1 is complete at position p.
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
  RingRun(Group& group, const std::vector<uint32_t>& members, uint32_t position, const ReduceParams& params, char* data,
          std::vector<uint64_t> starts)
      : group_(group),
        num_(uint32_t(members.size())),
        position_(position),
        params_(params),
        data_(data),
        starts_(std::move(starts)),
        width_(element_bytes(params.dtype)),
        next_(group.link(members[(position + 1) % num_])),
        previous_(group.link(members[(position + num_ - 1) % num_])) {}

  // Assigns the chunks one position further, so that position p ends with chunk p itself complete.
  void shift_chunks() { shift_ = 1; }

  // Runs num_steps steps, of which the first num_reducing reduce and the others store. The chunk that the last reducing
  // step completes gets its division and postscale at once.
  void run(uint32_t num_reducing, uint32_t num_steps) {
    num_reducing_ = num_reducing;
    num_steps_ = num_steps;
    group_.wait.run_steps([&] {
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

  // How many bytes of the chunk being sent are complete here.
  uint64_t sendable() const {
    if (sending_step_ == 0) return length(chunk_at(0, 0));
    if (receiving_step_ >= sending_step_) return length(chunk_at(sending_step_, 0));
    return receiving_step_ + 1 == sending_step_ ? ready_ : 0;
  }

  bool send_available() {
    bool moved = false;
    while (sending_step_ < num_steps_) {
      uint32_t chunk = chunk_at(sending_step_, 0);
      uint64_t limit = sendable();
      size_t moved_bytes = limit > sent_ ? next_->try_send(data_ + starts_[chunk] + sent_, limit - sent_) : 0;
      sent_ += moved_bytes;
      moved |= moved_bytes > 0;
      if (sent_ < length(chunk)) break;
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
      if (ready_ < length(chunk)) {
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
    size_t received = previous_->try_receive(data_ + starts_[chunk] + ready_, length(chunk) - ready_);
    ready_ += received;
    return received;
  }

  size_t reduce_received(uint32_t chunk) {
    uint64_t segment = std::min(kSegmentBytes, length(chunk) - ready_);
    char* incoming = group_.incoming.get(kSegmentBytes);
    size_t received = previous_->try_receive(incoming + received_, segment - received_);
    received_ += received;
    if (received_ < segment || segment == 0) return received;
    char* own = data_ + starts_[chunk] + ready_;
    combine(params_.dtype, params_.op, incoming, own, own, segment / width_);
    if (receiving_step_ + 1 == num_reducing_) apply_postscale(params_, own, segment / width_);
    ready_ += segment;
    received_ = 0;
    return received;
  }

  Group& group_;
  uint32_t num_, position_;
  const ReduceParams& params_;
  char* data_;
  std::vector<uint64_t> starts_;  // of the chunks, in bytes
  uint64_t width_;
  Link* next_;
  Link* previous_;
  uint32_t shift_ = 0, num_reducing_ = 0, num_steps_ = 0;
  uint32_t sending_step_ = 0, receiving_step_ = 0;
  uint64_t sent_ = 0;      // bytes of the chunk being sent
  uint64_t received_ = 0;  // of the segment being received, in a reducing step
  uint64_t ready_ = 0;     // of the chunk being received: stored or reduced
};

std::vector<uint64_t> even_chunks(uint64_t count, uint32_t num, uint64_t width) {
  std::vector<uint64_t> starts{0};
  for (uint32_t chunk = 0; chunk < num; ++chunk) starts.push_back(share_of(count, chunk, num, width).end * width);
  return starts;
}

// Members in the order of their hosts, so that the members of a host are neighbours and each host's network carries one
// edge of the ring.
std::vector<uint32_t> members_in_host_order(const Group& group, uint32_t* position) {
  std::vector<uint32_t> ordered;
  for (const auto& members : group.topology.members_by_host)
    ordered.insert(ordered.end(), members.begin(), members.end());
  *position = uint32_t(std::find(ordered.begin(), ordered.end(), group.topology.member_index) - ordered.begin());
  return ordered;
}

}  // namespace

void ring_allreduce_among(Group& group, const std::vector<uint32_t>& members, uint32_t position,
                          const ReduceParams& params, char* data, uint64_t count) {
  uint32_t num = uint32_t(members.size());
  if (num == 1) return apply_postscale(params, data, count);
  RingRun run(group, members, position, params, data, even_chunks(count, num, element_bytes(params.dtype)));
  run.run(num - 1, 2 * (num - 1));
}

void ring_allreduce(Group& group, const Call& call) {
  if (call.spans.bytes() == 0) return;
  ContiguousArray array(group, call);
  uint32_t position;
  std::vector<uint32_t> members = members_in_host_order(group, &position);
  ring_allreduce_among(group, members, position, call.reduce_params, array.data(), call.spans.count());
  array.copy_out();
}

void ring_allgather(Group& group, const Call& call) {
  uint64_t width = call.element_bytes();
  std::vector<uint64_t> starts = starts_of(call.counts, width);
  char* out = static_cast<char*>(call.spans[0].output);
  uint32_t me = group.topology.member_index;
  if (call.counts[me] > 0) std::memmove(out + starts[me], call.spans[0].input, call.counts[me] * width);
  RingRun run(group, group.all_members(), me, call.reduce_params, out, std::move(starts));
  run.run(0, group.topology.size - 1);
}

void ring_reduce_scatter(Group& group, const Call& call) {
  uint64_t width = call.element_bytes();
  uint32_t size = group.topology.size, me = group.topology.member_index;
  char* data = group.contiguous.get(call.spans.bytes());
  call.spans.gather(0, call.spans.bytes(), data);
  apply_prescale(call.reduce_params, data, data, call.spans.count());
  std::vector<uint64_t> starts = starts_of(call.counts, width);
  RingRun run(group, group.all_members(), me, call.reduce_params, data, std::move(starts));
  run.shift_chunks();
  run.run(size - 1, size - 1);
  copy_bytes(call.spans[0].output, data + starts_of(call.counts, width)[me], call.counts[me] * width, false);
}

}  // namespace ronde
