// Replays what replay.py recorded: allocations, calls of C functions (a launch of a kernel is one), calls of Python.
//
// A `Table` belongs to one Python function, and is called with its arguments. It looks up the recording for arguments
// of the same shapes, dtypes, strides, alignments and constants, and repeats its steps on the memory of this call. If
// there is no recording, it calls Python, which may make one. The GIL is released while steps run.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

constexpr int kInvalidContext = 201;          // of CUDA's driver
constexpr uint64_t kMaximumAlignment = 256;   // the largest that a library distinguishes
constexpr long long kSmallestSeed = 1ll << 31;  // a number from here on is a seed, which differs from call to call
constexpr size_t kEntries = 4096;             // kinds of calls that a table remembers
constexpr int kFirst = 2, kLast = 4;          // the calls of a kind that are recorded until one is not refused
constexpr size_t kArguments = 16, kValues = 64;  // of a C function; behind addresses in its arguments

// -- what was recorded ------------------------------------------------------------------------------------------------
struct Run {  // one replay
  Tensors slots;  // an argument of the call, or memory that a step allocates
  std::vector<uint64_t> seeds;
  c10::Device device = c10::kCPU;
  uint64_t stream = 0;
};

struct Value {  // a Python value: a constant, a tensor on the memory of a slot, or a tuple, which may have a class
  py::object constant;
  int slot = -1;
  int64_t bytes = 0;
  bool whole = false;
  caffe2::TypeMeta dtype;
  std::vector<int64_t> sizes, strides;
  PyTypeObject* tuple = nullptr;
  std::vector<Value> items;

  at::Tensor tensor(const Tensors& slots) const {
    const at::Tensor& base = slots[slot];
    if (whole) return base;
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()), base.key_set(), dtype);
    int64_t offset = base.storage_offset() * static_cast<int64_t>(base.itemsize()) + bytes;
    view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset / static_cast<int64_t>(dtype.itemsize()));
    if (!view.is_inference() && !base.is_inference())  // autograd sees writes through either
      view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
    return view;
  }
  PyObject* make(const Tensors& slots) const {
    if (slot >= 0) return THPVariable_Wrap(tensor(slots));
    if (!tuple) return constant.inc_ref().ptr();
    PyObject* object = tuple->tp_alloc(tuple, static_cast<Py_ssize_t>(items.size()));
    for (size_t i = 0; object && i < items.size(); i++) {
      PyObject* item = items[i].make(slots);
      if (!item) return Py_DECREF(object), nullptr;
      PyTuple_SET_ITEM(object, i, item);
    }
    return object;
  }
};

Value read_value(py::handle source) {  // of replay.py: a View, a tuple or a constant
  Value value;
  if (py::hasattr(source, "like")) {
    const at::Tensor& like = THPVariable_Unpack(py::object(source.attr("like")).ptr());
    value.slot = source.attr("slot").cast<int>(), value.bytes = source.attr("offset").cast<int64_t>();
    value.whole = source.attr("whole").cast<bool>();
    value.dtype = like.dtype(), value.sizes = like.sizes().vec(), value.strides = like.strides().vec();
  } else if (PyTuple_Check(source.ptr())) {
    value.tuple = Py_TYPE(source.ptr());
    for (py::handle item : py::reinterpret_borrow<py::tuple>(source)) value.items.push_back(read_value(item));
  } else {
    value.constant = py::reinterpret_borrow<py::object>(source);
  }
  return value;
}

struct Step {
  std::vector<int> last_uses;  // slots that no later step needs
  virtual void run(Run& run) = 0;
  virtual ~Step() = default;
};

struct Allocation : Step {
  int slot;
  bool zero;
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  Allocation(int slot, py::handle source, bool zero) : slot(slot), zero(zero) {
    const at::Tensor& like = THPVariable_Unpack(source.ptr());
    sizes = like.sizes().vec(), strides = like.strides().vec(), options = like.options();
  }
  void run(Run& run) override {
    run.slots[slot] = at::empty_strided(sizes, strides, options);
    if (zero) run.slots[slot].zero_();
  }
};

struct PythonCall : Step {
  py::object function;
  Value arguments;
  std::vector<int> results;  // slot of each tensor in the result; -1: memory of another slot
  void run(Run& run) override {
    py::gil_scoped_acquire gil;
    auto call_arguments = py::reinterpret_steal<py::tuple>(arguments.make(run.slots));
    if (!call_arguments) throw py::error_already_set();
    py::object result = function(*call_arguments);
    if (THPVariable_Check(result.ptr())) result = py::make_tuple(result);
    for (size_t i = 0; i < results.size(); i++)
      if (results[i] >= 0) run.slots[results[i]] = THPVariable_Unpack(py::object(result[py::int_(i)]).ptr());
  }
  ~PythonCall() override {
    py::gil_scoped_acquire gil;
    function = {}, arguments = {};
  }
};

uint64_t splitmix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

// A call of a C function by its address, so that no header of CUDA is needed. On the 64-bit platforms of CUDA every
// argument that is an integer or an address takes a register or eight bytes of the stack, of which a function reads as
// many as its parameter has, and functions ignore arguments that they do not have. The same holds for the memory that
// arguments of a kernel lie in (little-endian).
struct CFunctionCall : Step {
  struct Argument {
    enum Kind { kNumber, kAddress, kWord, kStream, kPointer, kPointers } kind;
    int slot = 0;
    int64_t number = 0;
    std::vector<Argument> items;
  };
  using Function = int (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                           uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
  std::string name;
  Function function;
  std::vector<Argument> arguments;
  py::object owner;  // of the memory that arguments point to

  ~CFunctionCall() override {
    py::gil_scoped_acquire gil;
    owner = {};
  }
  static Argument read(py::handle source) {
    if (PyLong_Check(source.ptr())) return {Argument::kNumber, 0, source.cast<int64_t>(), {}};
    auto kind = source[py::int_(0)].cast<std::string>();
    if (kind == "stream") return {Argument::kStream, 0, 0, {}};
    if (kind == "address" || kind == "word")
      return {kind == "word" ? Argument::kWord : Argument::kAddress, source[py::int_(1)].cast<int>(),
              source[py::int_(2)].cast<int64_t>(), {}};
    Argument argument{kind == "pointer" ? Argument::kPointer : Argument::kPointers, 0, 0, {}};
    for (py::handle item : py::object(source[py::int_(1)])) argument.items.push_back(read(item));
    TORCH_CHECK(argument.items.size() <= kValues, "a kernel with ", argument.items.size(), " arguments");
    return argument;
  }
  static uint64_t simple(const Argument& a, const Run& run) {
    if (a.kind == Argument::kAddress) return reinterpret_cast<uint64_t>(run.slots[a.slot].mutable_data_ptr()) + a.number;
    if (a.kind == Argument::kStream) return run.stream;
    if (a.kind == Argument::kNumber) return static_cast<uint64_t>(a.number);
    uint64_t mixed = splitmix64(run.seeds[a.slot]);
    return a.number ? mixed >> 32 : mixed & 0xFFFFFFFFull;
  }
  void run(Run& run) override {
    uint64_t values[kValues], places[kValues], v[kArguments] = {};
    for (size_t i = 0; i < arguments.size(); i++) {
      const Argument& a = arguments[i];
      for (size_t j = 0; j < a.items.size(); j++) {  // of one argument at most
        values[j] = simple(a.items[j], run);
        places[j] = reinterpret_cast<uint64_t>(&values[j]);
      }
      v[i] = a.kind == Argument::kPointer    ? places[0]
             : a.kind == Argument::kPointers ? reinterpret_cast<uint64_t>(places)
                                             : simple(a, run);
    }
    auto once = [&] {
      return function(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14],
                      v[15]);
    };
    int status = once();
    if (status == kInvalidContext) {  // this thread has not used the device: torch makes its context current
      at::zeros({1}, at::TensorOptions(run.device).dtype(at::kByte));
      status = once();
    }
    TORCH_CHECK(status == 0, name, " failed with status ", status);
  }
};

struct Recipe {
  size_t slots;
  std::vector<std::unique_ptr<Step>> steps;
  Value result;
  std::recursive_mutex mutex;  // descriptors of a library are the recipe's own
};

std::unique_ptr<Step> read_step(const py::tuple& record) {
  auto kind = record[0].cast<std::string>();
  if (kind == "allocation")
    return std::make_unique<Allocation>(record[1].cast<int>(), record[2], record[3].cast<bool>());
  if (kind == "python") {
    auto step = std::make_unique<PythonCall>();
    step->function = record[1], step->arguments = read_value(record[2]);
    step->results = record[3].cast<std::vector<int>>();
    return step;
  }
  auto step = std::make_unique<CFunctionCall>();
  step->name = record[1].cast<std::string>();
  step->function = reinterpret_cast<CFunctionCall::Function>(record[2].cast<uint64_t>());
  for (py::handle item : py::object(record[3])) step->arguments.push_back(CFunctionCall::read(item));
  step->owner = record[4];
  TORCH_CHECK(step->arguments.size() <= kArguments, step->name, " has too many arguments");
  return step;
}

std::shared_ptr<Recipe> read_recipe(const py::tuple& recording) {
  auto recipe = std::make_shared<Recipe>();
  recipe->slots = recording[0].cast<size_t>();
  for (py::handle step : py::object(recording[1])) {
    recipe->steps.push_back(read_step(py::object(step[py::int_(0)])));
    recipe->steps.back()->last_uses = step[py::int_(1)].cast<std::vector<int>>();
  }
  recipe->result = read_value(recording[2]);
  return recipe;
}

// -- lookup -----------------------------------------------------------------------------------------------------------
using Key = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = key.size();
    for (int64_t k : key) h = (h ^ static_cast<uint64_t>(k)) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
    return h;
  }
};

struct Call {  // the arguments of a call, and the key of its recording
  Key key;
  Run run;
  std::vector<PyObject*> constants;
};

std::unordered_set<PyTypeObject*> constant_types;  // types of which equal values are one object
py::handle current_stream;                         // device index → address of the stream

// Returns false for a value that cannot be looked up.
bool describe(PyObject* value, Call& call) {
  Key& key = call.key;
  if (THPVariable_CheckExact(value)) {
    const at::Tensor& t = THPVariable_Unpack(value);
    if (t.layout() != at::kStrided || !t.has_storage()) return false;
    if (t.requires_grad() && c10::GradMode::is_enabled()) return false;  // a replay has no backward
    uint64_t address = reinterpret_cast<uint64_t>(t.const_data_ptr()) | kMaximumAlignment;
    key.insert(key.end(), {-1, t.dim(), static_cast<int64_t>(t.scalar_type()),
                           static_cast<int64_t>(t.device().type()) << 8 | static_cast<uint8_t>(t.device().index()),
                           static_cast<int64_t>(address & -address)});
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
    call.run.slots.push_back(t);
    return true;
  }
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    bool seed = overflow || number >= kSmallestSeed;
    if (seed) call.run.seeds.push_back(PyLong_AsUnsignedLongLongMask(value)), number = 0;
    key.insert(key.end(), {seed ? -2 : -3, number});
    return !PyErr_Occurred();
  }
  if (PyTuple_Check(value)) {
    key.insert(key.end(), {-4, reinterpret_cast<int64_t>(Py_TYPE(value)), PyTuple_GET_SIZE(value)});
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++)
      if (!describe(PyTuple_GET_ITEM(value, i), call)) return false;
    return true;
  }
  if (!constant_types.count(Py_TYPE(value))) return false;
  key.insert(key.end(), {-5, reinterpret_cast<int64_t>(value)});
  call.constants.push_back(value);
  return true;
}

// torch's dispatch keys, as those of inference mode, are part of the key, because functions depend on them. Calls under
// autocast are not looked up, because its dtype is not part of the key. Calls under a dispatch mode are not either,
// because the mode, as the recording of a caller, must see all operators.
bool describe_call(PyObject* const* arguments, Py_ssize_t count, Call& call) {
  auto state = c10::impl::tls_local_dispatch_key_set();
  call.key.reserve(128);
  call.key.insert(call.key.end(),
                  {static_cast<int64_t>(state.included_.raw_repr()), static_cast<int64_t>(state.excluded_.raw_repr())});
  for (Py_ssize_t i = 0; i < count; i++)
    if (!describe(arguments[i], call)) return PyErr_Clear(), false;
  return !call.run.slots.empty() && state.excluded_.has_all(c10::autocast_dispatch_keyset) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

struct Entry {
  std::shared_ptr<Recipe> recipe;
  int calls = 0;                      // in Python, until there is a recipe
  std::vector<py::object> constants;  // keeps their addresses from being used again
};

struct Table {
  py::object record, function, listings;
  std::unordered_map<Key, Entry, Hash> entries;
  size_t replays = 0;
};

PyObject* call_table(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS  // Python sees torch's own exceptions, as OutOfMemoryError
  Table& table = *static_cast<Table*>(PyCapsule_GetPointer(self, nullptr));
  Call call;
  bool known = PyList_GET_SIZE(table.listings.ptr()) == 0 && describe_call(arguments, count, call);
  auto entry_of_key = known ? table.entries.find(call.key) : table.entries.end();
  if (entry_of_key == table.entries.end() || !entry_of_key->second.recipe) {
    if (!known) return PyObject_Vectorcall(table.function.ptr(), arguments, count, nullptr);
    if (table.entries.size() >= kEntries) table.entries.clear();
    Entry& entry = table.entries[call.key];
    if (entry.constants.empty())
      for (PyObject* c : call.constants) entry.constants.push_back(py::reinterpret_borrow<py::object>(c));
    // A number of tokens that does not come again, as that of an expert, is not worth a recording.
    int calls = ++entry.calls;
    if (calls < kFirst || calls > kLast) return PyObject_Vectorcall(table.function.ptr(), arguments, count, nullptr);
    py::tuple recorded_arguments(count);
    for (Py_ssize_t i = 0; i < count; i++) recorded_arguments[i] = py::reinterpret_borrow<py::object>(arguments[i]);
    py::tuple pair = table.record(recorded_arguments);  // (result, recording or None)
    if (!py::object(pair[1]).is_none()) table.entries[call.key].recipe = read_recipe(pair[1]);
    return py::object(pair[0]).release().ptr();
  }
  std::shared_ptr<Recipe> recipe = entry_of_key->second.recipe;
  Run& run = call.run;
  run.device = run.slots[0].device();
  if (run.device.is_cuda()) run.stream = current_stream(run.device.index()).cast<uint64_t>();
  run.slots.resize(recipe->slots);
  table.replays++;
  {
    py::gil_scoped_release unlocked;
    std::lock_guard<std::recursive_mutex> guard(recipe->mutex);
    c10::DeviceGuard device(run.device);
    at::AutoDispatchBelowADInplaceOrView raw;
    for (auto& step : recipe->steps) {
      step->run(run);
      for (int slot : step->last_uses) run.slots[slot].reset();
    }
  }
  return recipe->result.make(run.slots);
  END_HANDLE_TH_ERRORS
}

PyMethodDef call_definition = {"replayed", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_table)),
                               METH_FASTCALL, "Replay a recording for the arguments, or make one."};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Table, std::shared_ptr<Table>>(m, "Table")
      .def(py::init([](py::object record, py::object function, py::object listings) {
        return std::make_shared<Table>(Table{std::move(record), std::move(function), std::move(listings), {}, 0});
      }))
      .def_readonly("replays", &Table::replays)
      .def_property_readonly("recordings", [](const Table& table) {
        return std::count_if(table.entries.begin(), table.entries.end(), [](auto& e) { return !!e.second.recipe; });
      })
      // The function must not outlive the table.
      .def("call", [](Table& table) {
        return py::reinterpret_steal<py::object>(
            PyCFunction_New(&call_definition, py::capsule(&table).release().ptr()));
      });
  m.def("configure", [](const py::tuple& constants, py::object stream) {
    for (py::handle type : constants) constant_types.insert(reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()));
    current_stream = stream.release();
  });
}
