// The limits of the shared memory: sizes that cannot work are refused, the smallest ones that can work do, and memory
// of another size is never mapped.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "check.h"
#include "thread_ranks.h"

using namespace thread_ranks;

namespace {

rd_channel_params params_of(const std::vector<uint32_t>& hosts, uint64_t slot_bytes, uint64_t chunk_bytes,
                            uint64_t bucket_bytes = 0) {
  return {RD_ABI, uint32_t(hosts.size()), 0, 2, hosts.data(), slot_bytes, chunk_bytes, bucket_bytes, 0, 0};
}

// Memory of this size; the descriptor is -1 when it cannot be made.
FileDescriptor memory_of(uint64_t bytes) {
  FileDescriptor made(memfd_create("test", MFD_CLOEXEC));
  if (ftruncate(made.get(), off_t(bytes)) != 0) return FileDescriptor();
  return made;
}

// The status of rd_open; an opened channel is closed again.
rd_status open_and_close(const rd_channel_params& params, int segment) {
  rd_channel* channel = nullptr;
  rd_status status = rd_open(&params, segment, -1, 0, &channel);
  if (channel != nullptr) rd_release(channel);
  return status;
}

void check_allreduce(Channel& channel, uint64_t count, rd_algorithm algorithm) {
  std::vector<float> array(count, 1);
  rd_span span{array.data(), array.data(), count};
  rd_call c = make_call(RD_ALLREDUCE);
  c.algorithm = algorithm;
  c.spans = &span;
  c.num_spans = 1;
  CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
  uint64_t wrong = 0;
  for (float value : array) wrong += value != float(channel.topology().size);
  CHECK_EQ(wrong, uint64_t(0));
}

}  // namespace

TEST(sizes_that_cannot_work_are_refused) {
  const std::vector<uint32_t> two{0, 0}, nine(9, 0), nine_and_one{0, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const uint64_t huge = UINT64_MAX / 64 * 64;
  for (const rd_channel_params& params : {
           params_of(two, 4096, 8192),               // a chunk does not fit into a slot
           params_of(two, 4096, 0),                  // no chunk at all
           params_of(two, 4096 + 8, 4096),           // slots begin at cache lines
           params_of(two, 4096, 1000),               // and so do chunks
           params_of(nine, 4096, 64),                // fewer than eight bytes of a chunk for each member
           params_of(nine_and_one, 4096, 64),        // also when that is another host's matter
           params_of(two, huge, 4096),               // each of these would overflow
           params_of(two, uint64_t(1) << 62, 4096),  //
           params_of(two, 4096, 4096, UINT64_MAX),   //
           params_of(two, 4096, 4096, uint64_t(1) << 63),
       }) {
    CHECK_EQ(rd_segment_bytes(&params), uint64_t(0));
    FileDescriptor segment = memory_of(1 << 20);
    CHECK_EQ(open_and_close(params, segment.get()), RD_BAD_CALL);
  }
}

TEST(memory_of_another_size_is_refused_and_not_mapped) {
  const std::vector<uint32_t> two{0, 0};
  rd_channel_params params = params_of(two, 64 * 1024, 4096);
  uint64_t bytes = rd_segment_bytes(&params);
  CHECK_EQ(open_and_close(params, memory_of(bytes).get()), RD_OK);
  for (uint64_t other : {uint64_t(0), bytes - 1, bytes + 1, bytes + 64 * 1024})
    CHECK_EQ(open_and_close(params, memory_of(other).get()), RD_BAD_CALL);
  CHECK_EQ(open_and_close(params, 1 << 20), RD_SYSTEM);
  CHECK_EQ(errno, EBADF);
}

TEST(without_free_descriptors_a_channel_says_so) {
  const std::vector<uint32_t> two{0, 0};
  rd_channel_params params = params_of(two, 4096, 4096);
  FileDescriptor segment = memory_of(rd_segment_bytes(&params));
  rlimit before{}, none{};
  getrlimit(RLIMIT_NOFILE, &before);
  none = {rlim_t(segment.get()) + 1, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  rd_status status = open_and_close(params, segment.get());
  int reason = errno;
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK_EQ(status, RD_SYSTEM);
  CHECK_EQ(reason, EMFILE);
}

TEST(the_smallest_slots_hold_what_is_written_into_them) {
  for (uint64_t bytes : {64, 4096}) {
    for (uint32_t size : {2, 3, 8}) {
      GroupSetup setup;
      setup.hosts.assign(size, 0);
      setup.slot_bytes = setup.chunk_bytes = bytes;
      ThreadRanks all(setup);
      all.run([&](uint32_t rank, Channel& channel) {
        // What a slot does not hold would be in the slots of others and in the FIFOs of the ring.
        for (uint64_t count : {1, 17, 1000, 1025, 4000, 8192, 20000})
          for (rd_algorithm algorithm : {RD_DIRECT, RD_RING, RD_DIRECT}) check_allreduce(channel, count, algorithm);
        for (uint64_t count : {0, 1, 5, 3000}) {
          std::vector<uint64_t> counts(size, count);
          std::vector<double> in(count * size, 1.5), out(count);
          rd_span span{in.data(), out.data(), in.size()};
          rd_call c = make_call(RD_REDUCE_SCATTER, RD_FLOAT64);
          c.spans = &span;
          c.num_spans = 1;
          c.counts = counts.data();
          CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
          CHECK(out == std::vector<double>(count, 1.5 * size));
        }
        // The last member has joined already while the others still have an array.
        if (rank + 1 < size) {
          std::vector<float> array(6000, 1);
          rd_span span{array.data(), array.data(), array.size()};
          rd_call c = make_call(RD_ALLREDUCE);
          c.spans = &span;
          c.num_spans = 1;
          CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
          CHECK_EQ(array[0], float(size - 1));
          CHECK_EQ(array[5999], float(size - 1));
        }
        CHECK_EQ(run(channel, make_call(RD_JOIN))->result.status, int(RD_OK));
        check_allreduce(channel, 100, RD_RING);
      });
    }
  }
}
