// The example of core/README.md: example_test.sh compares the two.
#include <cstdio>
#include <vector>

#include "core/technique.h"

int main() {
  // 1 sequence, 8 heads, 1024 tokens of 64 channels, causal.
  const tfb::Problem problem = tfb::Problem::SelfAttention(1, 8, 1024, 64, /*causal=*/true);
  // Any name that sweep --list shows, with options such as {{"window", "256"}}.
  const tfb::Technique* technique = tfb::Registry::Global().Find("dense").value();
  auto layer = technique->Create(problem, /*options=*/{}, tfb::Device::kCpu, /*seed=*/1);
  if (!layer.ok()) return std::puts(layer.status().ToString().c_str()), 1;

  tfb::Tensor q(tfb::DType::kF32, {1, 8, 1024, 64}), k = q.Clone(), v = q.Clone(), out = q.Clone();
  for (tfb::Tensor* tensor : {&q, &k, &v}) tfb::Fill(tensor->view(), 0.5);  // yours go here

  tfb::ThreadPool pool(2);
  tfb::Tensor workspace(tfb::DType::kU8, {static_cast<int64_t>((*layer)->workspace_bytes(2))});
  tfb::Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());

  const tfb::Inputs inputs = {{"q", q.view()}, {"k", k.view()}, {"v", v.view()}};
  absl::Status status = (*layer)->Setup(inputs, execution);                           // once
  if (status.ok()) status = (*layer)->Run(inputs, {{"out", out.view()}}, execution);  // often
  if (!status.ok()) return std::puts(status.ToString().c_str()), 1;
  std::printf("out[0] = %g\n", out.span<float>()[0]);
}
