// The functions of reduce.h: they choose the kernels and run them block by block. Blocks stay in the first-level cache,
// so the passes that follow (scaling, rounding, copying to other outputs) are cheap. How an element is computed is
// known only to the kernels.
#include "reduce/reduce.h"

#include <cassert>
#include <cstdint>
#include <cstring>

#include "reduce/kernels.h"

namespace ronde {
namespace {

constexpr size_t kBlockBytes = 8192;
constexpr size_t kLine = 64;

constexpr size_t kElementBytes[RD_NUM_DTYPES] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1};

struct alignas(kLine) Block {
  char bytes[kBlockBytes];
};

bool is_16bit_float(rd_dtype dtype) { return dtype == RD_FLOAT16 || dtype == RD_BFLOAT16; }

bool is_float(rd_dtype dtype) { return is_16bit_float(dtype) || dtype == RD_FLOAT32 || dtype == RD_FLOAT64; }

// Returns the dtype of the accumulators.
rd_dtype wide(rd_dtype dtype) { return is_16bit_float(dtype) ? RD_FLOAT32 : dtype; }

// Returns how many wide elements fit in a block.
size_t block_count(rd_dtype dtype) { return kBlockBytes / element_bytes(wide(dtype)); }

FoldOp fold_op(rd_op op) {
  assert(op != RD_ADASUM && op < RD_NUM_OPS);
  switch (op) {
    case RD_MIN:
      return kMin;
    case RD_MAX:
      return kMax;
    case RD_PRODUCT:
      return kProduct;
    default:
      return kSum;
  }
}

const char* at(const void* data, size_t bytes) { return static_cast<const char*>(data) + bytes; }

char* at(void* data, size_t bytes) { return static_cast<char*>(data) + bytes; }

size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// What follows the fold: a division (for means of integers), then a multiplication.
struct ResultScale {
  uint64_t divisor = 1;
  double factor = 1.0;

  explicit ResultScale(const ReduceParams& params) : factor(params.postscale) {
    if (params.op != RD_MEAN) return;
    if (is_float(params.dtype)) {
      factor = params.postscale / static_cast<double>(params.divisor);
    } else {
      divisor = params.divisor;
    }
  }

  bool is_identity() const { return divisor <= 1 && factor == 1.0; }
};

// One run of reduce_many, block by block.
class Reduction {
 public:
  Reduction(const ReduceParams& params, const void* const* ins, size_t num_ins)
      : own_(kernels().of[params.dtype]),
        wide_(kernels().of[wide(params.dtype)]),
        fold_op_(fold_op(params.op)),
        element_bytes_(element_bytes(params.dtype)),
        prescale_(params.prescale),
        result_scale_(params),
        ins_(ins),
        num_ins_(num_ins),
        is_sum_(fold_op_ == kSum),
        is_single_pass_(num_ins > 1 && prescale_ == 1.0 &&
                        (result_scale_.is_identity() || (is_sum_ && is_float(params.dtype)))) {}

  // Computes elements first … first + n - 1 of the result into out, and into out2 unless it is null.
  void block(size_t first, size_t n, void* out, void* out2) {
    if (is_single_pass_) {
      single_pass(first, n, out, out2);
    } else {
      general(first, n, out, out2);
    }
  }

 private:
  const char* in(size_t j, size_t first) const { return at(ins_[j], first * element_bytes_); }

  // For inputs without prescale and a result that needs at most a factor: no passes but those that fold.
  void single_pass(size_t first, size_t n, void* out, void* out2) {
    const size_t last = num_ins_ - 1;
    const void* left = in(0, first);
    if (num_ins_ > 2) {
      left = folded_.bytes;
      own_.fold_first[fold_op_](in(0, first), in(1, first), folded_.bytes, n);
      for (size_t j = 2; j < last; ++j) own_.fold[fold_op_](folded_.bytes, in(j, first), folded_.bytes, n);
    }
    if (is_sum_) {
      (num_ins_ > 2 ? own_.sum_last : own_.sum)(left, in(last, first), out, out2, n, result_scale_.factor);
    } else {
      (num_ins_ > 2 ? own_.fold_last : own_.combine)[fold_op_](left, in(last, first), out, n);
      copy_to_second(out, out2, n);
    }
  }

  void general(size_t first, size_t n, void* out, void* out2) {
    own_.load(in(0, first), folded_.bytes, n, prescale_);
    for (size_t j = 1; j < num_ins_; ++j) {
      own_.load(in(j, first), next_.bytes, n, prescale_);
      wide_.combine[fold_op_](folded_.bytes, next_.bytes, folded_.bytes, n);
    }
    if (result_scale_.divisor > 1) own_.divide(folded_.bytes, n, result_scale_.divisor);
    own_.store(folded_.bytes, out, n, result_scale_.factor);
    copy_to_second(out, out2, n);
  }

  void copy_to_second(const void* out, void* out2, size_t n) {
    if (out2 != nullptr) std::memcpy(out2, out, n * element_bytes_);
  }

  const DtypeKernels& own_;
  const DtypeKernels& wide_;
  const FoldOp fold_op_;
  const size_t element_bytes_;
  const double prescale_;
  const ResultScale result_scale_;
  const void* const* ins_;
  const size_t num_ins_;
  const bool is_sum_;
  const bool is_single_pass_;
  Block folded_;
  Block next_;
};

bool any_shared(const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs) {
  for (size_t k = 0; k < num_outs; ++k) {
    for (size_t j = 0; j < num_ins; ++j) {
      if (outs[k] == ins[j]) return true;
    }
  }
  return false;
}

// Computes the first two outputs at once and copies the others from the first, which is still in the cache.
void reduce_cached(Reduction& reduction, void* const* outs, size_t num_outs, size_t count, size_t step, size_t bytes) {
  for (size_t i = 0; i < count; i += step) {
    const size_t n = smaller(step, count - i);
    char* result = at(outs[0], i * bytes);
    reduction.block(i, n, result, num_outs > 1 ? at(outs[1], i * bytes) : nullptr);
    for (size_t k = 2; k < num_outs; ++k) std::memcpy(at(outs[k], i * bytes), result, n * bytes);
  }
}

void reduce_streaming(Reduction& reduction, void* const* outs, size_t num_outs, size_t count, size_t step,
                      size_t bytes) {
  const Kernels& level = kernels();
  Block result;
  // The first block may be shorter, so that the others begin at a cache line.
  size_t n = smaller(count, step - reinterpret_cast<uintptr_t>(outs[0]) % kLine / bytes);
  for (size_t i = 0; i < count; i += n, n = smaller(step, count - i)) {
    reduction.block(i, n, result.bytes, nullptr);
    for (size_t k = 0; k < num_outs; ++k) level.stream(at(outs[k], i * bytes), result.bytes, n * bytes);
  }
  level.store_fence();
}

// Computes out[i] = factor * in[i], with T on both sides.
void scale(rd_dtype dtype, const void* in, void* out, size_t count, double factor) {
  const DtypeKernels& own = kernels().of[dtype];
  if (wide(dtype) == dtype) return own.load(in, out, count, factor);
  const size_t bytes = element_bytes(dtype), step = block_count(dtype);
  Block loaded;
  for (size_t i = 0; i < count; i += step) {
    const size_t n = smaller(step, count - i);
    own.load(at(in, i * bytes), loaded.bytes, n, 1.0);
    own.store(loaded.bytes, at(out, i * bytes), n, factor);
  }
}

double sum_lanes(const double lanes[kLanes]) {
  static_assert(kLanes == 8, "the order of this sum is part of the result");
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Returns the coefficient of a vector: 1 minus half of the part that it shares with the other. Below the threshold the
// square of its length has too little precision to divide by.
double adasum_coefficient(double overlap, double square) {
  constexpr double kAllButZero = 0x1p-511;
  return square >= kAllButZero ? 1.0 - overlap / (2.0 * square) : 1.0;
}

}  // namespace

size_t element_bytes(rd_dtype dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < RD_NUM_DTYPES ? kElementBytes[index] : 0;
}

bool supported(const ReduceParams& params) {
  if (element_bytes(params.dtype) == 0 || static_cast<size_t>(params.op) >= RD_NUM_OPS) return false;
  if (params.op == RD_MEAN && params.divisor == 0) return false;
  if (params.op == RD_ADASUM) return is_float(params.dtype);
  return params.dtype != RD_BOOL || (params.op != RD_MEAN && params.prescale == 1.0 && params.postscale == 1.0);
}

void reduce_many(const ReduceParams& params, const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs,
                 size_t count, bool streaming) {
  assert(supported(params));
  if (num_ins == 0 || num_outs == 0 || count == 0) return;
  Reduction reduction(params, ins, num_ins);
  const size_t step = block_count(params.dtype), bytes = element_bytes(params.dtype);
  // An output that is also an input is in the cache already, because it was read: writing around the cache would not
  // pay.
  if (streaming && !any_shared(ins, num_ins, outs, num_outs)) {
    reduce_streaming(reduction, outs, num_outs, count, step, bytes);
  } else {
    reduce_cached(reduction, outs, num_outs, count, step, bytes);
  }
}

void combine(rd_dtype dtype, rd_op op, const void* a, const void* b, void* out, size_t count) {
  kernels().of[dtype].combine[fold_op(op)](a, b, out, count);
}

void apply_prescale(const ReduceParams& params, const void* in, void* out, size_t count) {
  if (params.prescale == 1.0) {
    copy_bytes(out, in, count * element_bytes(params.dtype), false);
  } else {
    scale(params.dtype, in, out, count, params.prescale);
  }
}

void apply_postscale(const ReduceParams& params, void* data, size_t count) {
  const ResultScale scaling(params);
  if (scaling.divisor > 1) kernels().of[params.dtype].divide(data, count, scaling.divisor);
  if (scaling.factor != 1.0) scale(params.dtype, data, data, count, scaling.factor);
}

void adasum_dots(rd_dtype dtype, const void* a, const void* b, size_t count, double dots[3]) {
  assert(is_float(dtype));
  const DtypeKernels& own = kernels().of[dtype];
  const DtypeKernels& widened = kernels().of[wide(dtype)];
  const size_t bytes = element_bytes(dtype), step = block_count(dtype);
  Dots sums = {};
  Block left, right;
  for (size_t i = 0; i < count; i += step) {
    const size_t n = smaller(step, count - i);
    const void *x = at(a, i * bytes), *y = at(b, i * bytes);
    if (is_16bit_float(dtype)) {
      own.load(x, left.bytes, n, 1.0);
      own.load(y, right.bytes, n, 1.0);
      x = left.bytes;
      y = right.bytes;
    }
    widened.dots(x, y, n, &sums);
  }
  dots[0] = sum_lanes(sums.ab);
  dots[1] = sum_lanes(sums.aa);
  dots[2] = sum_lanes(sums.bb);
}

void adasum_mix(rd_dtype dtype, const void* a, const void* b, void* out, size_t count, const double dots[3]) {
  assert(is_float(dtype));
  const DtypeKernels& own = kernels().of[dtype];
  const DtypeKernels& widened = kernels().of[wide(dtype)];
  const double ca = adasum_coefficient(dots[0], dots[1]), cb = adasum_coefficient(dots[0], dots[2]);
  if (!is_16bit_float(dtype)) return own.mix(a, b, out, count, ca, cb);
  const size_t bytes = element_bytes(dtype), step = block_count(dtype);
  Block left, right;
  for (size_t i = 0; i < count; i += step) {
    const size_t n = smaller(step, count - i);
    own.load(at(a, i * bytes), left.bytes, n, 1.0);
    own.load(at(b, i * bytes), right.bytes, n, 1.0);
    widened.mix(left.bytes, right.bytes, left.bytes, n, ca, cb);
    own.store(left.bytes, at(out, i * bytes), n, 1.0);
  }
}

void copy_bytes(void* out, const void* in, size_t bytes, bool streaming) {
  if (out == in || bytes == 0) return;
  const Kernels& level = kernels();
  if (!streaming) return level.copy(out, in, bytes);
  level.stream(out, in, bytes);
  level.store_fence();
}

}  // namespace ronde
