/* What ronde would do too slowly in Python: the shortest way from ronde.allreduce(array) to rd_run(), and the hooks of
 * gradients. It is a Python extension in the stable ABI, so that one file serves every CPython from 3.11 on. Where it
 * cannot be imported, ronde calls the library through ctypes, and counts gradients in Python.
 *
 * An AllreduceCache belongs to one channel. It holds the calls that were made before, by element type, shape and
 * options, and runs such a call again: nothing is checked twice, and no Python object is made. What it does not hold,
 * or what needs more than that, it leaves to its caller.
 *
 * A ReadyCounter belongs to the gradients of one reducer (ronde/training/gradients/ready_counter.py has the same class
 * in Python). Its hooks are called by the ML library for every gradient, and call Python only when there is something
 * to do.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ronde.h"

#define MAX_DIMENSIONS 8
#define MAX_FORMAT_BYTES 4
#define NUM_SLOTS 512 /* of the hash table; a power of two */
#define MAX_ENTRIES (NUM_SLOTS / 2)

typedef rd_status (*run_function)(rd_channel*, const rd_call*, rd_result*, double);

/* A call that was made before. */
typedef struct {
  PyObject* op; /* what the caller passed, such as "sum", compared by identity; null in a free slot */
  double prescale, postscale;
  char format[MAX_FORMAT_BYTES]; /* of the buffer protocol */
  int num_dimensions;
  Py_ssize_t shape[MAX_DIMENSIONS];
  uint64_t count;
  rd_call call;          /* complete but for its span */
  PyObject* description; /* bytes, which own call.description */
} cached_call;

typedef struct {
  PyObject ob_base;
  run_function run;
  rd_channel* channel;
  int algorithm;
  double timeout_s;
  PyObject *array_type, *empty_like, *this_thread, *recorder, *running_calls, *next_sequence, *sampler, *on_failure;
  long long next_sampled, long_wait_ns; /* what the sampler had when it was asked last */
  long long num_operations, num_bytes, wait_ns, move_ns;
  size_t num_calls;
  cached_call* calls; /* NUM_SLOTS; null when closed */
} allreduce_cache;

static PyObject *operation_name, *tracing_name, *next_sequence_name, *long_wait_ns_name, *allreduce_text, *empty_text;

static cached_call* find_call(const allreduce_cache* self, const Py_buffer* view, const PyObject* op, double prescale,
                              double postscale) {
  uint64_t hash = (uint64_t)(uintptr_t)op;
  for (int i = 0; i < view->ndim; ++i) hash = (hash ^ (uint64_t)view->shape[i]) * 0x9E3779B97F4A7C15u;
  size_t slot = (size_t)((hash ^ (uint8_t)view->format[0]) * 0x9E3779B97F4A7C15u >> 32) & (NUM_SLOTS - 1);
  while (1) {
    cached_call* call = &self->calls[slot];
    if (call->op == NULL) return call;
    if (call->op == op && call->num_dimensions == view->ndim && call->prescale == prescale &&
        call->postscale == postscale && strcmp(call->format, view->format) == 0 &&
        memcmp(call->shape, view->shape, (size_t)view->ndim * sizeof *view->shape) == 0)
      return call;
    slot = (slot + 1) & (NUM_SLOTS - 1); /* at least half of the slots are free */
  }
}

static void clear_calls(allreduce_cache* self) {
  for (size_t slot = 0; slot < NUM_SLOTS; ++slot) {
    cached_call* call = &self->calls[slot];
    PyObject *op = call->op, *description = call->description;
    call->op = call->description = NULL;
    Py_XDECREF(op);
    Py_XDECREF(description);
  }
  self->num_calls = 0;
}

static void forget_calls(allreduce_cache* self) {
  if (self->calls == NULL) return;
  clear_calls(self);
  free(self->calls);
  self->calls = NULL;
}

/* Returns 0 when the attribute is no whole number, with an exception. */
static int read_attribute(PyObject* object, PyObject* name, long long* value) {
  PyObject* attribute = PyObject_GetAttr(object, name);
  if (attribute == NULL) return 0;
  *value = PyLong_AsLongLong(attribute);
  Py_DECREF(attribute);
  return *value != -1 || !PyErr_Occurred();
}

static int read_sampler(allreduce_cache* self) {
  return read_attribute(self->sampler, next_sequence_name, &self->next_sampled) &&
         read_attribute(self->sampler, long_wait_ns_name, &self->long_wait_ns);
}

/* Whether the attribute is there and false: False, or an empty text. */
static int is_false(PyObject* object, PyObject* name) {
  PyObject* attribute = PyObject_GetAttr(object, name);
  int truth = attribute == NULL ? -1 : PyObject_IsTrue(attribute);
  if (truth < 0) PyErr_Clear();
  Py_XDECREF(attribute);
  return truth == 0;
}

/* Counts a call that succeeded. Returns 0 with an exception when the sampler raised one. */
static int record(allreduce_cache* self, long long sequence, uint64_t num_bytes, const rd_result* result) {
  long long waited_ns = result->ready_ns - result->start_ns;
  self->num_operations += 1;
  self->num_bytes += (long long)num_bytes;
  self->wait_ns += waited_ns;
  self->move_ns += result->end_ns - result->ready_ns;
  if (sequence < self->next_sampled && waited_ns < self->long_wait_ns) return 1;
  PyObject* done =
      PyObject_CallMethod(self->sampler, "add", "LLLL", sequence, (long long)result->start_ns, waited_ns, waited_ns);
  Py_XDECREF(done);
  return done != NULL && read_sampler(self);
}

PyDoc_STRVAR(
    run_doc,
    "run(x, out, op, prescale, postscale)\n--\n\n"
    "Run an allreduce that is held and return its result; None if it is not held, or other work is under way.");
static PyObject* cache_run(PyObject* object, PyObject* const* args, Py_ssize_t num_args) {
  allreduce_cache* self = (allreduce_cache*)object;
  if (num_args != 5) {
    PyErr_SetString(PyExc_TypeError, "run() takes x, out, op, prescale and postscale");
    return NULL;
  }
  PyObject *x = args[0], *out = args[1], *op = args[2];
  if (self->calls == NULL || (PyObject*)Py_TYPE(x) != self->array_type || (out != Py_None && out != x) ||
      !PyFloat_CheckExact(args[3]) || !PyFloat_CheckExact(args[4]) || PyObject_Size(self->running_calls) != 0 ||
      !is_false(self->this_thread, operation_name) || !is_false(self->recorder, tracing_name))
    Py_RETURN_NONE;
  Py_buffer in_view, out_view;
  int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (out == x ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(x, &in_view, flags) != 0) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  const cached_call* held = NULL;
  if (self->calls != NULL && in_view.ndim <= MAX_DIMENSIONS)
    held = find_call(self, &in_view, op, PyFloat_AsDouble(args[3]), PyFloat_AsDouble(args[4]));
  if (held == NULL || held->op == NULL) {
    PyBuffer_Release(&in_view);
    Py_RETURN_NONE;
  }
  /* From here on Python code may run (empty_like, a signal handler, another thread) and change or free the table. */
  rd_call call = held->call;
  rd_span span = {in_view.buf, in_view.buf, held->count};
  PyObject* description = held->description;
  Py_INCREF(description);
  PyObject *result_array = x, *returned = NULL, *sequence_object = NULL;
  Py_INCREF(x);
  if (out == Py_None) {
    Py_DECREF(x);
    result_array = PyObject_CallFunctionObjArgs(self->empty_like, x, NULL);
    if (result_array == NULL || PyObject_GetBuffer(result_array, &out_view, PyBUF_WRITABLE) != 0) goto failed;
    span.output = out_view.buf;
    PyBuffer_Release(&out_view); /* nobody else knows the new array, so its memory stays where it is */
  }
  sequence_object = PyObject_CallNoArgs(self->next_sequence);
  if (sequence_object == NULL || PyObject_SetAttr(self->this_thread, operation_name, allreduce_text) != 0) goto failed;
  long long sequence = PyLong_AsLongLong(sequence_object);
  call.spans = &span;
  rd_result result;
  PyThreadState* thread = PyEval_SaveThread();
  rd_status status = self->run(self->channel, &call, &result, self->timeout_s);
  PyEval_RestoreThread(thread);
  int is_outside = PyObject_SetAttr(self->this_thread, operation_name, empty_text) == 0;
  if (status != RD_OK) {
    returned = PyObject_CallFunction(self->on_failure, "Oiy#", description, (int)status, (const char*)&result,
                                     (Py_ssize_t)sizeof result);
    if (returned != NULL) { /* it raises */
      Py_DECREF(returned);
      returned = NULL;
      PyErr_SetString(PyExc_SystemError, "a failed call has raised nothing");
    }
  } else if (is_outside && record(self, sequence, (uint64_t)in_view.len, &result)) {
    returned = result_array;
    Py_INCREF(returned);
  }
failed:
  PyBuffer_Release(&in_view);
  Py_DECREF(description);
  Py_XDECREF(sequence_object);
  Py_XDECREF(result_array);
  return returned;
}

PyDoc_STRVAR(add_doc,
             "add(x, op, prescale, postscale, dtype, op_number, signature, description)\n--\n\n"
             "Hold the call that was made with this array and these options.");
static PyObject* cache_add(PyObject* object, PyObject* args) {
  allreduce_cache* self = (allreduce_cache*)object;
  PyObject *x, *op, *description;
  double prescale, postscale;
  int dtype, op_number;
  unsigned long long signature;
  if (!PyArg_ParseTuple(args, "OOddiiKS", &x, &op, &prescale, &postscale, &dtype, &op_number, &signature, &description))
    return NULL;
  Py_buffer view;
  if (self->calls == NULL) Py_RETURN_NONE;
  if (PyObject_GetBuffer(x, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear(); /* of a dtype that buffers do not know, or not contiguous: it is not held */
    Py_RETURN_NONE;
  }
  char* text = PyBytes_AsString(description);
  if (text != NULL && view.ndim <= MAX_DIMENSIONS && strlen(view.format) < MAX_FORMAT_BYTES && view.itemsize > 0) {
    if (self->num_calls >= MAX_ENTRIES) clear_calls(self);
    cached_call* held = find_call(self, &view, op, prescale, postscale);
    if (held->op == NULL) {
      ++self->num_calls;
      Py_INCREF(op);
      Py_INCREF(description);
      held->op = op;
      held->description = description;
      held->prescale = prescale;
      held->postscale = postscale;
      held->num_dimensions = view.ndim;
      held->count = (uint64_t)(view.len / view.itemsize);
      strcpy(held->format, view.format);
      memcpy(held->shape, view.shape, (size_t)view.ndim * sizeof *view.shape);
      held->call = (rd_call){.kind = RD_ALLREDUCE,
                             .dtype = dtype,
                             .op = op_number,
                             .algorithm = self->algorithm,
                             .peer = -1,
                             .prescale = prescale,
                             .postscale = postscale,
                             .signature = signature,
                             .description = text,
                             .num_spans = 1};
    }
  }
  PyBuffer_Release(&view);
  if (text == NULL) return NULL;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(counts_doc,
             "counts()\n--\n\nReturn the operations so far, their bytes, and the nanoseconds of waiting and moving.");
static PyObject* cache_counts(PyObject* object, PyObject* unused) {
  allreduce_cache* self = (allreduce_cache*)object;
  (void)unused;
  return Py_BuildValue("LLLL", self->num_operations, self->num_bytes, self->wait_ns, self->move_ns);
}

PyDoc_STRVAR(restart_doc,
             "restart(next_sequence)\n--\n\nTake the numbers of operations from this function from now on.");
static PyObject* cache_restart(PyObject* object, PyObject* next_sequence) {
  allreduce_cache* self = (allreduce_cache*)object;
  PyObject* before = self->next_sequence;
  Py_INCREF(next_sequence);
  self->next_sequence = next_sequence;
  Py_XDECREF(before);
  if (!read_sampler(self)) return NULL;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(close_doc, "close()\n--\n\nRun nothing any more. Calls that are under way end with the channel.");
static PyObject* cache_close(PyObject* object, PyObject* unused) {
  (void)unused;
  forget_calls((allreduce_cache*)object);
  Py_RETURN_NONE;
}

static PyObject* cache_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static char* names[] = {"run",        "channel",     "algorithm", "timeout_s",     "array_type",
                          "empty_like", "this_thread", "recorder",  "running_calls", "next_sequence",
                          "sampler",    "on_failure",  NULL};
  unsigned long long run, channel;
  int algorithm;
  double timeout_s;
  PyObject* given[8];
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "KKidOOOOOOOO", names, &run, &channel, &algorithm, &timeout_s,
                                   &given[0], &given[1], &given[2], &given[3], &given[4], &given[5], &given[6],
                                   &given[7]))
    return NULL;
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  allreduce_cache* self = (allreduce_cache*)allocate(type, 0);
  if (self == NULL) return NULL;
  self->calls = calloc(NUM_SLOTS, sizeof *self->calls);
  self->run = (run_function)(uintptr_t)run;
  self->channel = (rd_channel*)(uintptr_t)channel;
  self->algorithm = algorithm;
  self->timeout_s = timeout_s;
  PyObject** kept[8] = {&self->array_type,    &self->empty_like,    &self->this_thread, &self->recorder,
                        &self->running_calls, &self->next_sequence, &self->sampler,     &self->on_failure};
  for (int i = 0; i < 8; ++i) {
    Py_INCREF(given[i]);
    *kept[i] = given[i];
  }
  if (self->calls == NULL) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  if (!read_sampler(self)) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject*)self;
}

static int cache_traverse(PyObject* object, visitproc visit, void* arg) {
  allreduce_cache* self = (allreduce_cache*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->array_type);
  Py_VISIT(self->empty_like);
  Py_VISIT(self->this_thread);
  Py_VISIT(self->recorder);
  Py_VISIT(self->running_calls);
  Py_VISIT(self->next_sequence);
  Py_VISIT(self->sampler);
  Py_VISIT(self->on_failure);
  return 0;
}

static int cache_clear(PyObject* object) {
  allreduce_cache* self = (allreduce_cache*)object;
  forget_calls(self);
  Py_CLEAR(self->array_type);
  Py_CLEAR(self->empty_like);
  Py_CLEAR(self->this_thread);
  Py_CLEAR(self->recorder);
  Py_CLEAR(self->running_calls);
  Py_CLEAR(self->next_sequence);
  Py_CLEAR(self->sampler);
  Py_CLEAR(self->on_failure);
  return 0;
}

static void cache_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  cache_clear(object);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyMethodDef cache_methods[] = {{"run", (PyCFunction)(void (*)(void))cache_run, METH_FASTCALL, run_doc},
                                      {"add", cache_add, METH_VARARGS, add_doc},
                                      {"counts", cache_counts, METH_NOARGS, counts_doc},
                                      {"restart", cache_restart, METH_O, restart_doc},
                                      {"close", cache_close, METH_NOARGS, close_doc},
                                      {NULL, NULL, 0, NULL}};

static PyType_Slot cache_slots[] = {{Py_tp_doc, "The allreduces of one channel that were made before."},
                                    {Py_tp_new, cache_new},
                                    {Py_tp_traverse, cache_traverse},
                                    {Py_tp_clear, cache_clear},
                                    {Py_tp_dealloc, cache_dealloc},
                                    {Py_tp_methods, cache_methods},
                                    {0, NULL}};

static PyType_Spec cache_spec = {"ronde.comm.backends.hot_calls.AllreduceCache", sizeof(allreduce_cache), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, cache_slots};

/* --- gradients that become ready --------------------------------------------------------------------------------- */

typedef struct {
  PyObject ob_base;
  Py_ssize_t num_parameters, num_buckets;
  Py_ssize_t num_ready;      /* in this pass */
  int reports;               /* whether the next gradient is reported to on_first */
  int counts;                /* whether full buckets are reported to on_full */
  Py_ssize_t* bucket_of;     /* by parameter; -1 for those in none */
  Py_ssize_t* num_gradients; /* by bucket */
  Py_ssize_t* num_missing;   /* by bucket, in this pass */
  Py_ssize_t* ready_order;   /* the parameters whose gradients are ready */
  char* is_ready;            /* by parameter */
  PyObject *on_first, *on_second, *on_full;
} ready_counter;

typedef struct {
  PyObject ob_base;
  ready_counter* counter;
  Py_ssize_t index; /* of the parameter; -1 for one that is not counted */
} ready_hook;

static PyTypeObject* ready_hook_type;

/* Calls a callback with a number, or with None for -1. Returns 0 when it raised. */
static int report(PyObject* callback, Py_ssize_t number) {
  if (callback == NULL) return 1; /* the garbage collector has cleared the counter */
  PyObject* done =
      number < 0 ? PyObject_CallFunctionObjArgs(callback, Py_None, NULL) : PyObject_CallFunction(callback, "n", number);
  Py_XDECREF(done);
  return done != NULL;
}

static PyObject* hook_call(PyObject* object, PyObject* args, PyObject* keywords) {
  const ready_hook* self = (ready_hook*)object;
  ready_counter* counter = self->counter;
  Py_ssize_t index = self->index;
  (void)args;
  (void)keywords;
  if (counter == NULL) Py_RETURN_NONE;
  if (counter->reports) {
    if (!report(counter->on_first, index)) return NULL;
    counter->reports = 0;
  }
  if (index < 0) Py_RETURN_NONE;
  if (counter->is_ready[index]) {
    if (!report(counter->on_second, index)) return NULL;
    Py_RETURN_NONE;
  }
  counter->is_ready[index] = 1;
  counter->ready_order[counter->num_ready++] = index;
  Py_ssize_t bucket = counter->bucket_of[index];
  if (counter->counts && bucket >= 0 && --counter->num_missing[bucket] == 0 && !report(counter->on_full, bucket))
    return NULL;
  Py_RETURN_NONE;
}

static int hook_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((ready_hook*)object)->counter);
  return 0;
}

static int hook_clear(PyObject* object) {
  Py_CLEAR(((ready_hook*)object)->counter);
  return 0;
}

static void hook_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  hook_clear(object);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyType_Slot hook_slots[] = {{Py_tp_doc, "What is called when a gradient is ready, with any arguments."},
                                   {Py_tp_call, hook_call},
                                   {Py_tp_traverse, hook_traverse},
                                   {Py_tp_clear, hook_clear},
                                   {Py_tp_dealloc, hook_dealloc},
                                   {0, NULL}};

static PyType_Spec hook_spec = {"ronde.comm.backends.hot_calls.ReadyHook", sizeof(ready_hook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                hook_slots};

PyDoc_STRVAR(hook_doc,
             "hook(index)\n--\n\n"
             "What to call when the gradient of this parameter is ready; None: of one that is not counted.");
static PyObject* counter_hook(PyObject* object, PyObject* number) {
  ready_counter* self = (ready_counter*)object;
  Py_ssize_t index = -1;
  if (number != Py_None) {
    index = PyLong_AsSsize_t(number);
    if (index == -1 && PyErr_Occurred()) return NULL;
    if (index < 0 || index >= self->num_parameters) {
      PyErr_SetString(PyExc_IndexError, "there is no such parameter");
      return NULL;
    }
  }
  allocfunc allocate = (allocfunc)PyType_GetSlot(ready_hook_type, Py_tp_alloc);
  ready_hook* hook = (ready_hook*)allocate(ready_hook_type, 0);
  if (hook == NULL) return NULL;
  Py_INCREF(object);
  hook->counter = self;
  hook->index = index;
  return (PyObject*)hook;
}

static void begin_pass(ready_counter* self, int counts) {
  self->num_ready = 0;
  self->reports = 1;
  self->counts = counts;
  memset(self->is_ready, 0, (size_t)self->num_parameters);
  memcpy(self->num_missing, self->num_gradients, (size_t)self->num_buckets * sizeof *self->num_missing);
}

PyDoc_STRVAR(begin_doc, "begin(counts)\n--\n\nA pass may begin. `counts`: call on_full for each full bucket in it.");
static PyObject* counter_begin(PyObject* object, PyObject* counts) {
  int truth = PyObject_IsTrue(counts);
  if (truth < 0) return NULL;
  begin_pass((ready_counter*)object, truth);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(report_next_doc, "report_next()\n--\n\nCall on_first at the next gradient again.");
static PyObject* counter_report_next(PyObject* object, PyObject* unused) {
  (void)unused;
  ((ready_counter*)object)->reports = 1;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(all_ready_doc, "all_ready()\n--\n\nWhether every parameter got a gradient in this pass.");
static PyObject* counter_all_ready(PyObject* object, PyObject* unused) {
  (void)unused;
  const ready_counter* self = (ready_counter*)object;
  return PyBool_FromLong(self->num_ready == self->num_parameters);
}

PyDoc_STRVAR(ready_order_doc, "ready_order()\n--\n\nThe parameters whose gradients are ready, the first one first.");
static PyObject* counter_ready_order(PyObject* object, PyObject* unused) {
  (void)unused;
  const ready_counter* self = (ready_counter*)object;
  PyObject* order = PyList_New(self->num_ready);
  for (Py_ssize_t i = 0; order != NULL && i < self->num_ready; ++i) {
    PyObject* index = PyLong_FromSsize_t(self->ready_order[i]);
    if (index == NULL || PyList_SetItem(order, i, index) != 0) {
      Py_DECREF(order);
      return NULL;
    }
  }
  return order;
}

/* Reads the bucket of every parameter. Returns 0 with an exception when it is none. */
static int read_buckets(ready_counter* self, PyObject* bucket_of) {
  for (Py_ssize_t i = 0; i < self->num_parameters; ++i) {
    PyObject* number = PySequence_GetItem(bucket_of, i);
    if (number == NULL) return 0;
    Py_ssize_t bucket = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (bucket == -1 && PyErr_Occurred()) return 0;
    if (bucket < -1 || bucket >= self->num_buckets) {
      PyErr_SetString(PyExc_ValueError, "there is no such bucket");
      return 0;
    }
    self->bucket_of[i] = bucket;
    if (bucket >= 0) ++self->num_gradients[bucket];
  }
  return 1;
}

static PyObject* counter_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static char* names[] = {"bucket_of", "num_buckets", "on_first", "on_second", "on_full", NULL};
  PyObject *bucket_of, *on_first, *on_second, *on_full;
  Py_ssize_t num_buckets;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OnOOO", names, &bucket_of, &num_buckets, &on_first, &on_second,
                                   &on_full))
    return NULL;
  Py_ssize_t num_parameters = PySequence_Size(bucket_of);
  if (num_parameters < 0) return NULL;
  if (num_buckets < 0) {
    PyErr_SetString(PyExc_ValueError, "num_buckets must not be negative");
    return NULL;
  }
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  ready_counter* self = (ready_counter*)allocate(type, 0);
  if (self == NULL) return NULL;
  Py_INCREF(on_first);
  Py_INCREF(on_second);
  Py_INCREF(on_full);
  self->on_first = on_first;
  self->on_second = on_second;
  self->on_full = on_full;
  self->num_parameters = num_parameters;
  self->num_buckets = num_buckets;
  /* One more each: calloc() of nothing may return null. */
  self->bucket_of = calloc((size_t)num_parameters + 1, sizeof *self->bucket_of);
  self->ready_order = calloc((size_t)num_parameters + 1, sizeof *self->ready_order);
  self->is_ready = calloc((size_t)num_parameters + 1, 1);
  self->num_gradients = calloc((size_t)num_buckets + 1, sizeof *self->num_gradients);
  self->num_missing = calloc((size_t)num_buckets + 1, sizeof *self->num_missing);
  if (!self->bucket_of || !self->ready_order || !self->is_ready || !self->num_gradients || !self->num_missing) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  if (!read_buckets(self, bucket_of)) {
    Py_DECREF(self);
    return NULL;
  }
  begin_pass(self, 0);
  return (PyObject*)self;
}

static int counter_traverse(PyObject* object, visitproc visit, void* arg) {
  const ready_counter* self = (ready_counter*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->on_first);
  Py_VISIT(self->on_second);
  Py_VISIT(self->on_full);
  return 0;
}

static int counter_clear(PyObject* object) {
  ready_counter* self = (ready_counter*)object;
  Py_CLEAR(self->on_first);
  Py_CLEAR(self->on_second);
  Py_CLEAR(self->on_full);
  return 0;
}

static void counter_dealloc(PyObject* object) {
  ready_counter* self = (ready_counter*)object;
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  counter_clear(object);
  free(self->bucket_of);
  free(self->ready_order);
  free(self->is_ready);
  free(self->num_gradients);
  free(self->num_missing);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyMethodDef counter_methods[] = {{"hook", counter_hook, METH_O, hook_doc},
                                        {"begin", counter_begin, METH_O, begin_doc},
                                        {"report_next", counter_report_next, METH_NOARGS, report_next_doc},
                                        {"all_ready", counter_all_ready, METH_NOARGS, all_ready_doc},
                                        {"ready_order", counter_ready_order, METH_NOARGS, ready_order_doc},
                                        {NULL, NULL, 0, NULL}};

static PyType_Slot counter_slots[] = {{Py_tp_doc, "Counts the gradients that become ready in a backward pass."},
                                      {Py_tp_new, counter_new},
                                      {Py_tp_traverse, counter_traverse},
                                      {Py_tp_clear, counter_clear},
                                      {Py_tp_dealloc, counter_dealloc},
                                      {Py_tp_methods, counter_methods},
                                      {0, NULL}};

static PyType_Spec counter_spec = {"ronde.comm.backends.hot_calls.ReadyCounter", sizeof(ready_counter), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, counter_slots};

/* --- the module -------------------------------------------------------------------------------------------------- */

static int add_type(PyObject* module, PyType_Spec* spec) {
  PyObject* type = PyType_FromModuleAndSpec(module, spec, NULL);
  if (type == NULL) return -1;
  int failed = PyModule_AddType(module, (PyTypeObject*)type);
  Py_DECREF(type);
  return failed;
}

static int module_exec(PyObject* module) {
  operation_name = PyUnicode_InternFromString("operation");
  tracing_name = PyUnicode_InternFromString("tracing");
  next_sequence_name = PyUnicode_InternFromString("next_sequence");
  long_wait_ns_name = PyUnicode_InternFromString("long_wait_ns");
  allreduce_text = PyUnicode_InternFromString("allreduce");
  empty_text = PyUnicode_InternFromString("");
  if (operation_name == NULL || tracing_name == NULL || next_sequence_name == NULL || long_wait_ns_name == NULL ||
      allreduce_text == NULL || empty_text == NULL)
    return -1;
  if (PyModule_AddIntConstant(module, "ABI", RD_ABI) != 0) return -1;
  if (ready_hook_type == NULL) ready_hook_type = (PyTypeObject*)PyType_FromModuleAndSpec(module, &hook_spec, NULL);
  if (ready_hook_type == NULL) return -1;
  return add_type(module, &cache_spec) != 0 || add_type(module, &counter_spec) != 0 ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void*)module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    "hot_calls",
    "Repeated calls of the data plane without ctypes, and the hooks of gradients.",
    0,
    NULL,
    module_slots,
    NULL,
    NULL,
    NULL};

PyMODINIT_FUNC PyInit_hot_calls(void) { return PyModuleDef_Init(&module_definition); }
