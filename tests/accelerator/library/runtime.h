// What torch asks of a device: guards, streams and events, hooks.

#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generators.h"
#include "memory.h"

namespace emulated {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  Device exchangeDevice(Device to) const override {
    return Device(kind, std::exchange(current_device, to.index()));
  }
  Device getDevice() const override { return Device(kind, current_device); }
  void setDevice(Device to) const override { current_device = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current_device = to.index(); }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Stream getStream(Device of) const override {
    if (of.index() < 0) of = getDevice();
    return Stream(Stream::UNSAFE, of, current_streams[of.index()]);
  }
  Stream getDefaultStream(Device of) const override { return Stream(Stream::UNSAFE, of, 0); }
  Stream getNewStream(Device of, int) const override {
    if (of.index() < 0) of = getDevice();
    std::lock_guard guard(lock);
    return Stream(Stream::UNSAFE, of, ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device of, bool) const override { return getNewStream(of, 0); }
  Stream exchangeStream(Stream to) const override {
    return Stream(
        Stream::UNSAFE, to.device(), std::exchange(current_streams[to.device_index()], to.id()));
  }
  void record(void** event, const Stream& on, DeviceIndex, c10::EventFlag) const override {
    std::lock_guard guard(lock);
    if (!*event) *event = new Clock();
    *static_cast<Clock*>(*event) = clocks[{on.device_index(), on.id()}];
  }
  void block(void* event, const Stream& stream) const override {
    std::lock_guard guard(lock);
    if (event) merge(clocks[{stream.device_index(), stream.id()}], *static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Clock*>(event);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event) wait("synchronize of an event", *static_cast<Clock*>(event));
  }
  void synchronizeStream(const Stream& on) const override {
    wait("synchronize of a stream", clocks[{on.device_index(), on.id()}]);
  }
  void synchronizeDevice(DeviceIndex) const override {
    Clock done;
    for (const auto& [_, clock] : clocks) merge(done, clock);
    wait("synchronize of a device", done);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream&) const override {
    std::lock_guard guard(lock);
    if (data.get_context()) static_cast<Block*>(data.get_context())->recorded = true;
  }
};

template <class Interface>
struct Hooks final : Interface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex to) const override { current_device = to; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override {
    return std::exchange(current_device, to);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override {
    return to < 0 ? current_device : exchangeDevice(to);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kind, current_device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

struct CudaHooks : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  DeviceIndex current_device() const override { return emulated::current_device; }
  int getNumGPUs() const override { return DEVICES; }
};

struct OtherHooks : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = impl->allocator()->allocate(bytes);
    memory.copy_data(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

}  // namespace emulated
