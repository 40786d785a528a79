// Tells PyTorch's C++ that there is one CUDA device: guards, streams and events that do nothing, and pinned host memory.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

static std::map<const char*, size_t> pinned;  // begin -> bytes
static std::mutex mutex;

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = std::malloc(n + 64);
    std::lock_guard<std::mutex> lock(mutex);
    pinned[static_cast<char*>(p)] = n;
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* p) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      pinned.erase(static_cast<char*>(p));
    }
    std::free(p);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  std::string showConfig() const override { return "virtual CUDA"; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override {
    static Pinned allocator;
    return &allocator;
  }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto next = pinned.upper_bound(static_cast<const char*>(p));
    return next != pinned.begin() && (--next, static_cast<const char*>(p) < next->first + next->second);
  }
};

extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(
      new c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>());
  // PyTorch may have made its hooks already and holds a reference; neither class has data members
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
