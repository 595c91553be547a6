// The arguments of one operator as tensors of the host that share their memory, and its results as
// tensors of the device.

#pragma once

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

#include <set>
#include <unordered_map>

#include "memory.h"

namespace emulated {

// Of these tensors may be on several devices.
inline const std::set<std::string> ACROSS = {
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::index",
    "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
inline bool is_sparse(const Tensor& t) {
  return t.layout() != at::kStrided && !t.has_storage();
}

inline Tensor sparse_like(
    const Tensor& t, c10::DeviceType type, DispatchKey of_entries, DispatchKey of_compressed) {
  if (t.layout() == at::kSparse) {
    return at::detail::make_tensor<at::SparseTensorImpl>(DispatchKeySet(of_entries), t.dtype());
  }
  return at::detail::make_tensor<at::SparseCsrTensorImpl>(
      DispatchKeySet(of_compressed), Device(type, type == kind ? 0 : -1), t.layout(), t.dtype());
}

struct Call {
  std::string name;
  bool takes_numbers;
  std::optional<Device> device;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // device, host
  std::unordered_map<StorageImpl*, std::pair<Storage, Storage>> storages;  // by device's; device, host
  std::unordered_map<StorageImpl*, StorageImpl*> back;                     // host to device

  void on(Device found) {
    if (found.index() < 0) found = Device(kind, current_device);
    if (!device) device = found;
    TORCH_CHECK(
        *device == found || ACROSS.count(name),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device,
        " and ", found, "! (", name, ")");
  }

  void pair_storages(const Storage& device, const Storage& host) {
    storages[device.unsafeGetStorageImpl()] = {device, host};
    back[host.unsafeGetStorageImpl()] = device.unsafeGetStorageImpl();
  }

  Tensor like(const Tensor& t, Storage storage, DispatchKey key) {
    DispatchKeySet keys(key);
    if (t._is_zerotensor()) keys = keys.add(DispatchKey::ZeroTensor);
    Tensor made;
    for (const auto& [theirs, _] : pairs) {
      if (theirs.has_storage() && theirs.storage().is_alias_of(storage)) {
        keys = theirs.key_set() - DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative});
        made = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, std::move(storage), keys, t.dtype());
        break;
      }
    }
    if (!made.defined()) {
      made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, t.dtype());
    }
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj()) impl->_set_conj(true);
    if (t.is_neg()) impl->_set_neg(true);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }

  template <class F>
  void copy_sparse(const Tensor& from, const Tensor& to, F moved) {
    if (from.layout() != at::kSparse) {
      auto* parts = static_cast<at::SparseCsrTensorImpl*>(from.unsafeGetTensorImpl());
      static_cast<at::SparseCsrTensorImpl*>(to.unsafeGetTensorImpl())
          ->set_member_tensors(
              moved(parts->compressed_indices()), moved(parts->plain_indices()),
              moved(parts->values()), parts->sym_sizes());
      return;
    }
    const auto* source = static_cast<at::SparseTensorImpl*>(from.unsafeGetTensorImpl());
    auto* target = static_cast<at::SparseTensorImpl*>(to.unsafeGetTensorImpl());
    target->raw_resize_(source->sparse_dim(), source->dense_dim(), source->sizes());
    target->set_indices_and_values_unsafe(moved(source->indices()), moved(source->values()));
    target->set_coalesced(source->coalesced());
  }

  Tensor to_host(const Tensor& t, bool in_list) {
    if (!t.defined()) return t;
    if (t.device().type() != kind) {
      const bool is_number = t.dim() == 0 && !in_list && takes_numbers;
      if (!is_number && t.layout() == at::kStrided) on_host.push_back(t);
      return t;
    }
    on(t.device());
    for (const auto& [theirs, ours] : pairs) {
      if (theirs.is_same(t)) return ours;
    }
    Tensor host;
    if (is_sparse(t)) {
      host = sparse_like(t, c10::kCPU, DispatchKey::SparseCPU, DispatchKey::SparseCsrCPU);
      copy_sparse(t, host, [&](const Tensor& part) { return to_host(part, false); });
    } else {
      TORCH_CHECK(t.has_storage(), name, ": layout ", t.layout(), " is not emulated");
      auto* impl = t.storage().unsafeGetStorageImpl();
      if (!storages.count(impl)) {
        c10::DataPtr data(impl->mutable_data(), Device(c10::kCPU));
        pair_storages(
            t.storage(), Storage(Storage::use_byte_size_t(), impl->nbytes(), std::move(data),
                                 c10::GetCPUAllocator(), true));
      }
      host = like(t, storages[impl].second, DispatchKey::CPU);
    }
    pairs.emplace_back(t, host);
    return host;
  }

  Tensor to_device(const Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (const auto& [theirs, ours] : pairs) {
      if (ours.is_same(t)) return theirs;
    }
    Tensor made;
    if (is_sparse(t)) {
      made = sparse_like(t, kind, sparse_key, compressed_key);
      copy_sparse(t, made, [&](const Tensor& part) { return to_device(part); });
    } else {
      TORCH_CHECK(t.has_storage(), name, ": layout ", t.layout(), " is not emulated");
      const Storage& host = t.storage();
      if (!back.count(host.unsafeGetStorageImpl())) {
        pair_storages(
            Storage(Storage::use_byte_size_t(), host.nbytes(), adopt(host, *device), &memory, true),
            host);
      }
      made = like(t, storages[back[host.unsafeGetStorageImpl()]].first, dense_key);
    }
    pairs.emplace_back(made, t);
    return made;
  }

  // Give the arguments that the kernel has resized, or whose parts it has replaced, what they have.
  void write_back(size_t arguments) {
    for (auto& [ours, both] : storages) {
      const Storage& host = both.second;
      if (host.data() != ours->data()) ours->set_data_ptr_noswap(adopt(host, *device));
      if (host.nbytes() != ours->nbytes()) ours->set_nbytes(host.nbytes());
    }
    for (size_t i = 0; i < arguments; ++i) {
      const auto [theirs, ours] = pairs[i];
      if (is_sparse(ours)) {
        copy_sparse(ours, theirs, [&](const Tensor& part) { return to_device(part); });
      } else if (
          theirs.sizes() != ours.sizes() || theirs.strides() != ours.strides() ||
          theirs.storage_offset() != ours.storage_offset()) {
        theirs.unsafeGetTensorImpl()->set_sizes_and_strides(
            ours.sizes(), ours.strides(), ours.storage_offset());
      }
    }
  }

  std::vector<Tensor> on_host;
};

}  // namespace emulated
