// Element-wise arithmetic on buffers, used by every algorithm. Only reduce/ knows how elements of a dtype are computed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ronde.h"

namespace ronde {

// How elements are reduced. RD_MEAN is a sum whose result is divided by `divisor`: integers divide exactly and truncate
// toward zero, floats multiply in double precision and round once. Integer sums and products wrap, as NumPy's do. For
// bool, sum and max are "or", product and min are "and".
struct ReduceParams {
  rd_dtype dtype;
  rd_op op;
  double prescale = 1.0;   // applied to every input
  double postscale = 1.0;  // applied to the result, after the division of a mean
  uint64_t divisor = 1;    // for RD_MEAN: the number of members
};

// Returns the bytes of one element, or 0 for an unknown dtype.
size_t element_bytes(rd_dtype dtype);

// Returns whether op is defined for dtype. Bool has no mean and no scaling; Adasum is for floats only.
bool supported(const ReduceParams& params);

// Computes outs[k][i] = postscale * (fold over j of prescale * ins[j][i]) for every k, with the division of a mean. The
// fold goes through j = 0, 1, 2, … so that all members that pass the same order get the same bits. 16-bit floats are
// folded in float32 and rounded once. An output may be exactly one of the inputs. `streaming` writes around the cache,
// for buffers much larger than it; it is ignored when an output is an input, because reading has brought those lines
// into the cache already. Adasum is not an element-wise fold: see adasum_dots and adasum_mix.
void reduce_many(const ReduceParams& params, const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs,
                 size_t count, bool streaming);

// Computes out[i] = a[i] op b[i] without scaling or division: one step of a ring. `out` may be a or b.
void combine(rd_dtype dtype, rd_op op, const void* a, const void* b, void* out, size_t count);

// Computes out[i] = prescale * in[i]. `out` may be `in`.
void apply_prescale(const ReduceParams& params, const void* in, void* out, size_t count);

// Divides the elements in place for a mean, then multiplies them by postscale.
void apply_postscale(const ReduceParams& params, void* data, size_t count);

// Computes dots[0] = a·b, dots[1] = a·a, dots[2] = b·b in double, in a fixed order of summation.
void adasum_dots(rd_dtype dtype, const void* a, const void* b, size_t count, double dots[3]);

// Computes out = ca * a + cb * b with the coefficients that follow from `dots`: ca = 1 - a·b / (2 a·a), cb = 1 - a·b /
// (2 b·b), and 1 for a vector that is zero or nearly so. `out` may be a or b.
void adasum_mix(rd_dtype dtype, const void* a, const void* b, void* out, size_t count, const double dots[3]);

// A memcpy that writes around the cache when `streaming`.
void copy_bytes(void* out, const void* in, size_t bytes, bool streaming);

// The CPU level of the kernels in use: "portable", "avx2" or "avx512".
const char* cpu_name();

// Makes tests use another level. Returns false when this CPU does not have it.
bool force_cpu(const char* name);

}  // namespace ronde
