// Every operator runs in the host's kernel.

#pragma once

#include <torch/library.h>

#include "arguments.h"
#include "generators.h"

namespace emulated {

using c10::IValue;

// Besides the pointwise ones, operators that take a tensor of the host for a number.
inline const std::set<std::string> TAKES_NUMBER = {
    "aten::fill_", "aten::fill", "aten::floor_divide", "aten::index_fill_", "aten::index_fill",
    "aten::bernoulli_",
    "aten::_fused_sgd_", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_adagrad_"};

// What these return depends on numbers, or they read them: the host waits.
inline const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::unique_dim", "aten::unique_consecutive", "aten::_unique", "aten::_unique2",
    "aten::is_nonzero", "aten::bincount", "aten::repeat_interleave", "aten::unique_dim_consecutive"};

template <class F>
IValue each_tensor(const IValue& value, F moved) {
  if (value.isTensor()) return moved(value.toTensor(), false);
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& t : value.toTensorVector()) all.push_back(moved(t, true));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
      all.push_back(t ? std::optional<Tensor>(moved(*t, true)) : std::nullopt);
    }
    return all;
  }
  return value;
}

inline bool has_mask(const IValue& indices) {
  if (!indices.isOptionalTensorList()) return false;
  for (const std::optional<Tensor>& t : indices.toOptionalTensorVector()) {
    if (t && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
  }
  return false;
}

inline bool waits_for(const Call& call, const torch::jit::Stack& inputs) {
  if (WAITING.count(call.name)) {
    return call.name != "aten::repeat_interleave" || inputs.back().isNone();
  }
  if (call.name.rfind("aten::index", 0) == 0 && inputs.size() > 1) {
    return has_mask(inputs.at(1));  // of which it finds the nonzero entries
  }
  if (call.name == "aten::copy_") {  // to or from memory that is not pinned
    const bool crosses = !call.on_host.empty();
    return crosses && !inputs.at(2).toBool();
  }
  return false;
}

inline void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, DispatchKey host_key) {
  const auto& schema = op.schema();
  Call call;
  call.name = schema.name();
  call.takes_numbers = op.hasTag(at::Tag::pointwise) || TAKES_NUMBER.count(call.name);
  const size_t begin = stack->size() - schema.arguments().size();
  const torch::jit::Stack inputs(stack->begin() + begin, stack->end());
  bool has_generator = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    IValue& value = (*stack)[begin + i];
    if (value.isDevice() && value.toDevice().type() == kind) {
      call.on(value.toDevice());
      value = Device(c10::kCPU);
    } else if (value.isGenerator()) {
      auto* given = dynamic_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl());
      TORCH_CHECK(given, "Expected a '", kind, "' device type for generator but found 'cpu'");
      value = at::Generator(given->host);
      has_generator = true;
    } else {
      value = each_tensor(inputs[i], [&](const Tensor& t, bool in_list) {
        return call.to_host(t, in_list);
      });
    }
  }
  TORCH_CHECK(call.device, call.name, " on ", kind, " has no tensor of it");
  for (const Tensor& t : call.on_host) {
    TORCH_CHECK(
        ACROSS.count(call.name),
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *call.device, " and ", t.device(), "! (", call.name, ")");
  }
  const Lane lane = lane_of(*call.device);
  int64_t at = 0;
  {
    std::lock_guard guard(lock);
    merge(clocks[lane], host_clock);
    at = ++clocks[lane][lane];
    for (const Access& before : std::exchange(freed[lane], {})) {
      require(lane, before, "memory used again", call.name);
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && !alias->isWrite()) continue;  // a view reads nothing
      each_tensor(inputs[i], [&](const Tensor& t, bool) {
        if (auto* block = block_of(t)) touch(*block, lane, at, call.name, alias != nullptr);
        return t;
      });
    }
  }
  if (waits_for(call, inputs)) wait(call.name, clocks[lane]);
  const size_t arguments = call.pairs.size();
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Lent lent(
        !has_generator && op.hasTag(at::Tag::nondeterministic_seeded), call.device->index());
    op.redispatchBoxed(DispatchKeySet(host_key), stack);
  }
  call.write_back(arguments);
  std::lock_guard guard(lock);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = each_tensor((*stack)[i], [&](const Tensor& t, bool) {
      const Tensor made = call.to_device(t);
      auto* block = block_of(made);
      if (block && !block->write.at) block->write = {lane, at, call.name};
      return made;
    });
  }
}

inline void run_dense(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, stack, DispatchKey::CPU);
}

inline void run_sparse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, stack, DispatchKey::SparseCPU);
}

inline void run_compressed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, stack, DispatchKey::SparseCsrCPU);
}

inline Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &memory, DispatchKeySet(dense_key), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &memory, DispatchKeySet(dense_key), c10::dtype_or_default(dtype));
}

inline Tensor& set_nothing(Tensor& self) {
  Storage none(Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true);
  return self.set_(std::move(none), 0, {0}, {});
}

inline void record_stream(Tensor& self, Stream) {
  std::lock_guard guard(lock);
  if (auto* block = block_of(self)) block->recorded = true;
}

}  // namespace emulated
