// Addresses beyond 2^31 elements, many heads, and sizes that no memory holds.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "harness/conformance/subject.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TFB_LIMITS_MEMORY 0  // a sanitizer's shadow is larger than any limit
#else
#define TFB_LIMITS_MEMORY 1
#endif

namespace tfb::conformance {
namespace {

// Address space without memory: pages appear where they are touched.
class Reserved {
 public:
  explicit Reserved(size_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Reserved() {
    if (ok()) munmap(memory_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  bool ok() const { return memory_ != MAP_FAILED; }
  void* data() const { return memory_; }

 private:
  size_t bytes_;
  void* memory_;
};

// Every four-dimensional tensor has batches 2^31 + 8 elements apart and heads 2^30 + 8: a product
// of 32 bits anywhere between an index and an address reads or writes elsewhere.
void OffsetsBeyond31Bits(const Subject& subject, const Problem& problem) {
  constexpr int64_t kHead = (int64_t{1} << 30) + 8;
  constexpr int64_t kBatch = (int64_t{1} << 31) + 8;
  constexpr size_t kBytes = (2 * size_t{kBatch} + 2 * size_t{kHead}) * sizeof(float);
  const auto trial = Trial::Make(subject, problem);
  if (trial == nullptr || !trial->RequireQkv()) return;
  const NamedTensors plain = trial->Run();
  Layer& layer = trial->layer();
  Inputs inputs;
  Outputs outputs;
  NamedTensors small;  // what stays as it is
  std::vector<std::unique_ptr<Reserved>> reserved;
  const auto spread = [&](TensorView view) {
    reserved.push_back(std::make_unique<Reserved>(kBytes));
    if (!reserved.back()->ok()) return TensorView();
    view.data = reserved.back()->data();
    view.strides = {kBatch, kHead, view.dims[3], 1};
    return view;
  };
  for (const auto& [name, tensor] : trial->inputs()) {
    TensorView view = trial->inputs().at(name).view();
    if (view.rank == 4) {
      view = spread(view);
      if (view.empty()) return Skip("no address space of tens of GiB");
      CopyElements(tensor.view(), view);
    }
    inputs.Set(name, view);
  }
  for (const TensorSpec& spec : layer.outputs()) {
    small[spec.name] = Tensor(spec.dtype, spec.shape);
    TensorView view = small[spec.name].view();
    if (view.rank == 4) view = spread(view);
    if (view.empty()) return Skip("no address space of tens of GiB");
    outputs.Set(spec.name, view);
  }
  ThreadPool pool(2);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer.workspace_bytes(2)) + 1});
  const Execution execution = {
      &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()), nullptr};
  ASSERT_TRUE(layer.Setup(inputs, execution).ok());
  ASSERT_TRUE(layer.Run(inputs, outputs, execution).ok());
  for (const auto& [name, view] : outputs) {
    if (view.rank == 4) CopyElements(view, small[name].view());
  }
  ExpectSameBits(plain, small, "far apart and contiguous");
}

void ManyBatchesAndHeads(const Subject& subject, const Problem& problem) {
  if (problem.query_heads > 1000 && subject.technique->info().input_kind != InputKind::kQkv) {
    return Skip("the projections of so many heads would fill the memory");
  }
  if (const auto trial = Trial::Make(subject, problem)) trial->ExpectRunMatchesDefinition();
}

// In a child with little memory and time: a layer of an impossible size is refused with a status,
// or made; it does not end the process, nor hang.
void ImpossibleSizesAreAStatus(const Subject& subject, const Problem& problem) {
  int report[2];
  ASSERT_EQ(pipe(report), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(report[0]);
    const rlimit memory = {size_t{2} << 30, size_t{2} << 30};
    if (TFB_LIMITS_MEMORY) setrlimit(RLIMIT_AS, &memory);
    const rlimit core = {0, 0};
    setrlimit(RLIMIT_CORE, &core);
    alarm(20);
    const auto layer = subject.technique->Create(problem, subject.options, subject.device, kSeed);
    std::string text = layer.ok() ? "made" : layer.status().ToString();
    if (layer.ok()) text += " with a workspace of " + std::to_string((*layer)->workspace_bytes(2));
    const ssize_t written = write(report[1], text.data(), text.size());
    _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(report[1]);
  char text[1024] = {};
  const ssize_t length = read(report[0], text, sizeof(text) - 1);
  close(report[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
      << "Create of " << problem.ToString() << " ended its process: "
      << (WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "exit code");
  std::printf("  %s: %.*s\n", problem.ToString().c_str(), static_cast<int>(length), text);
}

// After a call that failed the layer works as before.
void AFailedCallDoesNotPoisonTheNext(const Subject& subject, const Problem& problem) {
  const auto trial = Trial::Make(subject, problem);
  if (trial == nullptr) return;
  const NamedTensors before = trial->Run();
  ThreadPool pool(2);
  const Execution no_workspace = {&pool, {}, nullptr};
  NamedTensors none;
  EXPECT_FALSE(trial->layer().Run(ViewsOf(none), MutableViewsOf(none), no_workspace).ok());
  EXPECT_FALSE(trial->layer().Setup(ViewsOf(none), no_workspace).ok());
  ExpectSameBits(before, trial->Run(), "before and after a failed call");
}

Problem Sized(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim) {
  return Problem::SelfAttention(batch, heads, tokens, head_dim, /*causal=*/true);
}

}  // namespace

std::vector<Case> ScaleCases() {
  std::vector<Case> cases = {
      {"OffsetsBeyond31Bits", "30", {Sized(2, 2, 70, 16)}, OffsetsBeyond31Bits},
      {"ManyBatchesAndHeads",
       "31",
       {Sized(70'000, 1, 1, 4), Sized(1, 70'000, 1, 1)},
       ManyBatchesAndHeads},
      {"ImpossibleSizesAreAStatus",
       "33",
       {Sized(1, 8, int64_t{1} << 38, 64), Sized(int64_t{1} << 38, 8, 64, 64),
        Sized(1, int64_t{1} << 38, 64, 64)},
       ImpossibleSizesAreAStatus},
      {"AFailedCallDoesNotPoisonTheNext",
       "34",
       {Usual(true), Usual(false)},
       AFailedCallDoesNotPoisonTheNext},
  };
  for (Case& one : cases) one.default_options_only = true;
  return cases;
}

}  // namespace tfb::conformance
