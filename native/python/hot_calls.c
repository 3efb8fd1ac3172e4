/* The shortest way from ronde.allreduce(array) to rd_run(): a Python extension in the stable ABI, so that one file
 * serves every CPython from 3.11 on. Where it cannot be imported, ronde calls the library through ctypes, which takes
 * some microseconds more.
 *
 * An AllreduceCache belongs to one channel. It holds the calls that were made before, by element type, shape and
 * options, and runs such a call again: nothing is checked twice, and no Python object is made. What it does not hold,
 * or what needs more than that, it leaves to its caller.
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

static PyObject *operation_name, *tracing_name, *next_sequence_name, *long_wait_ns_name;

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
  cached_call* held = NULL;
  if (in_view.ndim <= MAX_DIMENSIONS)
    held = find_call(self, &in_view, op, PyFloat_AsDouble(args[3]), PyFloat_AsDouble(args[4]));
  if (held == NULL || held->op == NULL) {
    PyBuffer_Release(&in_view);
    Py_RETURN_NONE;
  }
  PyObject *result_array = x, *returned = NULL, *sequence_object = NULL;
  void* output = in_view.buf;
  Py_INCREF(x);
  if (out == Py_None) {
    Py_DECREF(x);
    result_array = PyObject_CallFunctionObjArgs(self->empty_like, x, NULL);
    if (result_array == NULL || PyObject_GetBuffer(result_array, &out_view, PyBUF_WRITABLE) != 0) goto failed;
    output = out_view.buf;
    PyBuffer_Release(&out_view); /* nobody else knows the new array, so its memory stays where it is */
  }
  sequence_object = PyObject_CallNoArgs(self->next_sequence);
  if (sequence_object == NULL) goto failed;
  long long sequence = PyLong_AsLongLong(sequence_object);
  Py_DECREF(sequence_object);
  /* Other threads may change the table while this one is in rd_run. */
  rd_span span = {in_view.buf, output, held->count};
  rd_call call = held->call;
  PyObject* description = held->description;
  Py_INCREF(description);
  call.spans = &span;
  rd_result result;
  PyThreadState* thread = PyEval_SaveThread();
  rd_status status = self->run(self->channel, &call, &result, self->timeout_s);
  PyEval_RestoreThread(thread);
  if (status != RD_OK) {
    returned = PyObject_CallFunction(self->on_failure, "Oiy#", description, (int)status, (const char*)&result,
                                     (Py_ssize_t)sizeof result);
    if (returned != NULL) { /* it raises */
      Py_DECREF(returned);
      returned = NULL;
      PyErr_SetString(PyExc_SystemError, "a failed call has raised nothing");
    }
  } else if (record(self, sequence, (uint64_t)in_view.len, &result)) {
    returned = result_array;
    Py_INCREF(returned);
  }
  Py_DECREF(description);
failed:
  PyBuffer_Release(&in_view);
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

static int module_exec(PyObject* module) {
  operation_name = PyUnicode_InternFromString("operation");
  tracing_name = PyUnicode_InternFromString("tracing");
  next_sequence_name = PyUnicode_InternFromString("next_sequence");
  long_wait_ns_name = PyUnicode_InternFromString("long_wait_ns");
  if (operation_name == NULL || tracing_name == NULL || next_sequence_name == NULL || long_wait_ns_name == NULL)
    return -1;
  if (PyModule_AddIntConstant(module, "ABI", RD_ABI) != 0) return -1;
  PyObject* type = PyType_FromModuleAndSpec(module, &cache_spec, NULL);
  if (type == NULL) return -1;
  int failed = PyModule_AddType(module, (PyTypeObject*)type);
  Py_DECREF(type);
  return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void*)module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                               "hot_calls",
                                               "Repeated calls of the data plane without ctypes.",
                                               0,
                                               NULL,
                                               module_slots,
                                               NULL,
                                               NULL,
                                               NULL};

PyMODINIT_FUNC PyInit_hot_calls(void) { return PyModuleDef_Init(&module_definition); }
