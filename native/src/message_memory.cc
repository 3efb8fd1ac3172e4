#include "message_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "base/fork.h"

namespace ronde {

namespace {

constexpr uint64_t kLine = 64;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kMinHugeBytes = 1 << 20;    // from here on, pages of 2 MB are asked for, as NumPy does
constexpr uint64_t kMinKeptBytes = 64 * 1024;  // what is smaller costs little to allocate
constexpr uint64_t kMaxKeptBytes = 256 << 20;  // of all blocks together

// Ahead of every block is its size, in a cache line of its own, and what is kept with it.
struct alignas(kLine) BlockHeader {
  uint64_t bytes;
  std::shared_ptr<void>* kept;
};

// The fork mutex guards it, so that a forked child can free what it inherited. Never destroyed: arrays that use the
// memory may live until the end of the process.
struct KeptBlocks {
  std::vector<BlockHeader*> blocks;
  uint64_t bytes = 0;
};

KeptBlocks& kept_blocks() {
  static auto* kept = new KeptBlocks;
  return *kept;
}

}  // namespace

char* allocate_message_memory(uint64_t bytes) {
  bytes = (bytes + kLine - 1) / kLine * kLine;
  if (bytes >= kMinKeptBytes) {
    std::lock_guard<std::mutex> lock(fork_mutex());
    KeptBlocks& kept = kept_blocks();
    for (size_t i = kept.blocks.size(); i-- > 0;) {  // the last one is most likely in a cache
      BlockHeader* block = kept.blocks[i];
      if (block->bytes < bytes || block->bytes / 2 > bytes) continue;
      kept.blocks.erase(kept.blocks.begin() + ptrdiff_t(i));
      kept.bytes -= block->bytes;
      return reinterpret_cast<char*>(block + 1);
    }
  }
  auto* block = static_cast<BlockHeader*>(std::aligned_alloc(kLine, sizeof(BlockHeader) + bytes));
  if (block == nullptr) return nullptr;
  block->bytes = bytes;
  block->kept = nullptr;
  if (bytes >= kMinHugeBytes) {
    auto begin = (reinterpret_cast<uintptr_t>(block) + kPage - 1) / kPage * kPage;
    auto end = (reinterpret_cast<uintptr_t>(block + 1) + bytes) / kPage * kPage;
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // or they stay small
  }
  return reinterpret_cast<char*>(block + 1);
}

void keep_with_message_memory(char* memory, std::shared_ptr<void> kept) {
  (reinterpret_cast<BlockHeader*>(memory) - 1)->kept = new std::shared_ptr<void>(std::move(kept));
}

void free_message_memory(void* memory) {
  if (memory == nullptr) return;
  BlockHeader* block = static_cast<BlockHeader*>(memory) - 1;
  delete block->kept;
  block->kept = nullptr;
  if (block->bytes < kMinKeptBytes || block->bytes > kMaxKeptBytes) return std::free(block);
  std::lock_guard<std::mutex> lock(fork_mutex());
  KeptBlocks& kept = kept_blocks();
  kept.blocks.push_back(block);
  kept.bytes += block->bytes;
  while (kept.bytes > kMaxKeptBytes) {  // the oldest go
    kept.bytes -= kept.blocks.front()->bytes;
    std::free(kept.blocks.front());
    kept.blocks.erase(kept.blocks.begin());
  }
}

}  // namespace ronde
