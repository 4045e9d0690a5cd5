// Replays what replay.py recorded: allocations, launches of kernels, library products and calls of Python functions.
//
// A `Table` belongs to one Python function. It is called with that function's arguments, looks up what was recorded for
// arguments of the same shapes, dtypes, strides, alignments and constants, and repeats it on the memory of this call.
// Without a recording it calls the Python function that makes one. The GIL is released while steps run.

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

// -- libraries, by address: no header of CUDA is needed ---------------------------------------------------------------
using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** arguments,
                             void** extra);
using Matmul = int (*)(void* handle, void* operation, const void* alpha, const void* a, void* a_layout, const void* b,
                       void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                       const void* algorithm, void* workspace, size_t workspace_size, void* stream);
using SetAttribute = int (*)(void* operation, int name, const void* value, size_t size);

constexpr int kInvalidContext = 201;
constexpr uint64_t kMaximumAlignment = 256;  // the largest that a library distinguishes
constexpr long long kLargest = 1ll << 31;     // a larger number is a seed, which differs from call to call
constexpr size_t kKept = 4096;               // kinds of calls that a table remembers
constexpr int kAttempts = 3;                 // the first call may look at memory, which later calls need not

template <class T>
T* at_address(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// -- what was recorded ------------------------------------------------------------------------------------------------
// A slot holds a tensor: an argument of the call, or memory that a step allocates.
struct Address {  // in a slot's memory, in bytes from its first element; without a slot, a fixed address
  int slot;
  int64_t offset;
  void* of(const Tensors& slots) const {
    return slot < 0 ? at_address<void>(offset) : static_cast<char*>(slots[slot].mutable_data_ptr()) + offset;
  }
};

struct View {  // the tensor of a slot, or another tensor on its memory
  int slot;
  int64_t bytes;
  bool whole;
  caffe2::TypeMeta dtype;
  std::vector<int64_t> sizes, strides;

  View(int slot, int64_t bytes, bool whole, py::handle like) : slot(slot), bytes(bytes), whole(whole) {
    const at::Tensor& t = THPVariable_Unpack(like.ptr());
    dtype = t.dtype();
    sizes = t.sizes().vec();
    strides = t.strides().vec();
  }
  at::Tensor of(const Tensors& slots) const {
    const at::Tensor& base = slots[slot];
    if (whole) return base;
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()), base.key_set(), dtype);
    int64_t offset = base.storage_offset() * static_cast<int64_t>(base.itemsize()) + bytes;
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset / static_cast<int64_t>(dtype.itemsize()));
    if (!made.is_inference() && !base.is_inference())  // autograd sees writes through either
      made.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
    return made;
  }
};

// A value of Python: tensors inside tuples and inside objects whose attributes are given by name.
struct Node {
  enum Kind { kConstant, kTensor, kTuple, kObject } kind = kConstant;
  py::object object;  // the constant, or the class
  std::optional<View> view;
  std::vector<Node> children;
  std::vector<py::object> names;

  PyObject* make(const Tensors& slots) const {
    if (kind == kTensor) return THPVariable_Wrap(view->of(slots));
    if (kind == kConstant) return object.inc_ref().ptr();
    PyObject* made = nullptr;
    if (kind == kTuple) {
      made = PyTuple_New(static_cast<Py_ssize_t>(children.size()));
      for (size_t i = 0; made && i < children.size(); i++) {
        PyObject* child = children[i].make(slots);
        if (!child) return Py_DECREF(made), nullptr;
        PyTuple_SET_ITEM(made, i, child);
      }
      return made;
    }
    auto* type = reinterpret_cast<PyTypeObject*>(object.ptr());
    made = type->tp_alloc(type, 0);  // without __init__, and for frozen dataclasses too
    for (size_t i = 0; made && i < children.size(); i++) {
      PyObject* child = children[i].make(slots);
      int failed = child ? PyObject_GenericSetAttr(made, names[i].ptr(), child) : -1;
      Py_XDECREF(child);
      if (failed) return Py_DECREF(made), nullptr;
    }
    return made;
  }
};

struct Argument {  // of a kernel: an address, a number, or one of the two key words of a seed of the call
  enum Kind { kAddress, kNumber, kWord } kind;
  Address address;
  int64_t number;
};

uint64_t splitmix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

struct Run {  // one replay
  Tensors slots;
  std::vector<uint64_t> seeds;
  c10::Device device = c10::kCPU;
  void* stream = nullptr;
};

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
  void run(Run& run) override {
    run.slots[slot] = at::empty_strided(sizes, strides, options);
    if (zero) run.slots[slot].zero_();
  }
};

LaunchKernel launch_kernel = nullptr;

struct Launch : Step {
  void* function;
  unsigned grid[2], threads, shared;
  std::vector<Argument> arguments;
  void run(Run& run) override {
    // Every value takes eight bytes, of which a kernel reads as many as its parameter has (little-endian). Triton's
    // kernels end with one or two addresses of scratch memory, which these kernels do not use.
    c10::SmallVector<uint64_t, 48> values;
    c10::SmallVector<void*, 48> places;
    for (const Argument& a : arguments) {
      uint64_t mixed = a.kind == Argument::kWord ? splitmix64(run.seeds[a.address.slot]) : 0;
      values.push_back(a.kind == Argument::kAddress  ? reinterpret_cast<uint64_t>(a.address.of(run.slots))
                       : a.kind == Argument::kNumber ? static_cast<uint64_t>(a.number)
                       : a.number                    ? mixed >> 32
                                                     : mixed & 0xFFFFFFFFull);
    }
    values.append(2, 0);
    for (uint64_t& value : values) places.push_back(&value);
    auto once = [&] {
      return launch_kernel(function, grid[0], grid[1], 1, threads, 1, 1, shared, run.stream, places.data(), nullptr);
    };
    int status = once();
    if (status == kInvalidContext) {  // this thread has not used the device: torch makes its context current
      at::zeros({1}, at::TensorOptions(run.device).dtype(at::kByte));
      status = once();
    }
    TORCH_CHECK(status == 0, "a kernel cannot be launched: error ", status, " of CUDA");
  }
};

struct Product : Step {
  Matmul matmul;
  SetAttribute set_attribute;
  void *handle, *operation, *layouts[3], *algorithm;
  Address alpha, beta, a, b, c, workspace;
  size_t workspace_size;
  int scale_names[2];
  std::vector<Address> scales;
  std::mutex mutex;  // the addresses of scales are part of the operation
  void run(Run& run) override {
    std::lock_guard<std::mutex> guard(mutex);
    int status = 0;
    for (size_t i = 0; i < scales.size() && !status; i++) {
      void* scale = scales[i].of(run.slots);
      status = set_attribute(operation, scale_names[i], &scale, sizeof(scale));
    }
    void* result = c.of(run.slots);
    if (!status)
      status = matmul(handle, operation, alpha.of(run.slots), a.of(run.slots), layouts[0], b.of(run.slots), layouts[1],
                      beta.of(run.slots), result, layouts[2], result, layouts[2], algorithm, workspace.of(run.slots),
                      workspace_size, run.stream);
    TORCH_CHECK(status == 0, "cuBLASLt failed with status ", status);
  }
};

struct Call : Step {  // of a Python function
  py::object function;
  Node arguments;
  std::vector<int> results;  // slot of each tensor in the result; -1: memory of another slot
  void run(Run& run) override {
    py::gil_scoped_acquire gil;
    auto given = py::reinterpret_steal<py::tuple>(arguments.make(run.slots));
    if (!given) throw py::error_already_set();
    py::object found = function(*given);
    if (THPVariable_Check(found.ptr())) found = py::make_tuple(found);
    for (size_t i = 0; i < results.size(); i++)
      if (results[i] >= 0) run.slots[results[i]] = THPVariable_Unpack(py::object(found[py::int_(i)]).ptr());
  }
  ~Call() override {
    py::gil_scoped_acquire gil;
    function = {};
    arguments = {};
  }
};

struct Recipe {
  size_t slots;
  std::vector<std::unique_ptr<Step>> steps;
  Node result;
};

// -- reading a recording ----------------------------------------------------------------------------------------------
py::handle view_class, object_class;  // replay.View and replay.Object

Address read_address(py::handle pair) {
  auto [slot, offset] = pair.cast<std::pair<int, int64_t>>();
  return {slot, offset};
}

Node read_node(py::handle value) {
  Node node;
  if (py::isinstance(value, view_class)) {
    node.kind = Node::kTensor;
    node.view.emplace(value.attr("slot").cast<int>(), value.attr("offset").cast<int64_t>(),
                      value.attr("whole").cast<bool>(), value.attr("like"));
  } else if (py::isinstance(value, object_class)) {
    node.kind = Node::kObject;
    node.object = value.attr("type");
    for (py::handle item : value.attr("attributes")) {
      node.names.push_back(py::reinterpret_borrow<py::object>(item[py::int_(0)]));
      node.children.push_back(read_node(item[py::int_(1)]));
    }
  } else if (PyTuple_CheckExact(value.ptr())) {
    node.kind = Node::kTuple;
    for (py::handle item : py::reinterpret_borrow<py::tuple>(value)) node.children.push_back(read_node(item));
  } else {
    node.object = py::reinterpret_borrow<py::object>(value);
  }
  return node;
}

std::unique_ptr<Step> read_step(py::handle given) {
  auto kind = given.attr("kind").cast<std::string>();
  auto number = [&](const char* name) { return given.attr(name).cast<uint64_t>(); };
  auto pointer = [&](const char* name) { return at_address<void>(number(name)); };
  if (kind == "allocation") {
    auto step = std::make_unique<Allocation>();
    const at::Tensor& like = THPVariable_Unpack(py::object(given.attr("like")).ptr());
    step->slot = static_cast<int>(number("slot"));
    step->zero = given.attr("zero").cast<bool>();
    step->sizes = like.sizes().vec();
    step->strides = like.strides().vec();
    step->options = like.options();
    return step;
  }
  if (kind == "launch") {
    auto step = std::make_unique<Launch>();
    step->function = pointer("function");
    auto grid = given.attr("grid").cast<std::pair<unsigned, unsigned>>();
    step->grid[0] = grid.first, step->grid[1] = grid.second;
    step->threads = static_cast<unsigned>(number("threads"));
    step->shared = static_cast<unsigned>(number("shared"));
    for (py::handle item : given.attr("addresses")) step->arguments.push_back({Argument::kAddress, read_address(item), 0});
    for (py::handle item : given.attr("numbers")) {
      auto [seed, value] = item.cast<std::pair<int, int64_t>>();
      step->arguments.push_back({seed < 0 ? Argument::kNumber : Argument::kWord, {seed, 0}, value});
    }
    return step;
  }
  if (kind == "product") {
    auto step = std::make_unique<Product>();
    step->matmul = reinterpret_cast<Matmul>(number("matmul"));
    step->set_attribute = reinterpret_cast<SetAttribute>(number("set_attribute"));
    step->handle = pointer("handle"), step->operation = pointer("operation"), step->algorithm = pointer("algorithm");
    auto layouts = given.attr("layouts").cast<std::array<uint64_t, 3>>();
    for (int i = 0; i < 3; i++) step->layouts[i] = at_address<void>(layouts[i]);
    Address* places[] = {&step->alpha, &step->beta, &step->a, &step->b, &step->c, &step->workspace};
    const char* names[] = {"alpha", "beta", "a", "b", "c", "workspace"};
    for (int i = 0; i < 6; i++) *places[i] = read_address(given.attr(names[i]));
    step->workspace_size = number("workspace_size");
    auto scale_names = given.attr("scale_names").cast<std::array<int, 2>>();
    std::copy(scale_names.begin(), scale_names.end(), step->scale_names);
    for (py::handle item : given.attr("scales")) step->scales.push_back(read_address(item));
    return step;
  }
  TORCH_CHECK(kind == "call", "unknown step ", kind);
  auto step = std::make_unique<Call>();
  step->function = given.attr("function");
  step->arguments = read_node(given.attr("arguments"));
  step->results = given.attr("results").cast<std::vector<int>>();
  return step;
}

std::shared_ptr<Recipe> read_recipe(const py::object& recording) {
  auto recipe = std::make_shared<Recipe>();
  recipe->slots = recording.attr("slots").cast<size_t>();
  for (py::handle given : recording.attr("steps")) {
    recipe->steps.push_back(read_step(given.attr("step")));
    recipe->steps.back()->last_uses = given.attr("last_uses").cast<std::vector<int>>();
  }
  recipe->result = read_node(recording.attr("result"));
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

std::unordered_map<PyTypeObject*, std::vector<PyObject*>> read_types;  // class → names of its attributes
std::unordered_set<PyTypeObject*> constant_types;                      // of which equal values are one object
py::handle hooks;           // the object whose attributes are Triton's hooks, or None
py::handle current_stream;  // device index → address of the stream

enum Tag : int64_t { kTensorTag = -1000, kIntegerTag, kTupleTag, kObjectTag, kConstantTag };

// Appends what a recording depends on. Returns false for a value that cannot be looked up.
bool describe(PyObject* value, Key& key, Tensors& tensors, std::vector<PyObject*>& constants) {
  if (THPVariable_CheckExact(value)) {
    const at::Tensor& t = THPVariable_Unpack(value);
    if (t.layout() != at::kStrided || !t.has_storage()) return false;
    if (t.requires_grad() && c10::GradMode::is_enabled()) return false;  // a replay has no backward
    uint64_t address = reinterpret_cast<uint64_t>(t.const_data_ptr()) | kMaximumAlignment;
    key.insert(key.end(), {kTensorTag, t.dim(), static_cast<int64_t>(t.scalar_type()),
                           static_cast<int64_t>(t.device().type()) << 8 | static_cast<uint8_t>(t.device().index()),
                           static_cast<int64_t>(address & -address)});
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
    tensors.push_back(t);
    return true;
  }
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    key.insert(key.end(), {kIntegerTag, number});
    return !overflow && -kLargest < number && number < kLargest;
  }
  if (PyTuple_CheckExact(value)) {
    key.insert(key.end(), {kTupleTag, PyTuple_GET_SIZE(value)});
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++)
      if (!describe(PyTuple_GET_ITEM(value, i), key, tensors, constants)) return false;
    return true;
  }
  auto found = read_types.find(Py_TYPE(value));
  if (found != read_types.end()) {
    key.insert(key.end(), {kObjectTag, reinterpret_cast<int64_t>(found->first)});
    for (PyObject* name : found->second) {
      PyObject* attribute = PyObject_GetAttr(value, name);
      bool known = attribute && describe(attribute, key, tensors, constants);
      Py_XDECREF(attribute);  // the value still holds it
      if (!known) return PyErr_Clear(), false;
    }
    return true;
  }
  if (!constant_types.count(Py_TYPE(value))) return false;
  key.insert(key.end(), {kConstantTag, reinterpret_cast<int64_t>(value)});
  constants.push_back(value);
  return true;
}

// Appends the state of torch on which it depends what its functions do, as inference mode.
void describe_state(Key& key) {
  auto state = c10::impl::tls_local_dispatch_key_set();
  key.push_back(static_cast<int64_t>(state.included_.raw_repr()));
  key.push_back(static_cast<int64_t>(state.excluded_.raw_repr()));
}

struct Entry {
  std::shared_ptr<Recipe> recipe;
  int calls = 0;     // in Python, until there is a recipe
  int attempts = 0;  // to record
  std::vector<py::object> constants;  // keeps their addresses from being used again
};

struct Table {
  py::object record, plain, listings;
  int patience;
  std::unordered_map<Key, Entry, Hash> entries;
  size_t replays = 0;

  // Returns what is known of a call in Python; null if there are too many recordings already. Forgets calls that did not
  // come again before there are too many of those.
  Entry* entry(const Key& key, const std::vector<PyObject*>& constants) {
    auto found = entries.find(key);
    if (found != entries.end()) return &found->second;
    if (entries.size() >= kKept)
      for (auto each = entries.begin(); each != entries.end();)
        each = each->second.recipe ? std::next(each) : entries.erase(each);
    if (entries.size() >= kKept) return nullptr;
    Entry& made = entries[key];
    for (PyObject* c : constants) made.constants.push_back(py::reinterpret_borrow<py::object>(c));
    return &made;
  }

  // Adds what was recorded of a call with these arguments; None if nothing can be.
  void add(const py::tuple& arguments, const py::object& recording) {
    Key key;
    Tensors tensors;
    std::vector<PyObject*> constants;
    describe_state(key);
    if (!describe(arguments.ptr(), key, tensors, constants)) return;
    auto recipe = recording.is_none() ? nullptr : read_recipe(recording);  // another thread may run meanwhile
    Entry* known = entry(key, constants);
    if (!known) return;
    known->attempts++;
    if (recipe) known->recipe = std::move(recipe);
  }
};

// Returns whether nothing else wants to see what runs: no listing, no function in Triton's hooks, and no mode of torch
// that sees its functions, as a recording of a caller has. Autocast is one too: its dtype may change from call to call.
bool is_idle(const Table& table) {
  static PyObject* names[] = {PyUnicode_InternFromString("launch_enter_hook"),
                              PyUnicode_InternFromString("launch_exit_hook")};
  static PyObject* calls = PyUnicode_InternFromString("calls");
  if (PyList_GET_SIZE(table.listings.ptr()) != 0 || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  if (!c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset)) return false;
  for (PyObject* name : names) {
    if (hooks.is_none()) break;
    auto hook = py::reinterpret_steal<py::object>(PyObject_GetAttr(hooks.ptr(), name));
    if (!hook) throw py::error_already_set();
    if (hook.is_none()) continue;
    // A chain of functions, or one function.
    auto chain = py::reinterpret_steal<py::object>(PyObject_GetAttr(hook.ptr(), calls));
    if (!chain) return PyErr_Clear(), false;
    if (!PyList_Check(chain.ptr()) || PyList_GET_SIZE(chain.ptr()) != 0) return false;
  }
  return true;
}

// Called with a tuple of seeds and the arguments.
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS  // torch's own exceptions, as that of memory that is used up
  Table& table = *static_cast<Table*>(PyCapsule_GetPointer(self, nullptr));
  Key key;
  key.reserve(128);
  Run run;
  std::vector<PyObject*> constants;
  describe_state(key);
  key.insert(key.end(), {kTupleTag, count - 1});
  bool known = count > 0 && PyTuple_CheckExact(given[0]);
  for (Py_ssize_t i = 1; known && i < count; i++) known = describe(given[i], key, run.slots, constants);
  known = known && !run.slots.empty() && is_idle(table);
  Entry* entry = known ? table.entry(key, constants) : nullptr;
  if (!entry || !entry->recipe) {
    // A number of tokens that does not come again, as that of an expert, is not worth a recording.
    bool records = entry && ++entry->calls > table.patience && entry->attempts < kAttempts;
    return PyObject_Vectorcall((records ? table.record : table.plain).ptr(), given, count, nullptr);
  }
  std::shared_ptr<Recipe> recipe = entry->recipe;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[0]); i++) {
    run.seeds.push_back(PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(given[0], i)));
    if (PyErr_Occurred()) return nullptr;
  }
  run.device = run.slots[0].device();
  if (run.device.is_cuda()) run.stream = at_address<void>(current_stream(run.device.index()).cast<uint64_t>());
  run.slots.resize(recipe->slots);
  table.replays++;
  {
    py::gil_scoped_release unlocked;
    c10::DeviceGuard guard(run.device);
    at::AutoDispatchBelowADInplaceOrView raw;
    for (auto& step : recipe->steps) {
      step->run(run);
      for (int slot : step->last_uses) run.slots[slot].reset();
    }
  }
  return recipe->result.make(run.slots);
  END_HANDLE_TH_ERRORS
}

PyMethodDef call_definition = {"replayed", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                               METH_FASTCALL, "Replay a recording for the arguments, or make one."};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Table, std::shared_ptr<Table>>(m, "Table")
      .def(py::init([](py::object record, py::object plain, py::object listings, int patience) {
        auto table = std::make_shared<Table>();
        table->patience = patience;
        table->record = std::move(record), table->plain = std::move(plain), table->listings = std::move(listings);
        return table;
      }))
      .def("add", &Table::add)
      .def_readonly("replays", &Table::replays)
      .def_property_readonly("kept", [](const Table& table) {
        size_t kept = 0;
        for (auto& [key, entry] : table.entries) kept += entry.recipe != nullptr;
        return kept;
      })
      // The function must not outlive the table.
      .def("function", [](Table& table) {
        return py::reinterpret_steal<py::object>(
            PyCFunction_New(&call_definition, py::capsule(&table).release().ptr()));
      });
  m.def("configure", [](uint64_t launch, py::object view, py::object object, py::dict types, py::tuple constants,
                        py::object given_hooks, py::object stream) {
    launch_kernel = reinterpret_cast<LaunchKernel>(launch);
    view_class = view.release(), object_class = object.release();
    hooks = given_hooks.release(), current_stream = stream.release();
    for (py::handle type : constants) constant_types.insert(reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()));
    for (auto [type, names] : types) {
      std::vector<PyObject*> kept;
      for (py::handle name : names) kept.push_back(name.inc_ref().ptr());
      read_types[reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr())] = std::move(kept);
    }
  });
}
