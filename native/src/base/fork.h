// What a forked child may not share with its parent. It gets copies of all descriptors, so that peers would not notice
// the parent's death, and the same shared memory, so that its writes would reach the parent and its peers. Right after
// a fork the child closes its copies of the descriptors, which tells nobody anything, and makes the memory private: it
// can still read it, and what it writes stays its own. The parent notices nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace ronde {

// Counts the forks between the process that loaded the library and this one. Who remembers another number was made by a
// process of which this one is a forked child.
extern std::atomic<uint32_t> fork_generation;

inline bool made_by_parent(uint32_t generation) {
  return generation != fork_generation.load(std::memory_order_relaxed);
}

// Held while the process forks, so that what it guards is complete in the child and the child can lock it.
std::mutex& fork_mutex();

// A descriptor that a child closes. close_descriptor() does nothing in a child of the process that owns it.
void own_descriptor(int descriptor);
void close_descriptor(int descriptor);

// Shared memory that becomes private in a child; a copy of its descriptor is kept for that. Throws
// CallError{RD_SYSTEM}.
void own_mapping(void* base, uint64_t bytes, int descriptor);
void unmap(void* base, uint64_t bytes);

}  // namespace ronde
