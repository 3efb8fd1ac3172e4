// Element-wise arithmetic on buffers, used by every algorithm. Only reduce/ knows how elements of a dtype are computed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ronde.h"

namespace ronde {

// How elements are reduced. RD_MEAN is a sum that is divided by `divisor`: for floats a multiplication in double
// precision, rounded once; for integers the exact sum, which never wraps, divided and truncated toward zero. Integer
// sums and products wrap, as NumPy's do. For bool, sum and max are "or", product and min are "and".
struct ReduceParams {
  rd_dtype dtype;
  rd_op op;
  double prescale = 1.0;   // applied to every input
  double postscale = 1.0;  // applied to the result, after the division of a mean
  uint64_t divisor = 1;    // for RD_MEAN: the number of members
};

// Returns the bytes of one element, or 0 for an unknown dtype.
size_t element_bytes(rd_dtype dtype);

// Returns whether op is defined for dtype. Bool has no mean and no scaling; Adasum is for floats only, operations on
// bits are for integers and bool only and have no scaling.
bool supported(const ReduceParams& params);

// Computes outs[k][i] = postscale * (fold over j of prescale * ins[j][i]) for every k, with the division of a mean. The
// fold goes through j = 0, 1, 2, … so that all members that pass the same order get the same bits. 16-bit floats are
// folded in float32 and rounded once. An output may be exactly one of the inputs. `streaming` writes around the cache,
// for buffers much larger than it; it is ignored when an output is an input, because reading has brought those lines
// into the cache already. Adasum is not an element-wise fold: see adasum_dots and adasum_mix.
void reduce_many(const ReduceParams& params, const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs,
                 size_t count, bool streaming);

// What an array of a reduction holds:
//   kInput     elements of the dtype as a member gave them
//   kPartial   what some of the members have come to: prescaled, not divided, not postscaled
//   kResult    elements of the dtype, divided and postscaled
// A partial result is wider than the dtype where the dtype would lose something, so that only the result is rounded:
//   16-bit floats       float32; min and max without scaling lose nothing and stay as they are
//   means of integers   64 bits, and 128 for integers of 64
// Otherwise it has the dtype itself.
enum class Form { kInput, kPartial, kResult };

struct Operand {
  const void* data;
  Form form;
};

// Returns the bytes of one element of a partial result.
size_t partial_bytes(const ReduceParams& params);

// Returns whether partial results are wider than inputs and results.
inline bool has_wide_partials(const ReduceParams& params) {
  return partial_bytes(params) != element_bytes(params.dtype);
}

// Reduces inputs to a partial result. `out` may be exactly one of the inputs unless partial results are wide.
void reduce_to_partial(const ReduceParams& params, const void* const* ins, size_t num_ins, void* out, size_t count);

// Computes out[i] = a[i] op b[i]. Inputs are prescaled on the way, and a result is divided and postscaled. `out` may be
// exactly a or b if its elements are as wide.
void combine(const ReduceParams& params, Operand a, Operand b, void* out, Form out_form, size_t count);

// Makes a result of a partial result. `out` may be `partial` unless partial results are wide.
void finish_partial(const ReduceParams& params, const void* partial, void* out, size_t count);

// Returns the dtype that floats are computed in: float32 for 16-bit floats, otherwise their own.
rd_dtype wide_dtype(rd_dtype dtype);

// Adasum combines partial results: its two functions take float32 and float64. This one computes dots[0] = a·b, dots[1]
// = a·a, dots[2] = b·b in double, in a fixed order of summation.
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
