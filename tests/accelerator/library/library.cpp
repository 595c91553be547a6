// An accelerator whose memory is the host's: what a second kind of device does, without one.
//
// It has two devices, so that the autograd engine has a thread for each; generators of its own;
// streams and events. Every operator runs in the host's kernel, on tensors that share the memory of
// its arguments: results have the CPU's bits, views stay views. What a GPU would refuse (tensors of
// two devices) raises; what it would wait for is counted; what two streams touch in no order is
// reported.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/set_native.h>
#include <torch/library.h>

#include "operators.h"
#include "runtime.h"

namespace emulated {

int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // that of plain operators
}

// Each operator that has a kernel for the host gets one for the device. A fallback alone would leave
// to others what has a common kernel besides.
template <c10::BoxedKernel::BoxedKernelFunction* kernel>
void run_on_host(DispatchKey host_key, DispatchKey device_key) {
  using torch::CppFunction, torch::Library;
  // Never destroyed: the engine's threads outlive what is static.
  auto& aten = *new Library(Library::IMPL, "aten", device_key, __FILE__, __LINE__);
  auto& all = *new Library(Library::IMPL, "_", device_key, __FILE__, __LINE__);
  const bool is_dense = host_key == DispatchKey::CPU;
  const std::set<std::string> own = {"aten::empty.memory_format", "aten::empty_strided"};
  for (const auto& op : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(host_key)) {
    const std::string name = c10::toString(op);
    if (op.name.rfind("aten::", 0) || op.name == "aten::set_" || (is_dense && own.count(name))) {
      continue;
    }
    aten.impl(name.c_str(), CppFunction::makeFromBoxedFunction<kernel>());
  }
  all.fallback(CppFunction::makeFromBoxedFunction<kernel>());
  if (!is_dense) return;
  // Common code that asks for kernels by the type of the device.
  for (const char* name : {"copy_", "convolution", "convolution_backward"}) {
    aten.impl(name, CppFunction::makeFromBoxedFunction<kernel>());
  }
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("empty_strided", TORCH_FN(empty_strided));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  aten.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  aten.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten.impl("set_", TORCH_FN(set_nothing));
  aten.impl("record_stream", TORCH_FN(record_stream));
}

void start(std::string name) {
  static bool started = false;
  TORCH_CHECK(!std::exchange(started, true), "one kind of device for a process");
  if (name == "cuda") {
    kind = c10::DeviceType::CUDA;
    dense_key = DispatchKey::CUDA, sparse_key = DispatchKey::SparseCUDA;
    compressed_key = DispatchKey::SparseCsrCUDA;
    // Torch has made its hooks, which have no members, and keeps them: put others in their place.
    static_assert(sizeof(Hooks<CudaHooks>) == sizeof(at::CUDAHooksInterface));
    new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks<CudaHooks>();
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  } else {
    at::RegisterPrivateUse1HooksInterface(new Hooks<OtherHooks>());
  }
  c10::SetAllocator(kind, &memory);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kind)].store(new Guard());
  run_on_host<&run_dense>(DispatchKey::CPU, dense_key);
  run_on_host<&run_sparse>(DispatchKey::SparseCPU, sparse_key);
  run_on_host<&run_compressed>(DispatchKey::SparseCsrCPU, compressed_key);
}

std::vector<std::string> take(std::vector<std::string>& seen) {
  std::lock_guard guard(lock);
  return std::exchange(seen, {});
}

TORCH_LIBRARY(emulated, m) {
  m.def("start", &start);
  m.def("take_waits", [] { return take(waits); });
  m.def("take_hazards", [] { return take(hazards); });
  m.def("let_waits_raise", [](bool raise) { waits_raise = raise; });
  m.def("generator", [](int64_t index) { return default_generator(index); });
  m.def("device", [] { return int64_t(current_device); });
  m.def("exchange_device", [](int64_t to) { return int64_t(std::exchange(current_device, to)); });
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace emulated
