// A generator for each device: it has the host's algorithm, and a state of its own.

#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "device.h"

namespace emulated {

struct Generator final : c10::GeneratorImpl {
  c10::intrusive_ptr<at::CPUGeneratorImpl> host;

  explicit Generator(DeviceIndex index, c10::intrusive_ptr<at::CPUGeneratorImpl> state = {})
      : GeneratorImpl(Device(kind, index), DispatchKeySet(dense_key)),
        host(state ? std::move(state) : c10::make_intrusive<at::CPUGeneratorImpl>()) {}
  void set_current_seed(uint64_t seed) override { host->set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offset"); }
  uint64_t current_seed() const override { return host->current_seed(); }
  uint64_t seed() override { return host->seed(); }
  void set_state(const c10::TensorImpl& state) override { host->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host->get_state(); }
  Generator* clone_impl() const override {
    auto copy = c10::make_intrusive<at::CPUGeneratorImpl>();
    copy->set_state(*host->get_state());
    return new Generator(device_.index(), std::move(copy));
  }
};

inline const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < DEVICES; ++i) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

// Operators that take no generator use the host's default one: lend it the device's state.
struct Lent {
  at::Generator host = at::detail::getDefaultCPUGenerator();
  Generator* device = nullptr;
  c10::intrusive_ptr<c10::TensorImpl> kept;

  Lent(bool needed, DeviceIndex index) {
    if (!needed) return;
    device = static_cast<Generator*>(default_generator(index).unsafeGetGeneratorImpl());
    kept = host.unsafeGetGeneratorImpl()->get_state();
    host.unsafeGetGeneratorImpl()->set_state(*device->get_state());
  }
  ~Lent() {
    if (!device) return;
    device->set_state(*host.unsafeGetGeneratorImpl()->get_state());
    host.unsafeGetGeneratorImpl()->set_state(*kept);
  }
};

}  // namespace emulated
