// The memory of a device, which is the host's, and who may use it again once it is freed.

#pragma once

#include <c10/core/CPUAllocator.h>

#include "order.h"

namespace emulated {

inline void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard guard(lock);
    if (!block->recorded) {
      auto& left = freed[block->home];
      for (const auto& [_, read] : block->reads) left.push_back(read);
      left.push_back(block->write);
    }
  }
  delete block;
}

inline c10::DataPtr adopt(Storage host, Device device) {
  void* data = host.mutable_data();
  return {data, new Block{std::move(host), {}, {}, lane_of(device)}, &release, device};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* cpu = c10::GetCPUAllocator();
    Storage host(Storage::use_byte_size_t(), bytes, cpu->allocate(bytes), cpu, true);
    return adopt(std::move(host), Device(kind, current_device));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
inline Memory memory;

inline Block* block_of(const Tensor& t) {
  if (!t.defined() || t.device().type() != kind || !t.has_storage()) return nullptr;
  return static_cast<Block*>(t.storage().data_ptr().get_context());
}

}  // namespace emulated
