// libFuzzer's entry to the parsers of --techniques and --lengths: specs of techniques with options,
// nested ones, globs and sweeps among them (tools/fuzz/fuzz.bzl says how to run it).
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/options.h"
#include "core/technique.h"
#include "harness/plan/choice.h"

namespace {

void Expect(bool holds) {
  if (!holds) std::abort();
}

// Options of every type, and another technique among them.
struct FuzzedOptions {
  enum class Kind { kSoft, kHard };
  int64_t window = 64;
  double scale = 0;
  bool flag = false;
  Kind kind = Kind::kSoft;
  std::vector<int64_t> sizes = {1, 2};
  tfb::TechniqueSpec inner = {"leaf", {}};
  tfb::TechniqueList layers = {{{"leaf", {}}}};

  void Describe(tfb::OptionBinder& bind) {
    bind.Int("window", &window, 0, 1 << 20, "", {16, 64});
    bind.Real("scale", &scale, -1e6, 1e6, "", {0, 0.5});
    bind.Bool("flag", &flag, "");
    bind.Choice("kind", &kind, {{"soft", Kind::kSoft}, {"hard", Kind::kHard}}, "");
    bind.Ints("sizes", &sizes, 1, 9, "");
    const auto check = [](tfb::TechniqueSpec* spec) -> absl::Status {
      if (spec->technique == "leaf") return absl::OkStatus();
      const auto found = tfb::Registry::Global().Find(spec->technique);
      if (!found.ok()) return found.status();
      auto canonical = (*found)->Canonical(spec->options);
      if (canonical.ok()) spec->options = *std::move(canonical);
      return canonical.status();
    };
    bind.Technique("inner", &inner, "a technique", check, "");
    bind.Techniques("layers", &layers, "techniques", check, "");
  }
};

class Fuzzed : public tfb::TechniqueOf<FuzzedOptions> {
 public:
  explicit Fuzzed(const std::string& name) : TechniqueOf(Info(name)) {}

 protected:
  absl::StatusOr<std::unique_ptr<tfb::Layer>> MakeLayer(const tfb::Problem&, const FuzzedOptions&,
                                                        tfb::Device, uint64_t) const override {
    return absl::UnimplementedError("");
  }
  absl::Status Definition(const tfb::Problem&, const FuzzedOptions&, const tfb::NamedTensors&,
                          const tfb::Inputs&, const tfb::DefinitionRequest&,
                          tfb::NamedTensors*) const override {
    return absl::UnimplementedError("");
  }

 private:
  static tfb::TechniqueInfo Info(const std::string& name) {
    tfb::TechniqueInfo info;
    info.name = name;
    return info;
  }
};

const tfb::Registry& Techniques() {
  static const bool added = [] {
    for (const char* name : {"near", "nearer", "sketch"}) {
      tfb::Registry::Global().Add(std::make_unique<Fuzzed>(name));
    }
    return true;
  }();
  Expect(added);
  return tfb::Registry::Global();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto chosen = tfb::ChooseTechniques(text, Techniques());
  if (chosen.ok()) {
    for (const tfb::ChosenTechnique& one : *chosen) {
      // Canonical options stay unchanged, also as text.
      const absl::StatusOr<tfb::Options> again = one.technique->Canonical(one.options);
      Expect(again.ok() && *again == one.options);
      const auto spec = tfb::ParseTechniqueSpec(
          tfb::ToString(tfb::TechniqueSpec{one.technique->info().name, one.options}));
      Expect(spec.ok() && spec->options == one.options);
    }
  } else {
    // The message must be for people, and name the flag.
    Expect(chosen.status().message().substr(0, 12) == "--techniques");
  }
  const auto sizes = tfb::ParseSizes("lengths", text, 1, 1 << 20);
  if (sizes.ok()) {
    for (const int64_t one : *sizes) Expect(one >= 1 && one <= 1 << 20);
  }
  return 0;
}
