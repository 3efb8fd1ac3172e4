// Memory for messages that arrive without a receive that waits, and for arrays that are made anew in every step. It is
// kept for a while when it is freed: of a large array that the system has just given, every page costs more to touch
// the first time than to receive.
#pragma once

#include <cstdint>
#include <memory>

namespace ronde {

// Returns memory that begins at a cache line, or null when there is none.
char* allocate_message_memory(uint64_t bytes);
// Lets the memory keep something else until it is freed: that which its user needs as well.
void keep_with_message_memory(char* memory, std::shared_ptr<void> kept);
// Null is allowed. For any thread, also after the endpoint is closed.
void free_message_memory(void* memory);

struct FreeMessageMemory {
  void operator()(char* memory) const { free_message_memory(memory); }
};
using MessageMemory = std::unique_ptr<char, FreeMessageMemory>;

}  // namespace ronde
