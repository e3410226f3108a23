// A c10d backend that forwards to another one, which can be exchanged while everybody keeps a reference to this one.
//
//   state of the process            what a collective does
//   live                            forwards to the inner backend
//   rehearsing                      nothing; its result is as if every other rank had given what we gave
//   failing, a step is open         the same nothing ("poison"), and errors of operations in flight are swallowed: the step's body
//                                   finishes on garbage, so that DDP, FSDP and pipelines complete their own state machines
//   failing, no step is open        throws: user code outside a step must not take garbage for a result
//
// A lost connection in an open step makes the process failing by itself; Python reads the first message. The state belongs to the
// process, not to a group. Each shim counts what it started and what completed, so that a group which was idle when a rank died can
// keep its connections.
//
// Nobody waits inside the inner backend: gloo can lose the error of an operation (a send that met a closed connection is never told), and
// its waiter would hang until the operation's timeout. Waiters listen to ``abandon`` as well: Python calls it when a rank was lost, the
// connections are cut, and no thread of the backend moves any more; what is still unfinished then never will be.
//
// A *queued* backend (NCCL) only queues: that an operation returned, was waited for, or that its future is complete, says nothing about
// whether it has run. So nothing is followed there; Python says when the device has run everything (``complete``), which counts all that
// was started as completed. Its waiters do not block, its aborted operations end by themselves.
// What tmrun itself communicates goes through an *own* shim: nothing of it is hidden or skipped, but its waiters can be let go too.
// May not know: steps, migrations, Python objects.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using namespace c10d;
using BackendPtr = c10::intrusive_ptr<Backend>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Future = c10::ivalue::Future;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

struct State {
  std::mutex mutex;  // held while an operation is counted in, and while failing is set: no operation slips in between
  bool rehearsing = false, armed = false, failing = false;
  int64_t swallowed = 0;
  int64_t hidden = 0;  // operations skipped or swallowed, ever
  std::string first;
  std::vector<std::string> signs;
  std::condition_variable changed;  // an operation ended, or all were abandoned
  int64_t abandoned = 0;            // how often
  std::vector<std::weak_ptr<std::function<void()>>> to_abandon;
};

State& state() {
  static auto* the = new State();  // never destroyed: gloo's threads outlive main
  return *the;
}

struct Counts {
  std::atomic<int64_t> started{0}, completed{0}, failed{0};  // collectives
  std::atomic<int64_t> p2p{0}, pairwise{0};                  // sends and receives, and those of them outside a batch
  std::atomic<int64_t> called{0};                            // anything, whether it was forwarded or not
};
using CountsPtr = std::shared_ptr<Counts>;

bool is_lost_connection(const std::string& text) {
  for (const auto& sign : state().signs)
    if (text.find(sign) != std::string::npos) return true;
  return false;
}

// Whether an error is ours to hide; if so the process is failing from now on.
bool swallow(const std::string& text) {
  std::lock_guard<std::mutex> guard(state().mutex);
  if (!state().armed || !(state().failing || is_lost_connection(text))) return false;
  state().failing = true;
  state().hidden++;
  if (state().swallowed++ == 0) state().first = text;
  return true;
}

bool swallow(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return swallow(std::string(known.what()));
  } catch (...) {
    return false;
  }
}

c10::intrusive_ptr<Future> new_future(const Tensors& tensors) {
  std::vector<c10::Device> devices;
  for (const auto& tensor : tensors)
    if (!tensor.is_cpu() && std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) devices.push_back(tensor.device());
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()), devices);
}

const char* const LOST = "Connection closed: a rank was lost";

std::exception_ptr lost() {
  try {
    TORCH_CHECK_WITH(DistBackendError, false, LOST);
  } catch (...) {
    return std::current_exception();
  }
}

// The end of one operation: told by the backend, or given up.
struct End {
  bool told = false;
  std::exception_ptr error;
  int64_t begun = 0;  // state().abandoned then

  static std::shared_ptr<End> begin() {
    auto end = std::make_shared<End>();
    std::lock_guard<std::mutex> guard(state().mutex);
    end->begun = state().abandoned;
    return end;
  }
  void tell(const std::exception_ptr& how) {
    std::lock_guard<std::mutex> guard(state().mutex);
    told = true;
    error = how;
    state().changed.notify_all();
  }
  // False: given up.
  bool wait(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(state().mutex);
    auto over = [&] { return told || state().abandoned != begun; };
    if (timeout == kNoTimeout)
      state().changed.wait(lock, over);
    else
      TORCH_CHECK(state().changed.wait_for(lock, timeout, over), "Operation timed out!");
    return told;
  }
};
using EndPtr = std::shared_ptr<End>;
using Abandon = std::shared_ptr<std::function<void()>>;

// ``what`` is called at the next ``abandon``, unless the result is dropped before.
Abandon on_abandon(std::function<void()> what) {
  auto kept = std::make_shared<std::function<void()>>(std::move(what));
  std::lock_guard<std::mutex> guard(state().mutex);
  auto& all = state().to_abandon;
  if (all.size() >= 64) all.erase(std::remove_if(all.begin(), all.end(), [](auto& each) { return each.expired(); }), all.end());
  all.push_back(kept);
  return kept;
}

void abandon() {
  std::vector<std::weak_ptr<std::function<void()>>> all;
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    state().abandoned++;
    all.swap(state().to_abandon);
    state().changed.notify_all();
  }
  for (auto& each : all)
    if (auto what = each.lock()) (*what)();
}

struct DoneWork : Work {
  Tensors tensors;
  explicit DoneWork(Tensors results) : tensors(std::move(results)) { finish(); }
  bool wait(std::chrono::milliseconds) override { return true; }
  bool isSuccess() const override { return true; }
  int sourceRank() const override { return 0; }
  Tensors result() override { return tensors; }
  c10::intrusive_ptr<Future> getFuture() override {
    auto future = new_future(tensors);
    future->markCompleted(c10::IValue(tensors));
    return future;
  }
};

bool on_device(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return !tensor.is_cpu(); });
}

struct ForwardedWork : Work {
  WorkPtr inner;
  Tensors tensors;
  EndPtr end;  // not set for sends and receives, which are waited for by their own means, nor for what is queued
  const bool queued, own;
  Abandon wake;
  ForwardedWork(WorkPtr work, Tensors results, EndPtr told, bool queued, bool own)
      : inner(std::move(work)), tensors(std::move(results)), end(std::move(told)), queued(queued), own(own) {
    if (!end && !queued) wake = on_abandon([to = inner] { to->abort(); });
  }
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  int sourceRank() const override { return inner->sourceRank(); }
  Tensors result() override { return inner->result(); }
  void synchronize() override { inner->synchronize(); }
  void blockCurrentStream() override { inner->blockCurrentStream(); }
  uint64_t getSequencenumber() const override { return inner->getSequencenumber(); }
  void abort() override { inner->abort(); }
  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool done = end ? end->wait(timeout) : inner->wait(timeout);
      TORCH_CHECK_WITH(DistBackendError, done, LOST);
      if (end && end->error) std::rethrow_exception(end->error);
      if (end && on_device(tensors)) inner->synchronize();  // gloo copies its results back on a stream of its own
      return true;
    } catch (const std::exception& error) {
      if (!own && swallow(std::string(error.what()))) return true;
      throw;
    }
  }
  // On a device, whoever waits for a future makes a stream wait. NCCL's is complete when the operation is queued, and its streams are known
  // to it alone: it is passed on as it is. gloo's knows of no streams at all, though its results come back on streams of its own.
  c10::intrusive_ptr<Future> getFuture() override {
    const bool device = on_device(tensors);
    if (queued && (device || tensors.empty())) return inner->getFuture();
    auto outer = new_future(tensors);
    auto taken = std::make_shared<std::atomic_flag>();
    auto fail = [outer, results = tensors, own = own](const std::exception_ptr& error) {
      !own && swallow(error) ? outer->markCompleted(c10::IValue(results)) : outer->setError(error);
    };
    wake = on_abandon([taken, fail] {
      if (!taken->test_and_set()) fail(lost());
    });
    inner->getFuture()->addCallback(
        [outer, taken, fail, work = device ? inner : WorkPtr(), kept = wake](Future& done) {
          if (taken->test_and_set()) return;
          if (done.hasError()) {
            fail(done.exception_ptr());
          } else if (work) {
            work->synchronize();
            outer->markCompleted(done.value());
          } else {
            outer->markCompleted(done.value(), done.storages());
          }
        },
        false);
    return outer;
  }
};

Tensors flat(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

struct Shim : Backend {
  Shim(int rank, int size, std::string name, bool queued, bool own)
      : Backend(rank, size), name_(std::move(name)), queued_(queued), own_(own) {}

  BackendPtr inner() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return inner_;
  }
  // The replaced backend is kept until ``release``: destroying it joins threads, which takes milliseconds.
  void swap(const BackendPtr& next) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (inner_) retired_.push_back(inner_);
    inner_ = next;
    closed_.clear();
    counts_ = std::make_shared<Counts>();
  }
  void close(const std::string& reason) {
    std::lock_guard<std::mutex> guard(mutex_);
    closed_ = reason;
  }
  void release() {
    std::vector<BackendPtr> old;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      old.swap(retired_);
    }
  }
  CountsPtr counts() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return counts_;
  }
  void complete() {
    if (!queued_) return;
    std::lock_guard<std::mutex> process(state().mutex);
    auto now = counts();
    now->completed = now->started - now->failed;
  }

  const std::string getBackendName() const override { return inner() ? inner()->getBackendName() : name_; }
  void setSequenceNumberForGroup() override {
    if (auto to = inner()) to->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override { return inner() ? inner()->getSequenceNumberForGroup() : 0; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    if (auto to = inner()) to->setTimeout(timeout);
  }
  bool supportsCoalescing() const override { return inner() && inner()->supportsCoalescing(); }
  // What was opened is closed whatever happened since: NCCL would take all later calls of this thread for a part of it.
  void startCoalescing() override {
    auto to = inner();
    {
      std::lock_guard<std::mutex> process(state().mutex);
      if (state().rehearsing || (state().failing && state().armed)) to = nullptr;
    }
    if (to) to->startCoalescing();
    std::lock_guard<std::mutex> guard(mutex_);
    coalescing_ = to;
  }
  WorkPtr endCoalescing() override {
    BackendPtr to;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      std::swap(to, coalescing_);
    }
    try {
      auto work = to ? to->endCoalescing() : nullptr;
      if (work) return c10::make_intrusive<ForwardedWork>(work, Tensors{}, nullptr, queued_, own_);
    } catch (const std::exception& error) {
      if (own_ || !swallow(std::string(error.what()))) throw;
    }
    return c10::make_intrusive<DoneWork>(Tensors{});
  }
  void abort() override {
    if (auto to = inner()) to->abort();
  }
  void shutdown() override {
    if (auto to = inner()) to->shutdown();
  }

  // ``local`` makes the result that nobody else took part in, ``call`` the real one.
  template <class Local, class Call>
  WorkPtr run(const Tensors& results, Local local, Call call, bool p2p = false) {
    at::AutoDispatchBelowAutograd below;
    BackendPtr to;
    CountsPtr counts;
    if (!enter(to, counts, p2p)) {
      local();
      return c10::make_intrusive<DoneWork>(results);
    }
    try {
      auto work = call(to);
      return work ? follow(work, results, counts, p2p) : work;
    } catch (const std::exception& error) {
      if (!p2p) counts->failed++;
      if (!own_ && swallow(std::string(error.what()))) return c10::make_intrusive<DoneWork>(results);
      throw;
    }
  }
  template <class Call>
  WorkPtr run(const Tensors& results, Call call) {
    return run(results, [] {}, call);
  }

  WorkPtr broadcast(Tensors& t, const BroadcastOptions& o) override {
    return run(t, [&](auto& to) { return to->broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const AllreduceOptions& o) override {
    return run(t, [&](auto& to) { return to->allreduce(t, o); });
  }
  WorkPtr allreduce_sparse(Tensors& t, const AllreduceOptions& o) override {
    return run(t, [&](auto& to) { return to->allreduce_sparse(t, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const AllreduceCoalescedOptions& o) override {
    return run(t, [&](auto& to) { return to->allreduce_coalesced(t, o); });
  }
  WorkPtr reduce(Tensors& t, const ReduceOptions& o) override {
    return run(t, [&](auto& to) { return to->reduce(t, o); });
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const AllgatherOptions& o) override {
    return run(flat(out), [&] { repeat(out, in); }, [&](auto& to) { return to->allgather(out, in, o); });
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in, const AllgatherOptions& o) override {
    auto local = [&] {
      for (auto& list : out)
        for (size_t k = 0; k < list.size(); k++) list[k].copy_(in[k]);
    };
    return run(flat(out), local, [&](auto& to) { return to->allgather_coalesced(out, in, o); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const AllgatherOptions& o) override {
    return run({out}, [&] { repeat(out, in); }, [&](auto& to) { return to->_allgather_base(out, in, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& o) override {
    auto local = [&] {
      for (size_t k = 0; k < out.size(); k++) repeat(out[k], in[k]);
    };
    return run(out, local, [&](auto& to) { return to->allgather_into_tensor_coalesced(out, in, o); });
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const GatherOptions& o) override {
    return run(flat(out), [&] { repeat(out, in); }, [&](auto& to) { return to->gather(out, in, o); });
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const ScatterOptions& o) override {
    auto local = [&] {
      for (size_t k = 0; k < out.size(); k++) k < in.size() ? out[k].copy_(in[k][rank_]) : out[k].zero_();
    };
    return run(out, local, [&](auto& to) { return to->scatter(out, in, o); });
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const ReduceScatterOptions& o) override {
    auto local = [&] {
      for (size_t k = 0; k < out.size(); k++) out[k].copy_(in[k][rank_]);
    };
    return run(out, local, [&](auto& to) { return to->reduce_scatter(out, in, o); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const ReduceScatterOptions& o) override {
    return run({out}, [&] { part(out, in); }, [&](auto& to) { return to->_reduce_scatter_base(out, in, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const ReduceScatterOptions& o) override {
    auto local = [&] {
      for (size_t k = 0; k < out.size(); k++) part(out[k], in[k]);
    };
    return run(out, local, [&](auto& to) { return to->reduce_scatter_tensor_coalesced(out, in, o); });
  }
  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& a, std::vector<int64_t>& b, const AllToAllOptions& o) override {
    auto local = [&] { out.numel() == in.numel() ? out.reshape(-1).copy_(in.reshape(-1)) : out.zero_(); };
    return run({out}, local, [&](auto& to) { return to->alltoall_base(out, in, a, b, o); });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const AllToAllOptions& o) override {
    return run(out, [&] { zero(out); }, [&](auto& to) { return to->alltoall(out, in, o); });
  }
  WorkPtr send(Tensors& t, int peer, int tag) override {
    return run(t, [] {}, [&](auto& to) { return to->send(t, peer, tag); }, true);
  }
  WorkPtr recv(Tensors& t, int peer, int tag) override {
    return run(t, [&] { zero(t); }, [&](auto& to) { return to->recv(t, peer, tag); }, true);
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    return run(t, [&] { zero(t); }, [&](auto& to) { return to->recvAnysource(t, tag); }, true);
  }
  WorkPtr barrier(const BarrierOptions& o) override {
    return run({}, [&](auto& to) { return to->barrier(o); });
  }
  void monitoredBarrier(const BarrierOptions& o, bool all) override {
    run({}, [] {}, [&](auto& to) { to->monitoredBarrier(o, all); return WorkPtr(c10::make_intrusive<DoneWork>(Tensors{})); }, true);
  }

 private:
  mutable std::mutex mutex_;
  BackendPtr inner_, coalescing_;
  const std::string name_;
  const bool queued_, own_;
  std::vector<BackendPtr> retired_;
  std::string closed_;
  CountsPtr counts_ = std::make_shared<Counts>();

  // Whether to call the inner backend, which is then counted as started.
  bool enter(BackendPtr& to, CountsPtr& counts, bool p2p) {
    std::lock_guard<std::mutex> process(state().mutex);
    std::lock_guard<std::mutex> guard(mutex_);
    counts_->called++;
    if (!own_ && (state().rehearsing || (state().failing && state().armed))) {
      if (!state().rehearsing) state().hidden++;
      return false;
    }
    TORCH_CHECK_WITH(DistBackendError, own_ || !state().failing, LOST);
    TORCH_CHECK(closed_.empty(), closed_);
    TORCH_CHECK(inner_, "process group without a communicator");
    to = inner_;
    counts = counts_;
    (p2p ? counts->p2p : counts->started)++;
    if (p2p && !coalescing_) counts->pairwise++;
    return true;
  }
  // Sends and receives are counted, not followed: ranks take different parts in them. gloo's reduce_scatter has no future, and does its
  // last part in ``wait``: a thread of its own waits for it.
  WorkPtr follow(const WorkPtr& work, const Tensors& results, const CountsPtr& counts, bool p2p) {
    if (p2p || queued_) return c10::make_intrusive<ForwardedWork>(work, results, nullptr, queued_, own_);
    auto end = End::begin();
    auto ended = [end, counts](const std::exception_ptr& error) {
      error ? counts->failed++ : counts->completed++;
      end->tell(error);
    };
    c10::intrusive_ptr<Future> future;
    try {
      future = work->getFuture();
    } catch (const c10::Error&) {
    }
    if (future)
      future->addCallback([ended](Future& done) { ended(done.hasError() ? done.exception_ptr() : nullptr); }, false);
    else
      std::thread([work, ended] {
        at::AutoDispatchBelowAutograd below;
        try {
          work->wait();
          ended(nullptr);
        } catch (...) {
          ended(std::current_exception());
        }
      }).detach();
    return c10::make_intrusive<ForwardedWork>(work, results, end, false, own_);
  }
  void repeat(at::Tensor& out, const at::Tensor& in) const {
    for (auto& piece : out.reshape(-1).chunk(size_)) piece.copy_(in.reshape(-1));
  }
  static void repeat(TensorLists& out, const Tensors& in) {
    for (size_t k = 0; k < out.size(); k++)
      for (auto& piece : out[k]) piece.copy_(in[k]);
  }
  void part(at::Tensor& out, const at::Tensor& in) const { out.view(-1).copy_(in.reshape(-1).chunk(size_)[rank_]); }
  static void zero(Tensors& tensors) {
    for (auto& tensor : tensors) tensor.zero_();
  }
};

py::dict counts_of(const Shim& shim) {
  using namespace py::literals;
  auto counts = shim.counts();
  return py::dict(
      "started"_a = counts->started.load(), "completed"_a = counts->completed.load(), "failed"_a = counts->failed.load(),
      "p2p"_a = counts->p2p.load(), "pairwise"_a = counts->pairwise.load(), "called"_a = counts->called.load());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Free = py::call_guard<py::gil_scoped_release>;
  py::module_::import("torch.distributed");
  py::class_<Shim, Backend, c10::intrusive_ptr<Shim>>(module, "Shim")
      .def(
          py::init([](int rank, int size, std::string name, bool queued, bool own) {
            return c10::make_intrusive<Shim>(rank, size, name, queued, own);
          }),
          py::arg("rank"), py::arg("size"), py::arg("name") = "gloo", py::arg("queued") = false, py::arg("own") = false)
      .def("swap", &Shim::swap, Free())
      .def("close", &Shim::close, Free())
      .def("release", &Shim::release, Free())
      .def("complete", &Shim::complete, Free())
      .def("_set_default_timeout", [](Shim& shim, std::chrono::milliseconds timeout) { shim.setTimeout(timeout); })
      .def("counts", &counts_of);
  module.def("signs", [](std::vector<std::string> signs) {
    std::lock_guard<std::mutex> guard(state().mutex);
    state().signs = std::move(signs);
  });
  module.def("rehearse", [](bool on) {
    std::lock_guard<std::mutex> guard(state().mutex);
    state().rehearsing = on;
  });
  module.def("arm", [](bool on) {
    std::lock_guard<std::mutex> guard(state().mutex);
    state().armed = on;
  });
  module.def("fail", [](bool on) {
    std::lock_guard<std::mutex> guard(state().mutex);
    state().failing = on;
    if (on) return;
    state().swallowed = 0;
    state().first.clear();
  });
  module.def("abandon", &abandon, Free());
  module.def("failing", [] {
    std::lock_guard<std::mutex> guard(state().mutex);
    return state().failing;
  });
  module.def("armed", [] {
    std::lock_guard<std::mutex> guard(state().mutex);
    return state().armed;
  });
  module.def("hidden", [] {
    std::lock_guard<std::mutex> guard(state().mutex);
    return state().hidden;
  });
  module.def("first_error", [] {
    std::lock_guard<std::mutex> guard(state().mutex);
    return state().first;
  });
}
