// Which kind of device it is, and on which device and stream a thread is.

#pragma once

#include <ATen/ATen.h>

#include <array>

namespace emulated {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::DispatchKeySet;
using c10::Storage, c10::StorageImpl, c10::Stream, c10::StreamId;

constexpr DeviceIndex DEVICES = 2;
inline c10::DeviceType kind = c10::DeviceType::PrivateUse1;
inline DispatchKey dense_key = DispatchKey::PrivateUse1;
inline DispatchKey sparse_key = DispatchKey::SparsePrivateUse1;
inline DispatchKey compressed_key = DispatchKey::SparseCsrPrivateUse1;

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<StreamId, DEVICES> current_streams{};

}  // namespace emulated
