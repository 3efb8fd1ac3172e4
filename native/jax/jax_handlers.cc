/* The operations of ronde in programs of JAX: handlers of XLA's typed foreign-function interface (FFI).
 *
 * The library is built without jaxlib: it knows the layout of XLA's C interface, version 0.3, which XLA checks when a
 * handler is registered. Python registers ronde_jax_operation for all operations and ronde_jax_nothing, which does
 * nothing.
 *
 * No handler blocks a thread of XLA. ronde_jax_operation copies what it needs of the call (XLA uses the call frame
 * again as soon as it returns), queues a job, and returns a future. One thread of Python takes the job
 * (ronde_jax_take_job), starts the operation by its name, and ends the job when nothing uses its memory any more: until
 * then XLA keeps operands and results.
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
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
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
constexpr int kUnknown = 2, kFailedPrecondition = 9, kInternal = 13;  // codes of errors
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

// --- jobs ------------------------------------------------------------------------------------------------------------

std::atomic<bool> is_forked_child{false};

// One execution of the handler. Python frees it.
struct Job {
  const Api* api = nullptr;
  Future* future = nullptr;  // null when it is completed
  std::string operation;     // what Python reads
  std::vector<void*> inputs, outputs;
  std::vector<int32_t> dtypes;  // of inputs and outputs
  std::vector<int64_t> dims;    // per input and output: how many, and then each
};

// As JobView in ronde/jax/ffi_library.py.
struct JobView {
  Job* job;
  const char* operation;
  uint64_t num_inputs;
  void* const* inputs;
  uint64_t num_outputs;
  void* const* outputs;
  const int32_t* dtypes;
  const int64_t* dims;
};

void read_buffers(const Buffers& buffers, Job* job, std::vector<void*>* data) {
  for (int64_t i = 0; i < buffers.size; ++i) {
    const Buffer* buffer = buffers.items[i];
    data->push_back(buffer->data);
    job->dtypes.push_back(ronde_dtype(buffer->dtype));
    job->dims.push_back(buffer->rank);
    job->dims.insert(job->dims.end(), buffer->dims, buffer->dims + buffer->rank);
  }
}

// --- completing futures ----------------------------------------------------------------------------------------------

struct Completion {
  const Api* api;
  Future* future;
  Error* error;  // null if all is well
};

void complete(const Completion& completion) {
  if (completion.error != nullptr) {
    FutureErrorArgs args{};
    args.struct_size = sizeof args;
    args.future = completion.future;
    args.error = completion.error;
    completion.api->set_error(&args);
  } else {
    FutureArgs args{};
    args.struct_size = sizeof args;
    args.future = completion.future;
    completion.api->set_available(&args);
  }
}

// Threads that complete futures. One that has had nothing to do for a while ends.
class CompletionThreads {
 public:
  void put(const Completion& completion) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(completion);
    if (waiting_.size() > static_cast<size_t>(num_idle_)) {
      try {
        std::thread([this] { run(); }).detach();
        return;  // it takes one, or an idle one does
      } catch (const std::system_error&) {
        // No more threads: one of the others takes it, when its part of a program is over.
        if (num_threads_ == 0) {
          waiting_.pop_back();
          complete(completion);
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
      Completion completion = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      complete(completion);
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

// Completes the future of a job once, with an error unless `text` is null.
void end_job(Job* job, int code, const char* text) {
  if (job->future == nullptr) return;
  Completion completion{job->api, job->future, text == nullptr ? nullptr : make_error(job->api, code, text)};
  job->future = nullptr;
  completion_threads().put(completion);
}

// Jobs for the thread of Python.
JobQueue<Job>& job_queue() {
  static auto* queue = new JobQueue<Job>([](Job* job) { end_job(job, kUnknown, kStopped); });
  return *queue;
}

__attribute__((constructor)) void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });
}

}  // namespace

// --- for XLA ---------------------------------------------------------------------------------------------------------

EXPORT Error* ronde_jax_operation(CallFrame* frame) {
  if (answer_metadata(frame)) return nullptr;
  const Api* api = frame->api;
  if (is_forked_child) return make_error(api, kFailedPrecondition, kForked);
  if (frame->struct_size < offsetof(CallFrame, future) || api->struct_size < sizeof(Api))
    return make_error(api, kInternal, "ronde: this jaxlib has no futures for foreign functions");
  auto job = std::make_unique<Job>();
  job->api = api;
  for (int64_t i = 0; i < frame->attributes.size; ++i) {
    if (frame->attributes.types[i] != kStringAttribute) continue;
    const Text* text = static_cast<const Text*>(frame->attributes.items[i]);
    job->operation.assign(text->data, text->size);
  }
  read_buffers(frame->inputs, job.get(), &job->inputs);
  read_buffers(frame->outputs, job.get(), &job->outputs);
  FutureArgs args{};
  args.struct_size = sizeof args;
  if (Error* error = api->create_future(&args)) return error;
  job->future = frame->future = args.future;
  job_queue().put(std::move(job));
  return nullptr;
}

// Fills a program, so that XLA runs what it can at the same time: it runs those of at most eight parts, or with nothing
// but small arrays, in one order.
EXPORT Error* ronde_jax_nothing(CallFrame* frame) {
  answer_metadata(frame);
  return nullptr;
}

// --- for Python: ronde/jax/ffi_library.py ----------------------------------------------------------------------------

// Waits for the next job. Returns 1, 0 after timeout_s, -1 when ronde_jax_stop was called.
EXPORT int ronde_jax_take_job(JobView* view, double timeout_s) {
  Job* job = job_queue().take(timeout_s);
  if (job == nullptr) return job_queue().is_stopped() ? -1 : 0;
  *view = {job,
           job->operation.c_str(),
           job->inputs.size(),
           job->inputs.data(),
           job->outputs.size(),
           job->outputs.data(),
           job->dtypes.data(),
           job->dims.data()};
  return 1;
}

// Ends a job: with an error, unless `text` is null. Nothing may use its memory any more.
EXPORT void ronde_jax_end(Job* job, int code, const char* text) {
  end_job(job, code, text);
  delete job;
}

// Ends all jobs that nobody has taken, and all later ones, with an error.
EXPORT void ronde_jax_stop() { job_queue().stop(); }
