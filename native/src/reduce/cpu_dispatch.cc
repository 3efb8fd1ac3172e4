// Chooses the table of kernels for this CPU when it is first needed. Tests may force another.
#include <atomic>
#include <cstring>

#include "reduce/kernels.h"
#include "reduce/reduce.h"

namespace ronde {
namespace {

constexpr size_t kMaxLevels = 3;

// The tables that this CPU can run, the fastest first.
struct Levels {
  const Kernels* tables[kMaxLevels];
  size_t count = 0;

  Levels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512) tables[count++] = &kernels_avx512;
    if (avx2) tables[count++] = &kernels_avx2;
#endif
    tables[count++] = &kernels_portable;
  }
};

const Levels& levels() {
  static const Levels found;
  return found;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table{levels().tables[0]};
  return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

const char* cpu_name() { return kernels().name; }

bool force_cpu(const char* name) {
  for (size_t i = 0; i < levels().count; ++i) {
    const Kernels* table = levels().tables[i];
    if (std::strcmp(table->name, name) != 0) continue;
    current().store(table, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace ronde
