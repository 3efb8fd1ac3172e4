// The table of kernels (inner loops) of one CPU level. kernels_*.cc fill it, cpu_dispatch.cc chooses, reduce.cc calls.
//
// T is the type in memory, W the wide type that is computed with: float for the 16-bit floats, T itself otherwise.
// Pointers need no alignment. An output may be exactly one of the inputs.
// This header must not contain inline functions: it is also compiled with flags that not every CPU can run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ronde.h"

namespace ronde {

enum FoldOp { kSum = 0, kMin = 1, kMax = 2, kProduct = 3, kBitAnd = 4, kBitOr = 5, kBitXor = 6, kNumFoldOps = 7 };

// out[i] = a[i] op b[i]
using Combine = void (*)(const void* a, const void* b, void* out, size_t n);

// out[i] = out2[i] = factor * (a[i] + b[i]); out2 may be null. Training spends its time in this kernel, so it does
// everything in one pass over memory. The factor is for floats; other types pass 1.
using Sum = void (*)(const void* a, const void* b, void* out, void* out2, size_t n, double factor);

// out[i] = factor * in[i]
using Scale = void (*)(const void* in, void* out, size_t n, double factor);

// out[i] = in[i], in a type in which a sum of integers cannot overflow
using Widen = void (*)(const void* in, void* out, size_t n);

// out[i] = in[i] / divisor, truncated toward zero, where in[i] is such a sum
using Divide = void (*)(const void* in, void* out, size_t n, uint64_t divisor);

// The number of partial sums of a dot product: element i is added to sum i % kLanes, at every CPU level.
constexpr size_t kLanes = 8;

// The partial sums of a·b, a·a and b·b.
struct Dots {
  double ab[kLanes];
  double aa[kLanes];
  double bb[kLanes];
};

// Adds to the partial sums, beginning with sum 0: n must be a multiple of kLanes except in the last call.
using AddDots = void (*)(const void* a, const void* b, size_t n, Dots* dots);

// out[i] = ca * a[i] + cb * b[i], in double, rounded once
using AdasumMix = void (*)(const void* a, const void* b, void* out, size_t n, double ca, double cb);

// S is the type of the sums of a mean of integers: 64 bits, or 128 for integers of 64. The operations on bits are null
// for floats.
struct DtypeKernels {
  Combine combine[kNumFoldOps];     // T, T -> T
  Combine fold_first[kNumFoldOps];  // T, T -> W
  Combine fold[kNumFoldOps];        // W, T -> W
  Combine fold_last[kNumFoldOps];   // W, T -> T
  Sum sum;                          // T, T -> T
  Sum sum_last;                     // W, T -> T
  Scale load;                       // T -> W
  Scale store;                      // W -> T
  Widen widen;                      // T -> S, integers only
  Combine add_sums;                 // S, S -> S, integers only
  Divide divide;                    // S -> T, integers only
  AddDots dots;                     // float32 and float64 only
  AdasumMix mix;                    // float32 and float64 only
};

struct Kernels {
  const char* name;
  DtypeKernels of[RD_NUM_DTYPES];
  void (*copy)(void* out, const void* in, size_t bytes);    // memcpy
  void (*stream)(void* out, const void* in, size_t bytes);  // memcpy around the cache; not ordered until store_fence()
  void (*store_fence)();
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The table in use.
const Kernels& kernels();

}  // namespace ronde
