/* The operations of ronde in programs of JAX: handlers of XLA's typed foreign-function interface (FFI).
 *
 * The library is built without jaxlib: it knows the layout of XLA's C interface, version 0.3, which XLA checks when a
 * handler is registered.
 *
 * An operation is two parts of a program. ronde_jax_start copies the operands into memory of this library, queues a job
 * and returns at once, with the number of the job as its result. ronde_jax_finish gets that number, and returns a
 * future if the operation is not over; then the results are copied to where XLA wants them. No handler blocks a thread
 * of XLA. One thread of Python takes the job (ronde_jax_take_job), starts the operation by its name, and ends the job.
 *
 * Why two parts, and a copy: XLA gives the memory of operands and results to other parts of the program as soon as it
 * can, and lets those wait. With one part, an operation would often have to wait for the end of another one that it
 * does not need, and two ranks that come to the two in different orders would wait for each other for ever. A part that
 * ends at once delays nothing. And when a program fails between the two parts, the memory is still there.
 *
 * XLA goes on with the program in the thread that completes a future, and may be busy there for as long as a training
 * step takes. So futures are completed in threads of this library ("ronde-jax-end"), of which there are as many as
 * complete futures at the same time.
 */
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/job_queue.h"
#include "ronde.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using ronde_kernels::JobQueue;
using ronde_kernels::kForked;
using ronde_kernels::kStopped;

// --- XLA's C interface -----------------------------------------------------------------------------------------------

// The version that is known here. Structs only grow within a major version; whether there are futures is seen by the
// size of theirs.
constexpr int kMajor = 0, kMinor = 3;
constexpr int kUnknown = 2, kInternal = 13;  // codes of errors
constexpr int kStringAttribute = 4, kMetadataExtension = 1;

struct Error;
struct Future;

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};

struct ErrorArgs {
  size_t struct_size;
  Extension* extension;
  const char* message;
  int code;
};

struct FutureArgs {
  size_t struct_size;
  Extension* extension;
  Future* future;
};

struct FutureErrorArgs {
  size_t struct_size;
  Extension* extension;
  Future* future;
  Error* error;  // the future owns it from then on
};

struct RunIdArgs {
  size_t struct_size;
  Extension* extension;
  void* context;
  int64_t run_id;  // of one execution of a program
};

struct Version {
  size_t struct_size;
  Extension* extension;
  int major;
  int minor;
};

struct Api {
  size_t struct_size;
  Extension* extension;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArgs*);
  void* unused[12];
  Error* (*create_future)(FutureArgs*);
  Error* (*set_available)(FutureArgs*);
  Error* (*set_error)(FutureErrorArgs*);
  Error* (*get_run_id)(RunIdArgs*);
};

struct Buffer {
  size_t struct_size;
  Extension* extension;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Buffers {
  size_t struct_size;
  Extension* extension;
  int64_t size;
  int* types;
  Buffer** items;
};

struct Text {
  const char* data;
  size_t size;
};

struct Attributes {
  size_t struct_size;
  Extension* extension;
  int64_t size;
  int* types;
  Text** names;
  void** items;
};

struct CallFrame {
  size_t struct_size;
  Extension* extension;
  const Api* api;
  void* context;
  int stage;
  Buffers inputs;
  Buffers outputs;
  Attributes attributes;
  Future* future;  // set by the handler
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

static_assert(offsetof(Api, create_future) == 8 * (2 + 3 + 1 + 13), "as XLA_FFI_Api");
static_assert(sizeof(CallFrame) == 8 * (5 + 5 + 5 + 6 + 1), "as XLA_FFI_CallFrame");

Error* make_error(const Api* api, int code, const char* text) {
  ErrorArgs args{};
  args.struct_size = offsetof(ErrorArgs, code) + sizeof args.code;
  args.message = text;
  args.code = code;
  return api->create_error(&args);
}

// Answers XLA's question which version of the interface the handler knows; returns whether that was the question.
bool answer_metadata(CallFrame* frame) {
  if (frame->extension == nullptr || frame->extension->type != kMetadataExtension) return false;
  Metadata* metadata = reinterpret_cast<MetadataExtension*>(frame->extension)->metadata;
  metadata->version.major = kMajor;
  metadata->version.minor = kMinor;
  if (frame->api != nullptr && frame->api->version.major == kMajor)
    metadata->version.minor = std::min(kMinor, frame->api->version.minor);
  metadata->traits = 0;
  return true;
}

// The element type of ronde for one of XLA; -1 if there is none.
int32_t ronde_dtype(int dtype) {
  switch (dtype) {
    case 1:
      return RD_BOOL;
    case 2:
      return RD_INT8;
    case 3:
      return RD_INT16;
    case 4:
      return RD_INT32;
    case 5:
      return RD_INT64;
    case 6:
      return RD_UINT8;
    case 7:
      return RD_UINT16;
    case 8:
      return RD_UINT32;
    case 9:
      return RD_UINT64;
    case 10:
      return RD_FLOAT16;
    case 11:
      return RD_FLOAT32;
    case 12:
      return RD_FLOAT64;
    case 16:
      return RD_BFLOAT16;
    default:
      return -1;
  }
}

// The bytes of an element of XLA; 0 of one that ronde does not know.
int element_size(int dtype) {
  switch (dtype) {
    case 1:
    case 2:
    case 6:
      return 1;
    case 3:
    case 7:
    case 10:
    case 16:
      return 2;
    case 4:
    case 8:
    case 11:
      return 4;
    case 5:
    case 9:
    case 12:
      return 8;
    default:
      return 0;
  }
}

// --- memory ----------------------------------------------------------------------------------------------------------

constexpr size_t kAlignment = 64;

// Memory for the arrays of operations. Freed blocks are kept for the next step: new pages cost more than the copy.
class Blocks {
 public:
  struct Block {
    std::unique_ptr<char, void (*)(void*)> memory{nullptr, std::free};
    size_t size = 0;
  };

  // Returns a block with memory of at least `size` bytes, or with none if there is no memory.
  Block take(size_t size) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto it = kept_.begin(); it != kept_.end(); ++it) {
        if (it->size < size || it->size / 2 > size) continue;
        Block found = std::move(*it);
        kept_.erase(it);
        return found;
      }
    }
    Block block;
    block.size = (size + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
    block.memory.reset(static_cast<char*>(std::aligned_alloc(kAlignment, block.size)));
    return block;
  }

  void give_back(Block block) {
    if (block.memory == nullptr || block.size > kMaxKeptBytes) return;
    std::lock_guard<std::mutex> lock(mutex_);
    kept_.push_back(std::move(block));
    if (kept_.size() > kMaxKept) kept_.pop_front();
  }

 private:
  static constexpr size_t kMaxKept = 8;
  static constexpr size_t kMaxKeptBytes = 32 << 20;  // of each: above that, memory is dearer than new pages
  std::mutex mutex_;
  std::deque<Block> kept_;
};

// Never destroyed: programs may run while the process ends.
Blocks& blocks() {
  static auto* all = new Blocks;
  return *all;
}

// --- jobs ------------------------------------------------------------------------------------------------------------

std::atomic<bool> is_forked_child{false};

// Arrays one after the other in a block.
struct Arrays {
  Blocks::Block block;
  std::vector<void*> data;
  std::vector<size_t> sizes;  // bytes

  ~Arrays() { blocks().give_back(std::move(block)); }

  // Uses memory of somebody else, without gaps between the arrays.
  void place(std::vector<size_t> wanted, char* memory) {
    sizes = std::move(wanted);
    for (size_t size : sizes) {
      data.push_back(memory);
      memory += size;
    }
  }

  bool allocate(std::vector<size_t> wanted) {
    sizes = std::move(wanted);
    size_t total = 0;
    std::vector<size_t> offsets;
    for (size_t size : sizes) {
      offsets.push_back(total);
      total += (size + kAlignment - 1) / kAlignment * kAlignment;
    }
    block = blocks().take(total);
    if (block.memory == nullptr) return false;
    for (size_t offset : offsets) data.push_back(block.memory.get() + offset);
    return true;
  }
};

struct WaitingFinish {  // a handler ronde_jax_finish whose future is not completed
  const Api* api = nullptr;
  Future* future = nullptr;
  std::vector<void*> outputs;
  std::vector<size_t> sizes;
};

// One operation of a program, from ronde_jax_start until ronde_jax_finish has ended and Python has freed it.
struct Job {
  int64_t number = 0;
  int64_t run_id = 0;
  std::string operation, details;  // what Python reads
  bool is_in_bucket = false;       // the operands are in the bucket of the operation
  bool is_repeated = false;        // another one of its name was not finished in this execution of the program
  Arrays inputs;                   // the results of an operation that changes no shapes are here, too
  std::vector<int32_t> dtypes;
  std::vector<int64_t> dims;  // per input: how many, and then each
  uint8_t flag = 0;
  std::mutex mutex;  // guards the rest
  bool has_ended = false;
  int code = 0;
  std::string error;  // empty if all is well
  Arrays results;     // of an operation that changes shapes
  bool has_results = false;
  std::unique_ptr<WaitingFinish> finish;
};
using JobPointer = std::shared_ptr<Job>;

// As HandlerJobView in ronde/jax/ffi_library.py.
struct JobView {
  JobPointer* job;
  const char* operation;
  const char* details;
  int32_t is_repeated;
  int32_t is_in_bucket;
  uint64_t num_inputs;
  void* const* inputs;
  const int32_t* dtypes;
  const int64_t* dims;
};

// Memory that ranks share, for an operation that is repeated: what is copied there need not be copied again.
struct BucketMemory {
  char* address = nullptr;
  size_t size = 0;
  std::weak_ptr<Job> user;  // the job whose arrays are there
};

struct BucketTable {
  std::mutex mutex;                             // held while operands are copied, so that Python can replace the memory
  std::map<std::string, BucketMemory> buckets;  // by operation
  std::vector<BucketMemory> replaced;           // those of which a job still used the memory
};

BucketTable& bucket_table() {
  static auto* table = new BucketTable;
  return *table;
}

struct JobTable {
  std::mutex mutex;
  std::map<int64_t, JobPointer> jobs;   // by number: those that are not finished
  std::map<std::string, int64_t> last;  // by operation, the number of the last one
  int64_t next_number = 1;
};

JobTable& job_table() {
  static auto* table = new JobTable;
  return *table;
}

constexpr size_t kMaxKeptJobs = 4096;  // of programs that failed between start and finish

size_t count_bytes(const Buffer* buffer) {
  size_t bytes = static_cast<size_t>(element_size(buffer->dtype));
  for (int64_t d = 0; d < buffer->rank; ++d) bytes *= static_cast<size_t>(buffer->dims[d]);
  return bytes;
}

// Adds a job to the table. One of the same name that was not finished belongs to an execution that has failed, or it is
// a mistake of the program: nobody could say which of the two another rank means.
void add_job(const JobPointer& job) {
  JobPointer dropped;  // after the lock
  JobTable& table = job_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  auto last = table.last.find(job->operation);
  if (last != table.last.end()) {
    auto found = table.jobs.find(last->second);
    if (found != table.jobs.end()) {
      job->is_repeated = job->run_id != 0 && found->second->run_id == job->run_id;
      if (!job->is_repeated) {
        dropped = std::move(found->second);
        table.jobs.erase(found);
      }
    }
  }
  while (table.jobs.size() >= kMaxKeptJobs) table.jobs.erase(table.jobs.begin());
  if (table.last.size() >= kMaxKeptJobs) table.last.clear();
  job->number = table.next_number++;
  table.last[job->operation] = job->number;
  table.jobs[job->number] = job;
}

JobPointer take_from_table(int64_t number) {
  JobTable& table = job_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  auto found = table.jobs.find(number);
  if (found == table.jobs.end()) return nullptr;
  JobPointer job = std::move(found->second);
  table.jobs.erase(found);
  return job;
}

// --- completing futures ----------------------------------------------------------------------------------------------

// Copies the results of a job that has ended to where XLA wants them. Returns an error, or null.
Error* deliver(Job* job, const WaitingFinish& finish) {
  if (!job->error.empty()) return make_error(finish.api, job->code, job->error.c_str());
  const Arrays& found = job->has_results ? job->results : job->inputs;
  if (found.sizes != finish.sizes) return make_error(finish.api, kInternal, "ronde: the results have other sizes");
  for (size_t i = 0; i < finish.sizes.size(); ++i)
    if (finish.sizes[i] > 0) std::memcpy(finish.outputs[i], found.data[i], finish.sizes[i]);
  return nullptr;
}

struct Completion {
  JobPointer job;
  std::unique_ptr<WaitingFinish> finish;
};

void complete(Completion completion) {
  const WaitingFinish& finish = *completion.finish;
  if (Error* error = deliver(completion.job.get(), finish)) {
    completion.job.reset();
    FutureErrorArgs args{};
    args.struct_size = sizeof args;
    args.future = finish.future;
    args.error = error;
    finish.api->set_error(&args);
  } else {
    completion.job.reset();  // XLA may go on with the program here
    FutureArgs args{};
    args.struct_size = sizeof args;
    args.future = finish.future;
    finish.api->set_available(&args);
  }
}

// Threads that complete futures. One that has had nothing to do for a while ends.
class CompletionThreads {
 public:
  void put(Completion completion) {
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(completion));
    if (waiting_.size() > static_cast<size_t>(num_idle_)) {
      try {
        std::thread([this] { run(); }).detach();
        return;  // it takes one, or an idle one does
      } catch (const std::system_error&) {
        // No more threads: one of the others takes it, when its part of a program is over.
        if (num_threads_ == 0) {
          Completion last = std::move(waiting_.back());
          waiting_.pop_back();
          lock.unlock();
          complete(std::move(last));
          return;
        }
      }
    }
    changed_.notify_one();
  }

 private:
  static constexpr int kIdleSeconds = 10;

  void run() {
    pthread_setname_np(pthread_self(), "ronde-jax-end");
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_threads_;
    while (true) {
      if (waiting_.empty()) {
        ++num_idle_;
        bool found = changed_.wait_for(lock, std::chrono::seconds(kIdleSeconds), [this] { return !waiting_.empty(); });
        --num_idle_;
        if (!found) break;
      }
      Completion completion = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      complete(std::move(completion));
      lock.lock();
    }
    --num_threads_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Completion> waiting_;
  int num_idle_ = 0;
  int num_threads_ = 0;
};

// Never destroyed: programs may run while the process ends.
CompletionThreads& completion_threads() {
  static auto* threads = new CompletionThreads;
  return *threads;
}

// Ends a job once, with an error unless `text` is null.
void end_job(const JobPointer& job, int code, const char* text) {
  std::unique_ptr<WaitingFinish> finish;
  {
    std::lock_guard<std::mutex> lock(job->mutex);
    if (job->has_ended) return;
    job->has_ended = true;
    job->code = code;
    if (text != nullptr) job->error = *text != 0 ? text : "ronde: an operation has failed";
    finish = std::move(job->finish);
  }
  if (finish != nullptr) completion_threads().put({job, std::move(finish)});
}

// Jobs for the thread of Python.
JobQueue<JobPointer>& job_queue() {
  static auto* queue = new JobQueue<JobPointer>([](JobPointer* job) { end_job(*job, kUnknown, kStopped); });
  return *queue;
}

// Copies the operands of a job into the bucket of its operation, if that has one which is free, or into memory of its
// own. Returns whether there was memory.
bool copy_operands(const JobPointer& job, const CallFrame* frame, const std::vector<size_t>& sizes) {
  size_t total = 0;
  for (size_t size : sizes) total += size;
  BucketTable& table = bucket_table();
  std::unique_lock<std::mutex> lock(table.mutex);
  auto found = table.buckets.find(job->operation);
  bool is_free = found != table.buckets.end() && found->second.user.expired();
  // The last operand may be a flag, which is no part of the bucket.
  if (is_free && !sizes.empty() && (found->second.size == total || found->second.size + sizes.back() == total)) {
    job->inputs.place(sizes, found->second.address);
    if (found->second.size != total) job->inputs.data.back() = &job->flag;
    if (found->second.size == total || sizes.back() == sizeof job->flag) {
      found->second.user = job;
      job->is_in_bucket = true;
    }
  }
  if (!job->is_in_bucket) {
    lock.unlock();
    job->inputs.data.clear();
    if (!job->inputs.allocate(sizes)) return false;
  }
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] > 0) std::memcpy(job->inputs.data[i], frame->inputs.items[i]->data, sizes[i]);
  return true;
}

__attribute__((constructor)) void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });
}

}  // namespace

// --- for XLA ---------------------------------------------------------------------------------------------------------

EXPORT Error* ronde_jax_start(CallFrame* frame) {
  if (answer_metadata(frame)) return nullptr;
  const Api* api = frame->api;
  if (is_forked_child) return make_error(api, kUnknown, kForked);
  if (frame->struct_size < offsetof(CallFrame, future) || api->struct_size < sizeof(Api))
    return make_error(api, kInternal, "ronde: this jaxlib has no futures for foreign functions");
  auto job = std::make_shared<Job>();
  for (int64_t i = 0; i < frame->attributes.size; ++i) {
    if (frame->attributes.types[i] != kStringAttribute) continue;
    const Text* text = static_cast<const Text*>(frame->attributes.items[i]);
    const Text* name = frame->attributes.names[i];
    (std::string(name->data, name->size) == "operation" ? job->operation : job->details).assign(text->data, text->size);
  }
  std::vector<size_t> sizes;
  for (int64_t i = 0; i < frame->inputs.size; ++i) {
    const Buffer* buffer = frame->inputs.items[i];
    sizes.push_back(count_bytes(buffer));
    job->dtypes.push_back(ronde_dtype(buffer->dtype));
    job->dims.push_back(buffer->rank);
    job->dims.insert(job->dims.end(), buffer->dims, buffer->dims + buffer->rank);
  }
  RunIdArgs args{};
  args.struct_size = sizeof args;
  args.context = frame->context;
  if (Error* error = api->get_run_id(&args)) return error;
  job->run_id = args.run_id;
  add_job(job);
  if (!copy_operands(job, frame, sizes)) {
    take_from_table(job->number);
    return make_error(api, kInternal, "ronde: there is no memory for the operands");
  }
  std::memcpy(frame->outputs.items[0]->data, &job->number, sizeof job->number);
  job_queue().put(std::make_unique<JobPointer>(job));
  return nullptr;
}

EXPORT Error* ronde_jax_finish(CallFrame* frame) {
  if (answer_metadata(frame)) return nullptr;
  const Api* api = frame->api;
  int64_t number = 0;
  std::memcpy(&number, frame->inputs.items[0]->data, sizeof number);
  JobPointer job = take_from_table(number);
  if (job == nullptr)
    return make_error(api, kInternal,
                      "ronde: an operation was forgotten, because another program has started one of its name");
  auto finish = std::make_unique<WaitingFinish>();
  finish->api = api;
  for (int64_t i = 0; i < frame->outputs.size; ++i) {
    finish->outputs.push_back(frame->outputs.items[i]->data);
    finish->sizes.push_back(count_bytes(frame->outputs.items[i]));
  }
  {
    std::lock_guard<std::mutex> lock(job->mutex);
    if (!job->has_ended) {
      FutureArgs args{};
      args.struct_size = sizeof args;
      if (Error* error = api->create_future(&args)) return error;
      finish->future = frame->future = args.future;
      job->finish = std::move(finish);
      return nullptr;
    }
  }
  return deliver(job.get(), *finish);
}

// --- for Python: ronde/jax/ffi_library.py ----------------------------------------------------------------------------

// Waits for the next job. Returns 1, 0 after timeout_s, -1 when ronde_jax_stop was called.
EXPORT int ronde_jax_take_job(JobView* view, double timeout_s) {
  JobPointer* taken = job_queue().take(timeout_s);
  if (taken == nullptr) return job_queue().is_stopped() ? -1 : 0;
  const Job& job = **taken;
  *view = {taken,
           job.operation.c_str(),
           job.details.c_str(),
           job.is_repeated,
           job.is_in_bucket,
           job.inputs.data.size(),
           job.inputs.data.data(),
           job.dtypes.data(),
           job.dims.data()};
  return 1;
}

// Sets the bucket of an operation; null if it has none any more. No other job will use the one before, but one that has
// its arrays there may not be over: ronde_jax_is_bucket_used.
EXPORT void ronde_jax_set_bucket(const char* operation, void* address, uint64_t size) {
  BucketTable& table = bucket_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  auto found = table.buckets.find(operation);
  if (found != table.buckets.end()) {
    table.replaced.push_back(std::move(found->second));
    table.buckets.erase(found);
  }
  if (address != nullptr) table.buckets[operation] = {static_cast<char*>(address), static_cast<size_t>(size), {}};
}

// Whether a job has its arrays in a bucket that was replaced. Once it is not, it never will be.
EXPORT int ronde_jax_is_bucket_used(void* address) {
  BucketTable& table = bucket_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  auto& replaced = table.replaced;
  auto is_over = [](const BucketMemory& each) { return each.user.expired(); };
  replaced.erase(std::remove_if(replaced.begin(), replaced.end(), is_over), replaced.end());
  return std::any_of(replaced.begin(), replaced.end(),
                     [&](const BucketMemory& each) { return each.address == address; });
}

// Gives a job memory for results of so many bytes, and returns whether there is any. Only for an operation whose
// results are not where its operands are.
EXPORT int ronde_jax_allocate_results(JobPointer* job, const uint64_t* sizes, uint64_t count, void** data) {
  if (!(*job)->results.allocate(std::vector<size_t>(sizes, sizes + count))) return 0;
  std::copy((*job)->results.data.begin(), (*job)->results.data.end(), data);
  (*job)->has_results = true;
  return 1;
}

// Ends a job: with an error, unless `text` is null. After an error the job keeps its memory until it is freed.
EXPORT void ronde_jax_end(JobPointer* job, int code, const char* text) { end_job(*job, code, text); }

// Frees a job that has ended, and whose memory nothing uses any more.
EXPORT void ronde_jax_free_job(JobPointer* job) { delete job; }

// Ends all jobs that nobody has taken, and all later ones, with an error.
EXPORT void ronde_jax_stop() { job_queue().stop(); }
