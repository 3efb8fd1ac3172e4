// The table of inner loops that one CPU level provides. Filled by kernels_*.cc, chosen by cpu_dispatch.cc, used by
// reduce.cc.
//
// T is the type in memory, W the type it is worked on in: float for the 16-bit floats, T itself otherwise.
// Pointers need no alignment. An output may be exactly one of the inputs.
// Nothing here may be an inline function: this header is also compiled with flags that not every CPU can run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ronde.h"

namespace ronde {

enum Fold { kSum = 0, kMin = 1, kMax = 2, kProduct = 3, kNumFolds = 4 };

// out[i] = a[i] op b[i]
using Join = void (*)(const void* a, const void* b, void* out, size_t n);

// out[i] = twin[i] = factor * (a[i] + b[i]); twin may be null. The one that training lives on: each element is read
// and written once however many things happen to it. The factor is for floats; others pass 1.
using Sum = void (*)(const void* a, const void* b, void* out, void* twin, size_t n, double factor);

// out[i] = factor * in[i]
using Scale = void (*)(const void* in, void* out, size_t n, double factor);

// x[i] = x[i] / divisor, truncated toward zero
using Divide = void (*)(void* x, size_t n, uint64_t divisor);

// How many partial sums one dot product has: element i goes to number i % kLanes, at every CPU level.
constexpr size_t kLanes = 8;

// The partial sums of a·b, a·a and b·b.
struct Dots {
  double ab[kLanes];
  double aa[kLanes];
  double bb[kLanes];
};

// Adds to the partial sums, beginning with number 0: n must be a multiple of kLanes but for the last piece.
using AddDots = void (*)(const void* a, const void* b, size_t n, Dots* dots);

// out[i] = ca * a[i] + cb * b[i], in double, rounded once
using Mix = void (*)(const void* a, const void* b, void* out, size_t n, double ca, double cb);

struct DtypeKernels {
  Join join[kNumFolds];   // T, T -> T
  Join open[kNumFolds];   // T, T -> W
  Join fold[kNumFolds];   // W, T -> W
  Join close[kNumFolds];  // W, T -> T
  Sum sum;                // T, T -> T
  Sum close_sum;          // W, T -> T
  Scale load;             // T -> W
  Scale store;            // W -> T
  Divide divide;          // integers only
  AddDots dots;           // float32 and float64 only
  Mix mix;                // float32 and float64 only
};

struct Kernels {
  const char* name;
  DtypeKernels of[RD_NUM_DTYPES];
  void (*copy)(void* out, const void* in, size_t bytes);    // memcpy
  void (*stream)(void* out, const void* in, size_t bytes);  // memcpy around the cache; not ordered until settle()
  void (*settle)();
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The table in use.
const Kernels& kernels();

}  // namespace ronde
