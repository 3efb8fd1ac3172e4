#include "choose.h"

#include "base/error.h"

namespace ronde {

namespace {

enum class Where {
  kOneHost,  // everybody shares memory
  kOneEach,  // several hosts, one member each
  kSeveral,  // several hosts, some with several members
};

Where where(const Layout& layout) {
  if (layout.one_place()) return Where::kOneHost;
  return layout.num_places() == layout.size ? Where::kOneEach : Where::kSeveral;
}

struct Row {
  rd_kind kind;
  Where where;
  uint64_t up_to_bytes;
  rd_algorithm algorithm;
};

constexpr uint64_t kAny = UINT64_MAX;

// The first row that fits.
constexpr Row kTable[] = {
    {RD_ALLREDUCE, Where::kOneHost, kAny, RD_DIRECT},      {RD_ALLREDUCE, Where::kOneEach, 64 * 1024, RD_DOUBLING},
    {RD_ALLREDUCE, Where::kOneEach, kAny, RD_RING},        {RD_ALLREDUCE, Where::kSeveral, kAny, RD_TWO_LEVEL},
    {RD_BROADCAST, Where::kOneHost, kAny, RD_DIRECT},      {RD_BROADCAST, Where::kOneEach, kAny, RD_TREE},
    {RD_BROADCAST, Where::kSeveral, kAny, RD_TREE},        {RD_ALLGATHER, Where::kOneHost, kAny, RD_DIRECT},
    {RD_ALLGATHER, Where::kOneEach, kAny, RD_RING},        {RD_ALLGATHER, Where::kSeveral, kAny, RD_RING},
    {RD_REDUCE_SCATTER, Where::kOneHost, kAny, RD_DIRECT}, {RD_REDUCE_SCATTER, Where::kOneEach, kAny, RD_RING},
    {RD_REDUCE_SCATTER, Where::kSeveral, kAny, RD_RING},   {RD_ALLTOALL, Where::kOneHost, kAny, RD_PAIRWISE},
    {RD_ALLTOALL, Where::kOneEach, kAny, RD_PAIRWISE},     {RD_ALLTOALL, Where::kSeveral, kAny, RD_PAIRWISE},
};

bool possible(const Layout& layout, rd_kind kind, rd_algorithm algorithm) {
  switch (algorithm) {
    case RD_DIRECT:
      return layout.one_place() && kind != RD_ALLTOALL;
    case RD_TWO_LEVEL:
      return !layout.one_place() && kind == RD_ALLREDUCE;
    case RD_DOUBLING:
      return kind == RD_ALLREDUCE;
    case RD_RING:
      return kind == RD_ALLREDUCE || kind == RD_ALLGATHER || kind == RD_REDUCE_SCATTER;
    case RD_TREE:
      return kind == RD_BROADCAST;
    case RD_PAIRWISE:
      return kind == RD_ALLTOALL;
    default:
      return false;
  }
}

}  // namespace

rd_algorithm choose(const Layout& layout, rd_kind kind, rd_op op, uint64_t bytes, rd_algorithm wanted) {
  if (kind == RD_ALLREDUCE && op == RD_ADASUM) return RD_DOUBLING;  // it is defined by its pairs
  if (wanted != RD_CHOOSE) {
    if (!possible(layout, kind, wanted)) throw CallError{RD_BAD_CALL};
    return wanted;
  }
  Where here = where(layout);
  for (const Row& row : kTable)
    if (row.kind == kind && row.where == here && bytes <= row.up_to_bytes) return row.algorithm;
  return RD_CHOOSE;
}

}  // namespace ronde
