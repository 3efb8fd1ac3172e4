/* Operations of ronde in MXNet's engine.
 *
 * The library is built without MXNet: it finds the functions of its C API in the libmxnet.so that Python has loaded
 * (ronde_mx_connect).
 *
 * An operation is pushed to the engine with the arrays that it reads and writes (ronde_mx_push). The engine calls
 * run_operation() when nothing else uses them any more. That looks up where the arrays lie, keeps the engine's callback
 * and leaves a job for a thread of Python; it never waits and never enters Python. Until the callback is called
 * (ronde_mx_finish, ronde_mx_fail) the engine lets nobody else touch the arrays, and frees none of them.
 *
 * The engine owns an operation, and deletes it when its callback was called. If an array that an operation reads holds
 * an error, or the process is ending, the engine calls the callback itself and never run_operation(). Python has to
 * know, because other ranks wait for this one: the deleter leaves a job for such an operation.
 *
 * What this file assumes of MXNet 1.9 beyond its C API is checked by a self-test (ronde/mxnet/self_test.py):
 *   - `on_complete` points to three pointers on the caller's stack: a function, and its first two arguments. The third
 *     one is a const dmlc::Error*, which is a std::runtime_error, or null;
 *   - an NDArray begins with the pointer to its chunk, which arrays that share memory share;
 *   - chunks in the layout of oneDNN are told apart and brought back by two exported methods of NDArray::Chunk.
 */
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "kernels/job_queue.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using ronde_kernels::JobQueue;
using ronde_kernels::kForked;
using ronde_kernels::kStopped;

// --- MXNet -----------------------------------------------------------------------------------------------------------

using ArrayHandle = void*;
struct Context {
  int32_t device_type;
  int32_t device_id;
};
constexpr Context kCpu{1, 0};
// FnProperty::kCPUPrioritized: threads of their own, which start what has the highest priority.
constexpr int kCpuPrioritized = 3;

// mxnet::engine::CallbackOnComplete
struct OnComplete {
  void (*function)(void* engine, void* block, const std::runtime_error* error);
  void* engine;
  void* block;

  void operator()(const std::runtime_error* error) const { function(engine, block, error); }
};

// Of the layout of dmlc::Error. MXNet copies it as one of those.
struct EngineError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using RunFunction = void (*)(void* run_context, void* on_complete, void* operation);
using DeleteFunction = void (*)(void* operation);

struct EngineFunctions {
  int (*push)(RunFunction, void*, DeleteFunction, const void* context, ArrayHandle* read, int num_read,
              ArrayHandle* written, int num_written, const void* property, int priority, const char* name, bool wait);
  int (*copy_handle)(ArrayHandle, ArrayHandle*);
  int (*free_handle)(ArrayHandle);
  int (*get_data)(ArrayHandle, void**);
  const char* (*last_error)();
  // Null in a build without oneDNN.
  bool (*has_own_layout)(const void* chunk);
  void (*restore_layout)(void* chunk);
};
EngineFunctions mxnet{};

void* chunk_of(ArrayHandle array) { return *static_cast<void**>(array); }

// --- operations ------------------------------------------------------------------------------------------------------

std::atomic<bool> is_forked_child{false};
struct Operation {
  int64_t number = 0;  // by which Python knows it
  int priority = 0;
  std::vector<ArrayHandle> arrays;  // handles of our own: first those that are only read
  size_t num_read = 0;
  std::vector<uint8_t> is_empty;  // by array: whether it has no elements, and so perhaps no memory
  std::vector<void*> data;        // by array, when it runs
  OnComplete on_complete{};
  bool has_run = false;

  ~Operation() {
    for (ArrayHandle each : arrays) mxnet.free_handle(each);
  }
};

enum JobKind : int32_t {
  kReady = 0,    // its arrays are there: start it, and finish or fail it at its end
  kSkipped = 1,  // the engine has ended it with an error of an array that it reads
  kFailed = 2    // its arrays cannot be used, as `problem` says: fail it
};

// What Python is told of an operation.
struct Job {
  JobKind kind;
  int64_t number;
  Operation* operation;  // null if it is skipped
  std::string problem;
};

// Calls the engine's callback, after which the operation does not exist any more.
void end_operation(Operation* operation, const char* problem) {
  OnComplete on_complete = operation->on_complete;
  if (problem == nullptr) {
    on_complete(nullptr);
    return;
  }
  // Never empty: MXNet's own C++ library may have another empty string.
  EngineError error(*problem != '\0' ? problem : "an operation of ronde has failed");
  on_complete(&error);
}

void end_untaken(Job* job) {
  if (job->operation != nullptr) end_operation(job->operation, kStopped);
}

// Never destroyed: operations may run while the process ends.
JobQueue<Job>& job_queue() {
  static auto* queue = new JobQueue<Job>(end_untaken);
  return *queue;
}

// Finds out where the arrays lie. Returns what is wrong; empty if nothing is.
std::string find_data(Operation* operation) {
  operation->data.assign(operation->arrays.size(), nullptr);
  for (size_t i = 0; i < operation->arrays.size(); ++i) {
    if (operation->is_empty[i]) continue;
    ArrayHandle array = operation->arrays[i];
    // MXNDArrayGetData would push an operation that brings it back, and wait for it: for ever, because this one has
    // the array.
    if (mxnet.has_own_layout != nullptr && mxnet.has_own_layout(chunk_of(array))) {
      if (i < operation->num_read) return "an array has the layout of oneDNN, and another operation may be reading it";
      mxnet.restore_layout(chunk_of(array));
    }
    if (mxnet.get_data(array, &operation->data[i]) != 0) return mxnet.last_error();
  }
  return "";
}

// Called in a thread of the engine.
void run_operation(void*, void* on_complete, void* given) {
  auto* operation = static_cast<Operation*>(given);
  operation->on_complete = *static_cast<OnComplete*>(on_complete);
  operation->has_run = true;
  if (is_forked_child) {
    end_operation(operation, kForked);
    return;
  }
  std::string problem;
  try {
    problem = find_data(operation);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  auto job =
      std::make_unique<Job>(Job{problem.empty() ? kReady : kFailed, operation->number, operation, std::move(problem)});
  job_queue().put(std::move(job), operation->priority);
}

// Called when the engine does not need the operation any more.
void delete_operation(void* given) {
  std::unique_ptr<Operation> operation(static_cast<Operation*>(given));
  if (operation->has_run || is_forked_child) return;
  job_queue().put(std::make_unique<Job>(Job{kSkipped, operation->number, nullptr, ""}), operation->priority);
}

}  // namespace

// --- for Python: ronde/mxnet/engine_library.py -----------------------------------------------------------------------

// As EngineJobView in ronde/mxnet/engine_library.py.
struct EngineJobView {
  void* operation;
  int64_t number;
  int32_t kind;
  int32_t num_arrays;
  void* const* data;
  const char* problem;
};

// Finds MXNet's functions in the library that the process has loaded from this path. Returns what is missing; null if
// nothing is.
EXPORT const char* ronde_mx_connect(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "libmxnet.so is not loaded";
  auto find = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  EngineFunctions found{};
  if (!find(found.push, "MXEnginePushAsyncND")) return "MXNet has no function MXEnginePushAsyncND";
  if (!find(found.copy_handle, "MXShallowCopyNDArray")) return "MXNet has no function MXShallowCopyNDArray";
  if (!find(found.free_handle, "MXNDArrayFree")) return "MXNet has no function MXNDArrayFree";
  if (!find(found.get_data, "MXNDArrayGetData")) return "MXNet has no function MXNDArrayGetData";
  if (!find(found.last_error, "MXGetLastError")) return "MXNet has no function MXGetLastError";
  bool has_test = find(found.has_own_layout, "_ZNK5mxnet7NDArray5Chunk8IsMKLDNNEv");
  bool has_change = find(found.restore_layout, "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv");
  if (has_test != has_change) return "MXNet has only one of the methods IsMKLDNN and Reorder2Default of NDArray::Chunk";
  if (mxnet.push == nullptr) pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });
  mxnet = found;
  return nullptr;
}

// Pushes an operation to the engine. Arrays that are read and written are given as written only. Returns 0, or -1 when
// MXNet refuses: MXGetLastError() says why.
EXPORT int ronde_mx_push(int64_t number, const ArrayHandle* arrays, const uint8_t* is_empty, uint64_t num_read,
                         uint64_t num_arrays, int priority, const char* name) {
  auto operation = std::make_unique<Operation>();
  operation->number = number;
  operation->priority = priority;
  operation->num_read = static_cast<size_t>(num_read);
  operation->is_empty.assign(is_empty, is_empty + num_arrays);
  for (uint64_t i = 0; i < num_arrays; ++i) {
    ArrayHandle copy = nullptr;
    if (mxnet.copy_handle(arrays[i], &copy) != 0) return -1;
    operation->arrays.push_back(copy);
  }
  // An operation that named one chunk twice would wait for itself.
  std::unordered_set<void*> chunks;
  std::vector<ArrayHandle> read, written;
  for (size_t i = operation->num_read; i < operation->arrays.size(); ++i)
    if (chunks.insert(chunk_of(operation->arrays[i])).second) written.push_back(operation->arrays[i]);
  for (size_t i = 0; i < operation->num_read; ++i)
    if (chunks.insert(chunk_of(operation->arrays[i])).second) read.push_back(operation->arrays[i]);
  int property = kCpuPrioritized;
  Operation* given = operation.release();  // the engine's from now on, also if it refuses it
  return mxnet.push(run_operation, given, delete_operation, &kCpu, read.data(), static_cast<int>(read.size()),
                    written.data(), static_cast<int>(written.size()), &property, priority, name, false);
}

// Pushes an operation that fails at once, for the test whether the engine keeps errors: NaiveEngine does not.
EXPORT int ronde_mx_push_failure(ArrayHandle written) {
  int property = kCpuPrioritized;
  auto fail = [](void*, void* on_complete, void*) {
    EngineError error("this operation was meant to fail");
    (*static_cast<OnComplete*>(on_complete))(&error);
  };
  return mxnet.push(fail, nullptr, nullptr, &kCpu, nullptr, 0, &written, 1, &property, 0, "ronde_test", false);
}

// Waits for the next job and returns it, with a view that is valid until ronde_mx_free_job; null after timeout_s, or
// when ronde_mx_stop was called, which `is_stopped` tells.
EXPORT void* ronde_mx_take_job(EngineJobView* view, double timeout_s, int32_t* is_stopped) {
  std::unique_ptr<Job> job(job_queue().take(timeout_s));
  *is_stopped = job == nullptr && job_queue().is_stopped() ? 1 : 0;
  if (job == nullptr) return nullptr;
  Operation* operation = job->operation;
  *view = {operation,
           job->number,
           job->kind,
           operation == nullptr ? 0 : static_cast<int32_t>(operation->data.size()),
           operation == nullptr ? nullptr : operation->data.data(),
           job->problem.c_str()};
  return job.release();
}

EXPORT void ronde_mx_free_job(void* job) { delete static_cast<Job*>(job); }

// Ends an operation well: the engine goes on with what waits for its arrays. Once per operation.
EXPORT void ronde_mx_finish(void* operation) { end_operation(static_cast<Operation*>(operation), nullptr); }

// Ends an operation with an error, which whoever waits for one of its arrays gets. Once per operation.
EXPORT void ronde_mx_fail(void* operation, const char* problem) {
  end_operation(static_cast<Operation*>(operation), problem);
}

// Ends the operations of all jobs that nobody has taken, and of all later ones, with an error.
EXPORT void ronde_mx_stop() { job_queue().stop(); }
