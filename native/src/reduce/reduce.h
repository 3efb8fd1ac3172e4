// Element-wise arithmetic on buffers: the only place that knows what a dtype is. Used by every algorithm.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ronde.h"

namespace ronde {

// What to do with the elements. RD_MEAN is a sum whose result is divided by `divisor`; integers divide
// exactly and truncate toward zero, floats multiply in double precision and round once.
// Integer sums and products wrap, as NumPy's do. For bool, sum and max are "or", product and min are "and".
struct Arithmetic {
  rd_dtype dtype;
  rd_op op;
  double prescale = 1.0;   // applied to every input
  double postscale = 1.0;  // applied to the result, after the division of a mean
  uint64_t divisor = 1;    // for RD_MEAN: the number of members
};

// Bytes of one element; 0 for an unknown dtype.
size_t element_bytes(rd_dtype dtype);

// Whether op is defined for dtype: no mean and no scaling of bool, Adasum for floats only.
bool supported(const Arithmetic& a);

// outs[k][i] = finish(fold over j of prescale * ins[j][i]), for every k. The fold goes j = 0, 1, 2, … so that every
// member that passes the same order gets the same bits. 16-bit floats are folded in float32 and rounded once.
// outs may be (exactly) some of the ins. `streaming` writes around the cache: for buffers much larger than it.
// It is ignored when an output is an input: reading has brought those lines in, and writing around them costs twice.
// Adasum is not an element-wise fold: see adasum_*.
void reduce_many(const Arithmetic& a, const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs,
                 size_t count, bool streaming);

// out[i] = a[i] op b[i], nothing scaled, nothing divided: one hop of a ring. out may be a or b.
void combine(rd_dtype dtype, rd_op op, const void* a, const void* b, void* out, size_t count);

// out[i] = prescale * in[i] (the first half of what reduce_many does to one input). out may be in.
void scale_before(const Arithmetic& a, const void* in, void* out, size_t count);

// In place: the division of a mean, then postscale (the second half). Nothing to do for min, max, product without
// scale.
void finish(const Arithmetic& a, void* data, size_t count);

// dots[0] = a·b, dots[1] = a·a, dots[2] = b·b, in double, in a fixed order of summation.
void adasum_dots(rd_dtype dtype, const void* a, const void* b, size_t count, double dots[3]);

// out = ca * a + cb * b with the coefficients that `dots` give: 1 - a·b / (2 a·a), and 1 where a vector is (all but)
// zero. out may be a or b.
void adasum_mix(rd_dtype dtype, const void* a, const void* b, void* out, size_t count, const double dots[3]);

// memcpy that writes around the cache when `streaming`.
void copy_bytes(void* out, const void* in, size_t bytes, bool streaming);

// "portable", "avx2" or "avx512": the best this CPU has. force_cpu (tests) returns false when it is not available.
const char* cpu_name();
bool force_cpu(const char* name);

}  // namespace ronde
