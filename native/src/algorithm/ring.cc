// Ring: every member sends to the next and receives from the one before.
//
// The data is cut into *chunks*, one per member. At step t a member at position p sends chunk p - t and receives chunk
// p - t - 1 (all modulo n), so what it sends at step t is what it received at step t - 1. The first n - 1 steps of an
// allreduce add what comes in to the own data, the last n - 1 only store it: after the first half chunk p + 1 is
// complete at p.
//
// There is no barrier between steps: the whole run is one outgoing and one incoming stream of bytes. A byte may leave
// as soon as it has come in (and was added) the step before, so sending, receiving and adding overlap.
#include <algorithm>
#include <cstring>

#include "algorithm/algorithm.h"
#include "algorithm/flat_array.h"

namespace ronde {

namespace {

constexpr uint64_t kSegmentBytes = 128 * 1024;  // received bytes are added in pieces of this size

class RingRun {
 public:
  RingRun(Team& team, const std::vector<uint32_t>& order, uint32_t position, const Arithmetic& arithmetic, char* data,
          std::vector<uint64_t> starts)
      : team_(team),
        num_(uint32_t(order.size())),
        position_(position),
        arithmetic_(arithmetic),
        data_(data),
        starts_(std::move(starts)),
        width_(element_bytes(arithmetic.dtype)),
        next_(team.link(order[(position + 1) % num_])),
        before_(team.link(order[(position + num_ - 1) % num_])) {}

  // Deals the chunks out one position further: position p then ends up with chunk p itself.
  void shift_chunks() { shift_ = 1; }

  // `adding` steps that reduce, then steps that store, num_steps in all. The chunk that the last adding step completes
  // is finished (divided, scaled) on the spot.
  void run(uint32_t adding, uint32_t num_steps) {
    adding_ = adding;
    num_steps_ = num_steps;
    team_.wait.run_steps([&] {
      StepResult result;
      result.progress = receive_some();
      result.progress |= send_some();
      result.done = sending_step_ == num_steps_ && receiving_step_ == num_steps_;
      if (sending_step_ < num_steps_ && sent_ < sendable()) result.sending = next_;
      if (receiving_step_ < num_steps_) result.receiving = before_;
      return result;
    });
  }

 private:
  uint32_t chunk_at(uint32_t step, uint32_t back) const {
    return (position_ + 3 * num_ - step % num_ - back - shift_) % num_;
  }
  uint64_t length(uint32_t chunk) const { return starts_[chunk + 1] - starts_[chunk]; }

  // How far the chunk being sent is complete here.
  uint64_t sendable() const {
    if (sending_step_ == 0) return length(chunk_at(0, 0));
    if (receiving_step_ >= sending_step_) return length(chunk_at(sending_step_, 0));
    return receiving_step_ + 1 == sending_step_ ? ready_ : 0;
  }

  bool send_some() {
    bool moved = false;
    while (sending_step_ < num_steps_) {
      uint32_t chunk = chunk_at(sending_step_, 0);
      uint64_t limit = sendable();
      size_t went = limit > sent_ ? next_->try_send(data_ + starts_[chunk] + sent_, limit - sent_) : 0;
      sent_ += went;
      moved |= went > 0;
      if (sent_ < length(chunk)) break;
      if (receiving_step_ < sending_step_ && sending_step_ > 0) break;
      ++sending_step_;
      sent_ = 0;
      moved = true;
    }
    return moved;
  }

  bool receive_some() {
    bool moved = false;
    while (receiving_step_ < num_steps_) {
      uint32_t chunk = chunk_at(receiving_step_, 1);
      size_t came = receiving_step_ < adding_ ? add_some(chunk) : store_some(chunk);
      moved |= came > 0;
      if (ready_ < length(chunk)) {
        if (came == 0) break;
        continue;
      }
      ++receiving_step_;
      ready_ = received_ = 0;
      moved = true;
    }
    return moved;
  }

  size_t store_some(uint32_t chunk) {
    size_t came = before_->try_receive(data_ + starts_[chunk] + ready_, length(chunk) - ready_);
    ready_ += came;
    return came;
  }

  size_t add_some(uint32_t chunk) {
    uint64_t segment = std::min(kSegmentBytes, length(chunk) - ready_);
    char* passing = team_.passing.room(kSegmentBytes);
    size_t came = before_->try_receive(passing + received_, segment - received_);
    received_ += came;
    if (received_ < segment || segment == 0) return came;
    char* own = data_ + starts_[chunk] + ready_;
    combine(arithmetic_.dtype, arithmetic_.op, passing, own, own, segment / width_);
    if (receiving_step_ + 1 == adding_) finish(arithmetic_, own, segment / width_);
    ready_ += segment;
    received_ = 0;
    return came;
  }

  Team& team_;
  uint32_t num_, position_;
  const Arithmetic& arithmetic_;
  char* data_;
  std::vector<uint64_t> starts_;  // of the chunks, in bytes
  uint64_t width_;
  Link* next_;
  Link* before_;
  uint32_t shift_ = 0, adding_ = 0, num_steps_ = 0;
  uint32_t sending_step_ = 0, receiving_step_ = 0;
  uint64_t sent_ = 0;      // of the chunk being sent
  uint64_t received_ = 0;  // of the segment being received, while adding
  uint64_t ready_ = 0;     // of the chunk being received: stored or added
};

std::vector<uint64_t> even_chunks(uint64_t count, uint32_t num, uint64_t width) {
  std::vector<uint64_t> starts{0};
  for (uint32_t chunk = 0; chunk < num; ++chunk) starts.push_back(share_of(count, chunk, num, width).end * width);
  return starts;
}

// Members in the order of their places, so that a host's members are neighbours and each host's wire carries one edge.
std::vector<uint32_t> by_place(const Team& team, uint32_t* position) {
  std::vector<uint32_t> order;
  for (const auto& members : team.topology.members_by_host) order.insert(order.end(), members.begin(), members.end());
  *position = uint32_t(std::find(order.begin(), order.end(), team.topology.member_index) - order.begin());
  return order;
}

}  // namespace

void ring_allreduce_flat(Team& team, const std::vector<uint32_t>& order, uint32_t position,
                         const Arithmetic& arithmetic, char* data, uint64_t count) {
  uint32_t num = uint32_t(order.size());
  if (num == 1) return finish(arithmetic, data, count);
  RingRun run(team, order, position, arithmetic, data, even_chunks(count, num, element_bytes(arithmetic.dtype)));
  run.run(num - 1, 2 * (num - 1));
}

void ring_allreduce(Team& team, const Job& job) {
  if (job.parts.bytes() == 0) return;
  FlatArray array(team, job);
  uint32_t position;
  std::vector<uint32_t> order = by_place(team, &position);
  ring_allreduce_flat(team, order, position, job.arithmetic, array.data(), job.parts.count());
  array.deliver();
}

void ring_allgather(Team& team, const Job& job) {
  uint64_t width = job.element_bytes();
  std::vector<uint64_t> starts = starts_of(job.counts, width);
  char* out = static_cast<char*>(job.parts.pieces()[0].out);
  uint32_t me = team.topology.member_index;
  if (job.counts[me] > 0) std::memmove(out + starts[me], job.parts.pieces()[0].in, job.counts[me] * width);
  RingRun run(team, team.everyone(), me, job.arithmetic, out, std::move(starts));
  run.run(0, team.topology.size - 1);
}

void ring_reduce_scatter(Team& team, const Job& job) {
  uint64_t width = job.element_bytes();
  uint32_t size = team.topology.size, me = team.topology.member_index;
  char* data = team.flat.room(job.parts.bytes());
  job.parts.gather(0, job.parts.bytes(), data);
  scale_before(job.arithmetic, data, data, job.parts.count());
  std::vector<uint64_t> starts = starts_of(job.counts, width);
  std::vector<uint32_t> order = team.everyone();
  RingRun run(team, order, me, job.arithmetic, data, std::move(starts));
  run.shift_chunks();
  run.run(size - 1, size - 1);
  copy_bytes(job.parts.pieces()[0].out, data + starts_of(job.counts, width)[me], job.counts[me] * width, false);
}

}  // namespace ronde
