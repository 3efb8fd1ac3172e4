// What an algorithm works with: the members, their links and shared memory, and this call's patience.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "link/host_barrier.h"
#include "link/link.h"
#include "link/shared_memory.h"
#include "link/wait.h"
#include "parts.h"
#include "reduce/reduce.h"
#include "topology.h"

namespace ronde {

// Memory that grows when needed and stays.
class Scratch {
 public:
  char* room(uint64_t bytes) {
    if (bytes > size_) {
      memory_.reset(new char[bytes]);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  uint64_t size_ = 0;
};

struct Team {
  const Topology& topology;
  SharedSegment* segment;  // null when I am alone at my place
  HostBarrier& barrier;
  const std::vector<std::unique_ptr<Link>>& links;  // per member; null for myself
  CallWait& wait;
  Scratch& flat;     // a call with several pieces, in one piece
  Scratch& passing;  // what came in and is being added
  uint32_t& slot;    // how many staging slots were used so far; the same on every member

  Link* link(uint32_t member) const { return links[member].get(); }

  // All members, in order.
  std::vector<uint32_t> everyone() const {
    std::vector<uint32_t> order(topology.size);
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
};

// One collective after the members have agreed on it.
struct Job {
  rd_kind kind;
  Arithmetic arithmetic;
  int root;
  Parts parts;
  std::vector<uint64_t> counts;  // elements per member, as in rd_call
  std::vector<uint64_t> splits;
  uint64_t bucket_offset = 0;
  bool in_bucket = false;

  uint64_t element_bytes() const { return parts.element_bytes(); }
};

}  // namespace ronde
