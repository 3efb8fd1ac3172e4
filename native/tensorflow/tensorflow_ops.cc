/* TensorFlow operations of ronde: kernels that are registered through TensorFlow's C API.
 *
 * The library is built without TensorFlow: it finds the functions of the C API in the framework library of the process
 * that loads it (tf.load_op_library), so one binary serves many versions. The functions of ronde's own data plane come
 * from Python as pointers (ronde_tf_connect). No kernel blocks a thread of TensorFlow.
 *
 * Operations (RondeAllreduce and its siblings). A kernel queues a job. One thread of Python takes it
 * (ronde_tf_take_job), starts the operation by its name, and finishes the kernel when it has ended.
 *
 * Buckets of gradients. RondeStartBucket submits the call of a bucket on the channel of its plan and passes on tensors
 * that are being written; RondeFinishBucket waits for the end of the call and passes on the result. The starts of a
 * step are chained in the graph, so buckets are submitted in one order on every rank, and a step that fails leaves no
 * kernel behind that waits for a bucket which never comes. Python is asked for the channel when there is none (in the
 * first step of a round) and for the error when a call has failed or was refused.
 *
 * Buckets carry no name of the step they belong to, so the steps of a plan have to run one after the other. Two that
 * run at once, in two threads of the program, are seen here and refused: nobody could say which of them another rank
 * has at this place.
 *
 * The C API calls an asynchronous kernel with `done`, the address of a std::function<void()> on the caller's stack. It
 * has to be copied if the kernel ends later. That this is so is seen by a self-test (ronde/tensorflow/self_test.py).
 */
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/job_queue.h"
#include "ronde.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using ronde_kernels::JobQueue;
using ronde_kernels::kForked;
using ronde_kernels::kStopped;

// --- TensorFlow's C API ----------------------------------------------------------------------------------------------

struct TF_Tensor;
struct TF_Status;
struct TF_OpKernelContext;
struct TF_OpKernelConstruction;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_Done;  // TF_AsyncOpKernelDoneCallback

using CreateFunction = void* (*)(TF_OpKernelConstruction*);
using ComputeFunction = void (*)(void*, TF_OpKernelContext*, TF_Done*);
using DeleteFunction = void (*)(void*);
using ShapeFunction = void (*)(TF_ShapeInferenceContext*, TF_Status*);

#define TENSORFLOW_FUNCTIONS(F)                                                                                      \
  F(TF_OpDefinitionBuilder*, TF_NewOpDefinitionBuilder, (const char*))                                               \
  F(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                                     \
  F(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                                    \
  F(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                                   \
  F(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                                      \
  F(void, TF_OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder*, ShapeFunction))                 \
  F(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                                            \
  F(TF_KernelBuilder*, TF_NewAsyncKernelBuilder,                                                                     \
    (const char*, const char*, CreateFunction, ComputeFunction, DeleteFunction))                                     \
  F(void, TF_RegisterKernelBuilder, (const char*, TF_KernelBuilder*, TF_Status*))                                    \
  F(void, TF_OpKernelConstruction_GetAttrSize,                                                                       \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                                         \
  F(void, TF_OpKernelConstruction_GetAttrString, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*)) \
  F(void, TF_OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))       \
  F(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                   \
  F(TF_Status*, TF_NewStatus, ())                                                                                    \
  F(void, TF_DeleteStatus, (TF_Status*))                                                                             \
  F(void, TF_SetStatus, (TF_Status*, int, const char*))                                                              \
  F(int, TF_GetCode, (const TF_Status*))                                                                             \
  F(const char*, TF_Message, (const TF_Status*))                                                                     \
  F(int, TF_NumInputs, (TF_OpKernelContext*))                                                                        \
  F(void, TF_GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                          \
  F(void, TF_SetOutput, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                                    \
  F(TF_Tensor*, TF_AllocateOutput, (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*))         \
  F(TF_Tensor*, TF_ForwardInputOrAllocateOutput,                                                                     \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                              \
  F(int, TF_ExpectedOutputDataType, (TF_OpKernelContext*, int))                                                      \
  F(void, TF_OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                                             \
  F(int, TF_TensorType, (const TF_Tensor*))                                                                          \
  F(int, TF_NumDims, (const TF_Tensor*))                                                                             \
  F(int64_t, TF_Dim, (const TF_Tensor*, int))                                                                        \
  F(void*, TF_TensorData, (const TF_Tensor*))                                                                        \
  F(size_t, TF_TensorByteSize, (const TF_Tensor*))                                                                   \
  F(size_t, TF_DataTypeSize, (int))                                                                                  \
  F(void, TF_DeleteTensor, (TF_Tensor*))                                                                             \
  F(TF_ShapeHandle*, TF_NewShapeHandle, ())                                                                          \
  F(void, TF_DeleteShapeHandle, (TF_ShapeHandle*))                                                                   \
  F(int64_t, TF_ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                                         \
  F(void, TF_ShapeInferenceContextGetInput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))           \
  F(void, TF_ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))          \
  F(TF_ShapeHandle*, TF_ShapeInferenceContextScalar, (TF_ShapeInferenceContext*))                                    \
  F(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))

#define DECLARE(returns, name, takes) returns(*name) takes = nullptr;
TENSORFLOW_FUNCTIONS(DECLARE)
#undef DECLARE

// TF_Code
constexpr int kUnknown = 2, kFailedPrecondition = 9, kInternal = 13;
constexpr int kInt64 = 9;  // TF_DataType

class Status {
 public:
  Status() : status_(TF_NewStatus()) {}
  ~Status() { TF_DeleteStatus(status_); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  operator TF_Status*() const { return status_; }
  bool ok() const { return TF_GetCode(status_) == 0; }

 private:
  TF_Status* status_;
};

// A counted reference to the memory of a tensor.
struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;
using Done = std::function<void()>;

Done copy_done(TF_Done* done) { return *reinterpret_cast<Done*>(done); }

// The element type of ronde for one of TensorFlow; -1 if there is none.
int ronde_dtype(int dtype) {
  switch (dtype) {
    case 1:
      return RD_FLOAT32;
    case 2:
      return RD_FLOAT64;
    case 3:
      return RD_INT32;
    case 4:
      return RD_UINT8;
    case 5:
      return RD_INT16;
    case 6:
      return RD_INT8;
    case 9:
      return RD_INT64;
    case 10:
      return RD_BOOL;
    case 14:
      return RD_BFLOAT16;
    case 17:
      return RD_UINT16;
    case 19:
      return RD_FLOAT16;
    case 22:
      return RD_UINT32;
    case 23:
      return RD_UINT64;
    default:
      return -1;
  }
}

int64_t count_of(const TF_Tensor* tensor) {
  int64_t count = 1;
  for (int i = 0; i < TF_NumDims(tensor); ++i) count *= TF_Dim(tensor, i);
  return count;
}

Tensor allocate_output(TF_OpKernelContext* context, int index, const std::vector<int64_t>& dims, const Status& status) {
  int dtype = TF_ExpectedOutputDataType(context, index);
  size_t bytes = TF_DataTypeSize(dtype);
  for (int64_t dim : dims) bytes *= static_cast<size_t>(dim);
  return Tensor(TF_AllocateOutput(context, index, dtype, dims.data(), static_cast<int>(dims.size()), bytes, status));
}

// --- ronde -----------------------------------------------------------------------------------------------------------

// Functions of libronde, from Python; the order is that of FUNCTIONS in ronde/tensorflow/op_library.py.
struct RondeFunctions {
  rd_status (*submit)(rd_channel*, const rd_call*, double, rd_callback, void*, rd_work**, rd_result*);
  void (*retain)(rd_channel*);
  void (*release)(rd_channel*);
  rd_status (*get_mismatch)(rd_channel*, rd_member_call*);
  rd_status (*reduce)(int32_t, int32_t, double, double, const void* const*, uint64_t, void* const*, uint64_t, uint64_t);
};
RondeFunctions ronde{};

std::atomic<bool> is_forked_child{false};

// What a node of the graph asks for: its attributes.
struct Operation {
  bool same_shape = false;  // whether outputs are like the inputs
  std::string text;         // what Python reads
  // Of a bucket only:
  std::string plan;
  int64_t bucket = 0;
  int64_t num_buckets = 1;
  int64_t count = 0;  // elements
  uint64_t signature = 0;
  std::string description;
  int64_t op = 0;
  double prescale = 1.0;
  double postscale = 1.0;
};
using OperationPointer = std::shared_ptr<const Operation>;

enum JobKind : int32_t {
  kRunOperation = 0,   // start the operation, and finish the kernel when it has ended
  kOpenPlan = 1,       // open the channel of a plan
  kExplainFailure = 2  // the call of a bucket has failed, or was refused: fail the kernel with the error
};

// Why a bucket was not submitted.
enum Refusal : int32_t {
  kNotRefused = 0,
  kOutOfTurn = 1,  // the buckets of the step before were not all started; or its round is over
  kAtOnce = 2      // another step of the plan is under way
};

// One execution of a kernel that Python takes part in. Python frees it.
struct Job {
  JobKind kind = kRunOperation;
  OperationPointer operation;
  std::mutex mutex;                       // guards context and done
  TF_OpKernelContext* context = nullptr;  // null when the kernel has ended
  Done done;
  std::vector<Tensor> inputs, outputs;  // without inputs whose memory is that of their output
  int dtype = -1;
  std::vector<int64_t> counts;  // elements of each input
  // As Python reads them.
  std::vector<const void*> input_data;
  std::vector<void*> output_data;
  std::vector<int64_t> dims;  // per input: how many, and then each
  // Of a call that has failed.
  rd_result result{};
  int64_t submitted_ns = 0;
  std::vector<rd_member_call> member_calls;
  Refusal refusal = kNotRefused;
};

// As JobView in ronde/tensorflow/op_library.py.
struct JobView {
  Job* job;
  int32_t kind;
  int32_t dtype;
  const char* operation;
  const char* plan;
  const char* description;
  uint64_t num_inputs;
  const void* const* inputs;
  uint64_t num_outputs;
  void* const* outputs;
  const int64_t* dims;
  int32_t status;
  int32_t member;
  int32_t detail;
  int32_t refusal;
  int64_t bucket;
  int64_t submitted_ns;
  int64_t end_ns;
  uint64_t num_member_calls;
  const rd_member_call* member_calls;
};

void fail_context(TF_OpKernelContext* context, int code, const char* text) {
  Status status;
  TF_SetStatus(status, code, text);
  TF_OpKernelContext_Failure(context, status);
}

// Ends the kernel of a job once, with an error unless `text` is null.
void end_kernel(Job* job, int code, const char* text) {
  Done done;
  {
    std::lock_guard<std::mutex> lock(job->mutex);
    if (job->context == nullptr) return;
    if (text != nullptr) fail_context(job->context, code, text);
    job->context = nullptr;
    done = std::move(job->done);
    job->done = nullptr;
    if (text == nullptr) {  // after an error, an operation that is still under way may use the memory
      job->inputs.clear();
      job->outputs.clear();
    }
  }
  done();
}

// Jobs for the thread of Python.
JobQueue<Job>& job_queue() {
  static auto* queue = new JobQueue<Job>([](Job* job) { end_kernel(job, kUnknown, kStopped); });
  return *queue;
}

// Reads an input of a kernel into a job.
void read_input(Job* job, int index, const Status& status) {
  TF_Tensor* tensor = nullptr;
  TF_GetInput(job->context, index, &tensor, status);
  if (!status.ok()) return;
  job->inputs.emplace_back(tensor);
  job->input_data.push_back(TF_TensorData(tensor));
  job->counts.push_back(count_of(tensor));
  job->dims.push_back(TF_NumDims(tensor));
  for (int d = 0; d < TF_NumDims(tensor); ++d) job->dims.push_back(TF_Dim(tensor, d));
  if (index == 0) job->dtype = ronde_dtype(TF_TensorType(tensor));
}

// Gives the kernel an output like an input that was read just now. It is the memory of the input, if nobody else uses
// that: the operation works in place then, which spares the pages of new memory.
void allocate_like_input(Job* job, int index, const Status& status) {
  std::vector<int64_t> dims(static_cast<size_t>(TF_NumDims(job->inputs.back().get())));
  for (size_t d = 0; d < dims.size(); ++d) dims[d] = TF_Dim(job->inputs.back().get(), static_cast<int>(d));
  Tensor input = std::move(job->inputs.back());
  input.reset();  // this reference would be somebody else's use; the kernel's own keeps the memory
  int forwarded = -1;
  Tensor output(TF_ForwardInputOrAllocateOutput(job->context, &index, 1, index, dims.data(),
                                                static_cast<int>(dims.size()), &forwarded, status));
  if (!status.ok()) return;
  job->output_data.push_back(TF_TensorData(output.get()));
  if (forwarded == index) {
    job->inputs.pop_back();
    job->input_data.back() = job->output_data.back();
  } else {
    TF_Tensor* again = nullptr;
    TF_GetInput(job->context, index, &again, status);
    job->inputs.back().reset(again);
  }
  job->outputs.push_back(std::move(output));
}

// A job for this execution of a kernel, or null if the kernel has failed.
std::unique_ptr<Job> make_job(void* kernel, TF_OpKernelContext* context, TF_Done* done, int num_unread) {
  Done copied = copy_done(done);
  if (is_forked_child) {
    fail_context(context, kFailedPrecondition, kForked);
    copied();
    return nullptr;
  }
  auto job = std::make_unique<Job>();
  job->operation = *static_cast<OperationPointer*>(kernel);
  job->context = context;
  Status status;
  int num_inputs = TF_NumInputs(context) - num_unread;
  for (int i = 0; i < num_inputs && status.ok(); ++i) {
    read_input(job.get(), i, status);
    if (status.ok() && job->operation->same_shape) allocate_like_input(job.get(), i, status);
  }
  if (!status.ok()) {
    TF_OpKernelContext_Failure(context, status);
    job.reset();
    copied();
    return nullptr;
  }
  job->done = std::move(copied);
  return job;
}

// --- buckets ---------------------------------------------------------------------------------------------------------

// One call of a bucket, from its submission until RondeFinishBucket has passed on the result.
struct BucketRun {
  std::mutex mutex;
  OperationPointer operation;
  bool has_ended = false;
  rd_result result{};
  int64_t submitted_ns = 0;
  std::vector<rd_member_call> member_calls;
  std::vector<Tensor> inputs, outputs;  // kept until the call has ended
  std::unique_ptr<Job> finish;          // the kernel that waits for the end
  rd_channel* channel = nullptr;
  uint32_t num_members = 0;
  int64_t num_bytes = 0;
  int64_t step = 0;           // of its plan, as BucketPlan counts them; 0 of a group of one member
  bool is_finishing = false;  // RondeFinishBucket has begun and not ended; guarded by the table's mutex
};

// What calls of buckets took, as ronde's metrics count it.
struct BucketCounts {
  int64_t calls = 0;
  int64_t bytes = 0;
  int64_t wait_ns = 0;
  int64_t move_ns = 0;
};

// A plan in this process: its channel, which bucket comes next, and whether a step of it is under way. When a step has
// ended, in whatever way, no kernel of it is left: so a kernel of another step than the last one is one of two that run
// at once.
struct BucketPlan {
  rd_channel* channel = nullptr;  // null until Python has opened it, and again when the round is over
  uint32_t num_members = 0;
  double timeout_s = 0.0;
  int32_t algorithm = 0;
  int64_t next_bucket = 0;
  int64_t step = 0;           // the number of the last step that has started a bucket; counts in all rounds
  int64_t num_finishing = 0;  // kernels RondeFinishBucket of that step that have begun and not ended
  int64_t refused_step = 0;   // the step that was under way when another one began; both fail
};

struct BucketTable {
  std::mutex mutex;
  std::map<std::string, BucketPlan> plans;
  std::map<std::string, BucketCounts> counts;          // by plan, of all rounds
  std::map<int64_t, std::shared_ptr<BucketRun>> runs;  // by number, which RondeStartBucket passes on
  int64_t next_number = 1;
};

BucketTable& bucket_table() {
  static BucketTable* table = new BucketTable;
  return *table;
}

constexpr int64_t kMaxRunsKept = 65536;  // of steps that were abandoned between start and finish

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The plan of a run, if that belongs to its last step; null if another step has begun since. The caller holds the
// table's mutex.
BucketPlan* find_plan(BucketTable& table, const BucketRun& run) {
  if (run.step == 0) return nullptr;
  auto found = table.plans.find(run.operation->plan);
  return found != table.plans.end() && found->second.step == run.step ? &found->second : nullptr;
}

// Ends the kernel RondeFinishBucket, when the call has ended.
void finish_bucket(std::unique_ptr<Job> finish, BucketRun* run) {
  {
    // Before the kernel ends: the next step may begin at once.
    BucketTable& table = bucket_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    BucketPlan* plan = find_plan(table, *run);
    if (run->is_finishing && plan != nullptr) --plan->num_finishing;
    run->is_finishing = false;
    if (plan != nullptr && plan->refused_step == run->step) finish->refusal = kAtOnce;
  }
  if (finish->refusal == kAtOnce) {
    finish->result.status = RD_BAD_CALL;
    finish->kind = kExplainFailure;
    finish->operation = run->operation;
    job_queue().put(std::move(finish));
    return;
  }
  if (run->result.status == RD_OK) {
    Status status;
    for (size_t i = 0; i < finish->inputs.size() && status.ok(); ++i)
      TF_SetOutput(finish->context, static_cast<int>(i), finish->inputs[i].get(), status);
    if (status.ok())
      end_kernel(finish.get(), 0, nullptr);
    else
      end_kernel(finish.get(), kInternal, TF_Message(status));
    return;
  }
  finish->kind = kExplainFailure;
  finish->operation = run->operation;
  finish->result = run->result;
  finish->submitted_ns = run->submitted_ns;
  finish->member_calls = run->member_calls;
  job_queue().put(std::move(finish));
}

// Called in the channel's thread when the call of a bucket has ended.
void on_call_end(void* context, const rd_result* result) {
  std::unique_ptr<std::shared_ptr<BucketRun>> owned(static_cast<std::shared_ptr<BucketRun>*>(context));
  std::shared_ptr<BucketRun> run = *owned;
  std::unique_ptr<Job> finish;
  {
    std::lock_guard<std::mutex> lock(run->mutex);
    if (result->status == RD_MISMATCH) {
      run->member_calls.resize(run->num_members);
      if (ronde.get_mismatch(run->channel, run->member_calls.data()) != RD_OK) run->member_calls.clear();
    }
    run->result = *result;
    run->has_ended = true;
    run->inputs.clear();
    run->outputs.clear();
    finish = std::move(run->finish);
  }
  if (result->status == RD_OK) {
    BucketTable& table = bucket_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    BucketCounts& counts = table.counts[run->operation->plan];
    counts.calls += 1;
    counts.bytes += run->num_bytes;
    counts.wait_ns += result->ready_ns - result->start_ns;
    counts.move_ns += result->end_ns - result->ready_ns;
  }
  if (finish) finish_bucket(std::move(finish), run.get());
}

// Passes on tensors that are being written, and the number of the run.
void pass_on(std::unique_ptr<Job> start, int64_t number) {
  Status status;
  Tensor token = allocate_output(start->context, static_cast<int>(start->input_data.size()), {}, status);
  if (!status.ok()) {
    end_kernel(start.get(), kInternal, TF_Message(status));
    return;
  }
  std::memcpy(TF_TensorData(token.get()), &number, sizeof number);
  token.reset();
  end_kernel(start.get(), 0, nullptr);
}

// Puts the start of a bucket into the queue for Python.
void ask_python(std::unique_ptr<Job> start, JobKind kind) {
  start->kind = kind;
  job_queue().put(std::move(start));
}

int64_t add_run(BucketTable& table, const std::shared_ptr<BucketRun>& run) {
  while (static_cast<int64_t>(table.runs.size()) >= kMaxRunsKept) table.runs.erase(table.runs.begin());
  table.runs[table.next_number] = run;
  return table.next_number++;
}

// Submits the call of a bucket on the plan's channel. The caller holds the table's mutex, so calls are submitted in the
// order in which they are counted.
rd_status submit_bucket(BucketTable& table, BucketPlan& plan, Job* start, int64_t* number) {
  const Operation& operation = *start->operation;
  auto run = std::make_shared<BucketRun>();
  run->operation = start->operation;
  run->step = plan.step;
  run->channel = plan.channel;
  run->num_members = plan.num_members;
  run->submitted_ns = start->submitted_ns = now_ns();
  std::vector<rd_span> spans(start->input_data.size());
  for (size_t i = 0; i < spans.size(); ++i)
    spans[i] = {start->input_data[i], start->output_data[i], static_cast<uint64_t>(start->counts[i])};
  for (const Tensor& output : start->outputs) run->num_bytes += static_cast<int64_t>(TF_TensorByteSize(output.get()));
  // The run keeps the memory: the call may end before this function returns, and the kernel may be gone before the
  // call.
  run->inputs = std::move(start->inputs);
  run->outputs = std::move(start->outputs);
  rd_call call{};
  call.kind = RD_ALLREDUCE;
  call.dtype = start->dtype;
  call.op = static_cast<int32_t>(operation.op);
  call.algorithm = plan.algorithm;
  call.flags = operation.bucket + 1 < operation.num_buckets ? RD_OVERLAPPED : 0;  // the rest of the backward pass
  call.peer = -1;
  call.prescale = operation.prescale;
  call.postscale = operation.postscale;
  call.signature = operation.signature;
  call.description = operation.description.c_str();
  call.spans = spans.data();
  call.num_spans = spans.size();
  auto* context = new std::shared_ptr<BucketRun>(run);
  rd_status status = ronde.submit(plan.channel, &call, plan.timeout_s, on_call_end, context, nullptr, &start->result);
  if (status != RD_OK) {
    delete context;
    start->inputs = std::move(run->inputs);
    start->outputs = std::move(run->outputs);
    start->result.status = status;
    return status;
  }
  *number = add_run(table, run);
  return RD_OK;
}

// Lets a plan begin with its first bucket, on another channel or on none. The caller holds the table's mutex.
void reset_plan(BucketPlan& plan, rd_channel* channel) {
  if (channel != nullptr) ronde.retain(channel);
  if (plan.channel != nullptr) ronde.release(plan.channel);
  plan.channel = channel;
  plan.next_bucket = 0;
}

void start_bucket(std::unique_ptr<Job> start) {
  const Operation& operation = *start->operation;
  int64_t number = 0, count = 0;
  for (int64_t each : start->counts) count += each;
  if (count != operation.count) {
    char text[256];
    std::snprintf(text, sizeof text, "a bucket was planned with %lld elements, and its gradients have %lld",
                  static_cast<long long>(operation.count), static_cast<long long>(count));
    end_kernel(start.get(), kFailedPrecondition, text);
    return;
  }
  JobKind question = kExplainFailure;
  {
    BucketTable& table = bucket_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    BucketPlan& plan = table.plans[operation.plan];
    if (operation.bucket == 0 && plan.num_finishing > 0) {
      start->refusal = kAtOnce;
      plan.refused_step = plan.step;
    } else if (plan.channel == nullptr) {
      question = kOpenPlan;
    } else if (operation.bucket != plan.next_bucket) {
      start->refusal = kOutOfTurn;
    } else {
      if (operation.bucket == 0) ++plan.step;
      if (submit_bucket(table, plan, start.get(), &number) == RD_OK) {
        plan.next_bucket = (plan.next_bucket + 1) % operation.num_buckets;
      } else if (start->result.status == RD_CLOSED) {  // the round is over, and there may be another one
        reset_plan(plan, nullptr);
        question = kOpenPlan;
      }
    }
    if (start->refusal != kNotRefused) start->result.status = RD_BAD_CALL;
  }
  if (number == 0)
    ask_python(std::move(start), question);
  else
    pass_on(std::move(start), number);
}

// A bucket of the only member of a group: its mean and its sum are its own numbers.
void run_alone(std::unique_ptr<Job> start) {
  const Operation& operation = *start->operation;
  for (size_t i = 0; i < start->input_data.size(); ++i) {
    const void* input = start->input_data[i];
    void* output = start->output_data[i];
    uint64_t count = static_cast<uint64_t>(start->counts[i]);
    if (count > 0)
      ronde.reduce(start->dtype, RD_SUM, operation.prescale, operation.postscale, &input, 1, &output, 1, count);
  }
  int64_t number;
  {
    BucketTable& table = bucket_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    auto run = std::make_shared<BucketRun>();
    run->has_ended = true;
    number = add_run(table, run);
  }
  pass_on(std::move(start), number);
}

// --- kernels ---------------------------------------------------------------------------------------------------------

// Reads an attribute; returns an empty string and fails the construction if it is missing.
std::string string_attribute(TF_OpKernelConstruction* construction, const char* name) {
  Status status;
  int32_t list_size = 0, total_size = 0;
  TF_OpKernelConstruction_GetAttrSize(construction, name, &list_size, &total_size, status);
  std::string text(static_cast<size_t>(total_size > 0 ? total_size : 0), '\0');
  if (status.ok()) TF_OpKernelConstruction_GetAttrString(construction, name, text.data(), text.size(), status);
  if (!status.ok()) TF_OpKernelConstruction_Failure(construction, status);
  return text;
}

int64_t int_attribute(TF_OpKernelConstruction* construction, const char* name) {
  Status status;
  int64_t value = 0;
  TF_OpKernelConstruction_GetAttrInt64(construction, name, &value, status);
  if (!status.ok()) TF_OpKernelConstruction_Failure(construction, status);
  return value;
}

std::shared_ptr<Operation> read_operation(TF_OpKernelConstruction* construction) {
  auto operation = std::make_shared<Operation>();
  operation->text = string_attribute(construction, "operation");
  return operation;
}

void* create_same_shape(TF_OpKernelConstruction* construction) {
  auto operation = read_operation(construction);
  operation->same_shape = true;
  return new OperationPointer(operation);
}

void* create_other_shape(TF_OpKernelConstruction* construction) {
  return new OperationPointer(read_operation(construction));
}

void* create_bucket(TF_OpKernelConstruction* construction) {
  auto operation = read_operation(construction);
  operation->same_shape = true;
  operation->plan = string_attribute(construction, "plan");
  operation->bucket = int_attribute(construction, "bucket");
  operation->num_buckets = int_attribute(construction, "num_buckets");
  operation->count = int_attribute(construction, "count");
  operation->signature = static_cast<uint64_t>(int_attribute(construction, "signature"));
  operation->description = string_attribute(construction, "description");
  operation->op = int_attribute(construction, "op");
  // As text: TensorFlow's attributes have 32 bits.
  std::string scales = string_attribute(construction, "scales");
  char* rest = nullptr;
  operation->prescale = std::strtod(scales.c_str(), &rest);
  operation->postscale = std::strtod(rest, nullptr);
  if (operation->num_buckets < 1) operation->num_buckets = 1;
  return new OperationPointer(operation);
}

void* create_finish(TF_OpKernelConstruction*) { return new OperationPointer(std::make_shared<Operation>()); }

void delete_operation(void* kernel) { delete static_cast<OperationPointer*>(kernel); }

void compute_operation(void* kernel, TF_OpKernelContext* context, TF_Done* done) {
  std::unique_ptr<Job> job = make_job(kernel, context, done, 0);
  if (job) job_queue().put(std::move(job));
}

void compute_start_bucket(void* kernel, TF_OpKernelContext* context, TF_Done* done) {
  std::unique_ptr<Job> job = make_job(kernel, context, done, 0);
  if (job) start_bucket(std::move(job));
}

void compute_finish_bucket(void* kernel, TF_OpKernelContext* context, TF_Done* done) {
  std::unique_ptr<Job> job = make_job(kernel, context, done, 1);  // the last input is the number of the run
  if (!job) return;
  Status status;
  TF_Tensor* given = nullptr;
  TF_GetInput(context, TF_NumInputs(context) - 1, &given, status);
  Tensor token(given);
  int64_t number = 0;
  if (status.ok()) std::memcpy(&number, TF_TensorData(token.get()), sizeof number);
  std::shared_ptr<BucketRun> run;
  bool is_at_once = false;
  {
    BucketTable& table = bucket_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    auto found = table.runs.find(number);
    if (found != table.runs.end()) {
      run = std::move(found->second);
      table.runs.erase(found);
      BucketPlan* plan = find_plan(table, *run);
      is_at_once = run->step != 0 && plan == nullptr;
      if (plan != nullptr) {
        ++plan->num_finishing;
        run->is_finishing = true;
      } else if (is_at_once) {
        BucketPlan& other = table.plans[run->operation->plan];
        other.refused_step = other.step;
      }
    }
  }
  if (!run) {
    end_kernel(job.get(), kInternal, "no bucket was started under this number");
    return;
  }
  if (is_at_once) {
    job->operation = run->operation;
    job->refusal = kAtOnce;
    job->result.status = RD_BAD_CALL;
    ask_python(std::move(job), kExplainFailure);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(run->mutex);
    if (!run->has_ended) {
      run->finish = std::move(job);
      return;
    }
  }
  finish_bucket(std::move(job), run.get());
}

// --- shapes ----------------------------------------------------------------------------------------------------------

// The first `num_same` outputs are like the inputs.
void set_like_inputs(TF_ShapeInferenceContext* context, int64_t num_same, TF_Status* status) {
  for (int i = 0; i < num_same; ++i) {
    TF_ShapeHandle* handle = TF_NewShapeHandle();
    TF_ShapeInferenceContextGetInput(context, i, handle, status);
    if (TF_GetCode(status) == 0) TF_ShapeInferenceContextSetOutput(context, i, handle, status);
    TF_DeleteShapeHandle(handle);
    if (TF_GetCode(status) != 0) return;
  }
}

void set_scalar(TF_ShapeInferenceContext* context, int index, TF_Status* status) {
  TF_ShapeHandle* handle = TF_ShapeInferenceContextScalar(context);
  TF_ShapeInferenceContextSetOutput(context, index, handle, status);
  TF_DeleteShapeHandle(handle);
}

void infer_same(TF_ShapeInferenceContext* context, TF_Status* status) {
  set_like_inputs(context, TF_ShapeInferenceContextNumInputs(context), status);
}

void infer_start(TF_ShapeInferenceContext* context, TF_Status* status) {
  int64_t num_inputs = TF_ShapeInferenceContextNumInputs(context);
  set_like_inputs(context, num_inputs, status);
  if (TF_GetCode(status) == 0) set_scalar(context, static_cast<int>(num_inputs), status);
}

void infer_finish(TF_ShapeInferenceContext* context, TF_Status* status) {
  set_like_inputs(context, TF_ShapeInferenceContextNumInputs(context) - 1, status);
}

void infer_scalar(TF_ShapeInferenceContext* context, TF_Status* status) { set_scalar(context, 0, status); }

void infer_unknown(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

void infer_nothing(TF_ShapeInferenceContext*, TF_Status*) {}

// --- registration ----------------------------------------------------------------------------------------------------

constexpr const char* kTypes =
    "T: {uint8, int8, uint16, int16, uint32, int32, uint64, int64, half, bfloat16, float, double, bool}";

struct OpDeclaration {
  const char* name;
  std::vector<const char*> attributes, inputs, outputs;
  ShapeFunction infer;
  CreateFunction create;
  ComputeFunction compute;
};

std::string registration_error;

bool register_op(const OpDeclaration& declaration) {
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(declaration.name);
  for (const char* attribute : declaration.attributes) TF_OpDefinitionBuilderAddAttr(builder, attribute);
  for (const char* input : declaration.inputs) TF_OpDefinitionBuilderAddInput(builder, input);
  for (const char* output : declaration.outputs) TF_OpDefinitionBuilderAddOutput(builder, output);
  TF_OpDefinitionBuilderSetIsStateful(builder, true);  // never left away, merged or computed in advance
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, declaration.infer);
  Status status;
  TF_RegisterOpDefinition(builder, status);
  if (status.ok()) {
    TF_KernelBuilder* kernel =
        TF_NewAsyncKernelBuilder(declaration.name, "CPU", declaration.create, declaration.compute, delete_operation);
    TF_RegisterKernelBuilder(declaration.name, kernel, status);
  }
  if (!status.ok()) registration_error = std::string(declaration.name) + ": " + TF_Message(status);
  return status.ok();
}

bool find_functions() {
  void* framework = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (framework == nullptr) {
    registration_error = "libtensorflow_framework.so.2 is not loaded";
    return false;
  }
#define FIND(returns, name, takes)                                    \
  name = reinterpret_cast<returns(*) takes>(dlsym(framework, #name)); \
  if (name == nullptr) {                                              \
    registration_error = "TensorFlow has no function " #name;         \
    return false;                                                     \
  }
  TENSORFLOW_FUNCTIONS(FIND)
#undef FIND
  return true;
}

// Runs when the library is loaded: only what is registered by then gets a function in Python (tf.load_op_library).
__attribute__((constructor)) void register_all() {
  pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });
  if (!find_functions()) return;
  constexpr const char* kOperation = "operation: string";
  constexpr const char* kNumber = "N: int >= 1";
  const std::vector<OpDeclaration> declarations = {
      {"RondeAllreduce",
       {kTypes, kNumber, kOperation},
       {"inputs: N * T"},
       {"outputs: N * T"},
       infer_same,
       create_same_shape,
       compute_operation},
      {"RondeBroadcast",
       {kTypes, kNumber, kOperation},
       {"inputs: N * T"},
       {"outputs: N * T"},
       infer_same,
       create_same_shape,
       compute_operation},
      {"RondeAllgather",
       {kTypes, kOperation},
       {"input: T"},
       {"output: T"},
       infer_unknown,
       create_other_shape,
       compute_operation},
      {"RondeReduceScatter",
       {kTypes, kOperation},
       {"input: T"},
       {"output: T"},
       infer_unknown,
       create_other_shape,
       compute_operation},
      {"RondeAlltoall",
       {kTypes, kOperation},
       {"input: T", "splits: int64"},
       {"output: T", "received: int64"},
       infer_unknown,
       create_other_shape,
       compute_operation},
      {"RondeBarrier", {kOperation}, {}, {}, infer_nothing, create_other_shape, compute_operation},
      {"RondeNumber", {kOperation}, {}, {"number: int32"}, infer_scalar, create_other_shape, compute_operation},
      {"RondeStartBucket",
       {kTypes, kNumber, kOperation, "plan: string", "bucket: int", "num_buckets: int", "count: int", "signature: int",
        "description: string", "op: int", "scales: string"},
       {"inputs: N * T"},
       {"outputs: N * T", "run: int64"},
       infer_start,
       create_bucket,
       compute_start_bucket},
      {"RondeFinishBucket",
       {kTypes, kNumber},
       {"inputs: N * T", "run: int64"},
       {"outputs: N * T"},
       infer_finish,
       create_finish,
       compute_finish_bucket},
  };
  for (const OpDeclaration& declaration : declarations)
    if (!register_op(declaration)) return;
}

}  // namespace

// --- for Python: ronde/tensorflow/op_library.py ----------------------------------------------------------------------

// Why the operations are not registered; empty if they are.
EXPORT const char* ronde_tf_error() { return registration_error.c_str(); }

// The functions of libronde. Called once, before the first kernel runs.
EXPORT void ronde_tf_connect(const RondeFunctions* functions) { ronde = *functions; }

// Waits for the next job. Returns 1, 0 after timeout_s, -1 when ronde_tf_stop was called.
EXPORT int ronde_tf_take_job(JobView* view, double timeout_s) {
  Job* job = job_queue().take(timeout_s);
  if (job == nullptr) return job_queue().is_stopped() ? -1 : 0;
  const Operation& operation = *job->operation;
  *view = {job,
           job->kind,
           job->dtype,
           operation.text.c_str(),
           operation.plan.c_str(),
           operation.description.c_str(),
           job->input_data.size(),
           job->input_data.data(),
           job->output_data.size(),
           job->output_data.data(),
           job->dims.data(),
           job->result.status,
           job->result.member,
           job->result.detail,
           job->refusal,
           operation.bucket,
           job->submitted_ns,
           job->result.end_ns,
           job->member_calls.size(),
           job->member_calls.data()};
  return 1;
}

// Allocates an output and returns 1 and its memory; 0 if the kernel has ended or the memory cannot be had (then the
// kernel has failed).
EXPORT int ronde_tf_allocate_output(Job* job, int index, const int64_t* dims, int num_dims, void** data) {
  std::string problem;
  {
    std::lock_guard<std::mutex> lock(job->mutex);
    if (job->context == nullptr) return 0;
    Status status;
    Tensor output = allocate_output(job->context, index, std::vector<int64_t>(dims, dims + num_dims), status);
    if (status.ok()) {
      *data = TF_TensorData(output.get());
      job->outputs.push_back(std::move(output));
      return 1;
    }
    problem = TF_Message(status);
  }
  end_kernel(job, kInternal, problem.c_str());
  return 0;
}

// Ends the kernel well.
EXPORT void ronde_tf_finish(Job* job) { end_kernel(job, 0, nullptr); }

// Ends the kernel with an error, if it has not ended. The job keeps its memory until it is freed.
EXPORT void ronde_tf_fail(Job* job, int code, const char* text) { end_kernel(job, code, text); }

// Frees a job whose kernel has ended, and whose memory nothing uses any more.
EXPORT void ronde_tf_free_job(Job* job) { delete job; }

// The channel of the plan that a job has asked for; null if its group has one member. Starts the bucket and frees the
// job.
EXPORT void ronde_tf_start_on(Job* job, rd_channel* channel, uint32_t num_members, double timeout_s,
                              int32_t algorithm) {
  std::unique_ptr<Job> start(job);
  if (channel == nullptr) {
    run_alone(std::move(start));
    return;
  }
  {
    BucketTable& table = bucket_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    BucketPlan& plan = table.plans[start->operation->plan];
    if (plan.channel != channel) {
      reset_plan(plan, channel);
      plan.num_members = num_members;
      plan.timeout_s = timeout_s;
      plan.algorithm = algorithm;
    }
    start->refusal = kNotRefused;
    start->result = rd_result{};
  }
  start_bucket(std::move(start));
}

// How many calls the plan's buckets have had so far, their bytes, and the nanoseconds of waiting and moving.
EXPORT void ronde_tf_get_counts(const char* name, int64_t* counts) {
  BucketTable& table = bucket_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  const BucketCounts& found = table.counts[name];
  counts[0] = found.calls;
  counts[1] = found.bytes;
  counts[2] = found.wait_ns;
  counts[3] = found.move_ns;
}

// Ends the kernels of all jobs that nobody has taken, and of all later ones, with an error.
EXPORT void ronde_tf_stop() { job_queue().stop(); }
