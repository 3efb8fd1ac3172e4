// The data of messages that lie in the shared memory of a link, in an area of their own, until the receiver has freed
// them: the sender copies them there as a whole, and the receiver uses them where they are. Nobody waits for the other
// side while bytes move, and nothing is copied twice.
//
// The sender divides the area. Ahead of each piece of data is a mark, which the sender sets when it takes the place and
// the receiver clears when it needs the data no longer, from any thread. A sender looks at the marks when it needs a
// place; a receiver that dies leaves them set, and the link ends with it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>

namespace ronde {

struct LinkMemory;

// The mapping of a link's memory. It stays until the link is gone and nobody uses data in it.
class LinkMapping {
 public:
  // Throws CallError{RD_SYSTEM}. The caller keeps the descriptor.
  explicit LinkMapping(int descriptor);
  ~LinkMapping();
  LinkMapping(const LinkMapping&) = delete;
  LinkMemory* memory() const { return memory_; }

 private:
  LinkMemory* memory_;
};

// One piece of data. Clears its mark when it is destroyed.
class PlacedData {
 public:
  PlacedData(std::shared_ptr<LinkMapping> mapping, uint64_t offset) : mapping_(std::move(mapping)), offset_(offset) {}
  ~PlacedData();
  PlacedData(const PlacedData&) = delete;

  char* data() const;
  uint64_t offset() const { return offset_; }
  // The other side clears the mark from now on.
  void hand_over() { handed_over_ = true; }

 private:
  std::shared_ptr<LinkMapping> mapping_;
  uint64_t offset_;
  bool handed_over_ = false;
};

// The sender's view of the area. Guarded by the endpoint's mutex.
class PlacementArea {
 public:
  // Returns null when there is no place for so many bytes.
  std::shared_ptr<PlacedData> place(const std::shared_ptr<LinkMapping>& mapping, uint64_t bytes);

 private:
  std::map<uint64_t, uint64_t> places_;  // by offset, where each of them ends
};

// Returns what the other side has placed there; null if that cannot be.
std::shared_ptr<PlacedData> find_placed(const std::shared_ptr<LinkMapping>& mapping, uint64_t offset, uint64_t bytes);

}  // namespace ronde
