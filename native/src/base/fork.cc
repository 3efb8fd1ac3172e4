#include "base/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <set>

#include "base/error.h"

namespace ronde {

std::atomic<uint32_t> fork_generation{0};

namespace {

struct Mapping {
  uint64_t bytes;
  int descriptor;
};

// Never destroyed: other threads may still close channels while the process exits.
std::mutex& mutex = *new std::mutex;  // guards the two below
std::set<int>& descriptors = *new std::set<int>;
std::map<void*, Mapping>& mappings = *new std::map<void*, Mapping>;

void after_fork_in_child() {
  fork_generation.fetch_add(1);
  for (auto& [base, mapping] : mappings) {
    constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (mmap(base, mapping.bytes, PROT_READ | PROT_WRITE, kFlags, mapping.descriptor, 0) == MAP_FAILED)
      mprotect(base, mapping.bytes, PROT_READ);  // rather a crash of the child than a wrong number in the parent
  }
  mappings.clear();
  for (int descriptor : descriptors) close(descriptor);
  descriptors.clear();
  mutex.unlock();
}

[[maybe_unused]] const int registered =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, after_fork_in_child);

}  // namespace

std::mutex& fork_mutex() { return mutex; }

void own_descriptor(int descriptor) {
  std::lock_guard<std::mutex> lock(mutex);
  descriptors.insert(descriptor);
}

void close_descriptor(int descriptor) {
  std::lock_guard<std::mutex> lock(mutex);
  if (descriptors.erase(descriptor) > 0) close(descriptor);
}

void own_mapping(void* base, uint64_t bytes, int descriptor) {
  int copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw CallError{RD_SYSTEM, -1, errno};
  std::lock_guard<std::mutex> lock(mutex);
  descriptors.insert(copy);
  mappings[base] = {bytes, copy};
}

void unmap(void* base, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = mappings.find(base);
  if (found != mappings.end()) {
    descriptors.erase(found->second.descriptor);
    close(found->second.descriptor);
    mappings.erase(found);
  }
  munmap(base, bytes);
}

}  // namespace ronde
