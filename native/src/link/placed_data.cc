#include "link/placed_data.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/error.h"
#include "base/fork.h"
#include "link/message_link.h"

namespace ronde {

namespace {

constexpr uint64_t kLine = 64;

// Ahead of the data, in a cache line of its own.
struct alignas(kLine) Mark {
  std::atomic<uint32_t> is_used;
};

Mark& mark_at(LinkMemory& memory, uint64_t offset) { return *reinterpret_cast<Mark*>(memory.area + offset); }

}  // namespace

LinkMapping::LinkMapping(int descriptor) {
  void* base = mmap(nullptr, sizeof(LinkMemory), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) throw CallError{RD_SYSTEM, -1, errno};
  try {
    own_mapping(base, sizeof(LinkMemory), descriptor);
  } catch (const CallError&) {
    munmap(base, sizeof(LinkMemory));
    throw;
  }
  memory_ = static_cast<LinkMemory*>(base);
}

LinkMapping::~LinkMapping() { unmap(memory_, sizeof(LinkMemory)); }

PlacedData::~PlacedData() {
  if (!handed_over_) mark_at(*mapping_->memory(), offset_).is_used.store(0, std::memory_order_release);
}

char* PlacedData::data() const { return mapping_->memory()->area + offset_ + sizeof(Mark); }

std::shared_ptr<PlacedData> PlacementArea::place(const std::shared_ptr<LinkMapping>& mapping, uint64_t bytes) {
  if (bytes > LinkMemory::kAreaBytes) return nullptr;
  LinkMemory& memory = *mapping->memory();
  uint64_t needed = sizeof(Mark) + (bytes + kLine - 1) / kLine * kLine, free_from = 0;
  // The first gap: what was used last is most likely in a cache, and memory that was never needed stays untouched.
  for (auto place = places_.begin(); place != places_.end();) {
    if (mark_at(memory, place->first).is_used.load(std::memory_order_acquire) == 0) {
      place = places_.erase(place);
      continue;
    }
    if (place->first - free_from >= needed) break;
    free_from = place->second;
    ++place;
  }
  if (free_from + needed > LinkMemory::kAreaBytes) return nullptr;
  places_[free_from] = free_from + needed;
  mark_at(memory, free_from).is_used.store(1, std::memory_order_relaxed);
  return std::make_shared<PlacedData>(mapping, free_from);
}

std::shared_ptr<PlacedData> find_placed(const std::shared_ptr<LinkMapping>& mapping, uint64_t offset, uint64_t bytes) {
  bool fits = mapping != nullptr && offset % kLine == 0 && bytes <= LinkMemory::kAreaBytes &&
              offset <= LinkMemory::kAreaBytes - sizeof(Mark) &&
              bytes <= LinkMemory::kAreaBytes - sizeof(Mark) - offset;
  return fits ? std::make_shared<PlacedData>(mapping, offset) : nullptr;
}

}  // namespace ronde
