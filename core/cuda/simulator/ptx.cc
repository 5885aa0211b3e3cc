// Interprets the inline PTX of kernels: PTX ISA, of the instructions in kInstructions.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/device.h"
#include "core/cuda/simulator/hooks.h"
#include "core/cuda/simulator/products.h"
#include "core/cuda/simulator/tensor_copy.h"
#include "core/cuda/simulator/warp_matrix.h"

namespace cuda_simulator {
namespace {

// The operands of an instruction in the order of its text, without its numbers.
struct Call {
  const char* opcode;
  const ProductShape* product;  // of an instruction that has one
  void* const* places;
  const void* site;

  template <class T>
  T& At(int n) const {
    return *static_cast<T*>(places[n]);
  }
  // Returns the shared memory of an address. An address that is none ends the launch.
  void* Shared(int n) const {
    void* place = running_machine->checker.SharedAt(At<unsigned>(n));
    if (place != nullptr) return place;
    running_machine->Report(FindingKind::kOutOfBounds, site, [&] {
      return Format("%s of an address that is not in shared memory", opcode);
    });
    running_machine->block.Abandon();
  }
};

template <bool kTransposed>
void LdMatrix(const Call& call) {
  unsigned* registers[4];
  for (int n = 0; n < 4; ++n) registers[n] = &call.At<unsigned>(n);
  LoadMatrices(call.opcode, kTransposed, registers, call.Shared(4), call.site);
}

template <bool kIsBf16>
void Mma(const Call& call) {
  MmaOperands operands;
  for (int n = 0; n < 4; ++n) {
    operands.d[n] = &call.At<float>(n);
    operands.a[n] = call.At<unsigned>(4 + n);
    operands.c[n] = call.At<float>(10 + n);
  }
  for (int n = 0; n < 2; ++n) operands.b[n] = call.At<unsigned>(8 + n);
  MultiplyMatrices(call.opcode, kIsBf16, operands, call.site);
}

void CopyAsync(const Call& call) {
  const unsigned bytes = call.At<unsigned>(2);
  if (bytes > 16) {
    running_machine->Report(FindingKind::kBadInstruction, call.site, [&] {
      return Format("%s of %u bytes where 16 is the most", call.opcode, bytes);
    });
    running_machine->block.Abandon();
  }
  StartCopy(call.Shared(0), call.places[1], 16, 16 - bytes, call.site);
}

void Exp2(const Call& call) { call.At<float>(0) = exp2f(call.At<float>(1)); }
void Log2(const Call& call) { call.At<float>(0) = log2f(call.At<float>(1)); }

// ---- Barriers ----

unsigned ArriveAtBlockBarrier(const Call& call, int first, BarrierUse use, bool any) {
  const int number = call.At<int>(first), threads = call.At<int>(first + 1);
  return running_machine->block.ArriveAt(number, threads, use, any, call.site) ? 1 : 0;
}
template <BarrierUse kUse>
void BlockBarrier(const Call& call) {
  ArriveAtBlockBarrier(call, 0, kUse, false);
}
void BlockBarrierAny(const Call& call) {
  call.At<unsigned>(0) = ArriveAtBlockBarrier(call, 1, BarrierUse::kAny, call.At<unsigned>(3) != 0);
}

PhaseBarriers& Barriers() { return running_machine->phase_barriers; }
void InitBarrier(const Call& call) {
  Barriers().Init(call.Shared(0), call.At<unsigned>(1), call.site);
}
void Arrive(const Call& call) { Barriers().Arrive(call.Shared(0), 0, call.site); }
void ArriveAndExpect(const Call& call) {
  Barriers().Arrive(call.Shared(0), call.At<unsigned>(1), call.site);
}
void TryWait(const Call& call) {
  call.At<unsigned>(0) = Barriers().Wait(call.Shared(1), call.At<unsigned>(2), call.site) ? 1 : 0;
}

void FenceBarrierInit(const Call&) { Barriers().Fence(); }
void FenceProxyAsync(const Call&) {
  running_machine->checker.order.FenceProxy();
  Barriers().Fence();
}

// ---- Products of warp groups, bulk copies ----

void MultiplyInGroup(const Call& call) {
  const ProductShape& shape = *call.product;
  ProductOperands operands = {};
  operands.opcode = call.opcode;
  operands.site = call.site;
  operands.shape = &shape;
  operands.adds = call.At<unsigned>(0) != 0;
  int next = 1;
  for (int n = 0; n < shape.columns / 2; ++n) operands.sums[n] = &call.At<float>(next++);
  if (shape.a_in_registers) {
    for (unsigned& pair : operands.a) pair = call.At<unsigned>(next++);
  } else {
    operands.a_matrix = reinterpret_cast<uint64_t>(call.places[next++]);
  }
  operands.b_matrix = reinterpret_cast<uint64_t>(call.places[next++]);
  running_machine->products.Start(operands);
}
void FenceProducts(const Call& call) { running_machine->products.Fence(call.site); }
void CommitProducts(const Call& call) { running_machine->products.Commit(call.site); }
void WaitForProducts(const Call& call) {
  running_machine->products.Wait(call.At<int>(0), call.site);
}

void SetMaxRegisters(const Call& call) {
  const int count = call.At<int>(0);
  if (count % 8 != 0 || count < 24 || count > 256) {
    running_machine->Report(FindingKind::kBadInstruction, call.site, [&] {
      return Format("%s of %d registers; allowed are multiples of 8 from 24 to 256", call.opcode,
                    count);
    });
  }
  MeetInWholeWarp(
      call.opcode, nullptr, [](void* const*, unsigned) {}, call.site);
}

void CopyBulk(const Call& call) {
  unsigned at[4];
  for (int n = 0; n < 4; ++n) at[n] = call.At<unsigned>(2 + n);
  CopyBox(call.opcode, call.Shared(0), call.places[1], at, call.Shared(6), call.site);
}

// The instructions that kernels use. `operands` are in PTX's form, with a register's type for its
// name, n for a constant and p for a predicate; `written` is the number of registers, from the
// first, that the instruction writes.
struct Instruction {
  std::string opcode;
  std::string operands;
  size_t written;
  void (*execute)(const Call& call);
  bool is_hopper = false;  // of compute capability 9.0 alone
  ProductShape product = {};
};
const Instruction kInstructions[] = {
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "{r,r,r,r},[r]", 4, &LdMatrix<false>},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "{r,r,r,r},[r]", 4, &LdMatrix<true>},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "{f,f,f,f},{r,r,r,r},{r,r},{f,f,f,f}",
     4, &Mma<true>},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "{f,f,f,f},{r,r,r,r},{r,r},{f,f,f,f}", 4,
     &Mma<false>},
    {"cp.async.cg.shared.global.L2::128B", "[r],[l],16,r", 0, &CopyAsync},
    {"ex2.approx.ftz.f32", "f,f", 1, &Exp2},
    {"lg2.approx.ftz.f32", "f,f", 1, &Log2},
    {"bar.sync", "r,r", 0, &BlockBarrier<BarrierUse::kSync>},
    {"bar.arrive", "r,r", 0, &BlockBarrier<BarrierUse::kArrive>},
    {"barrier.cta.red.or.pred", "p,r,r,p", 1, &BlockBarrierAny},
    {"mbarrier.init.shared::cta.b64", "[r],r", 0, &InitBarrier, true},
    {"mbarrier.arrive.shared::cta.b64", "_,[r]", 0, &Arrive, true},
    {"mbarrier.arrive.expect_tx.shared::cta.b64", "_,[r],r", 0, &ArriveAndExpect, true},
    {"mbarrier.try_wait.parity.shared::cta.b64", "p,[r],r", 1, &TryWait, true},
    {"fence.mbarrier_init.release.cluster", "", 0, &FenceBarrierInit, true},
    {"fence.proxy.async.shared::cta", "", 0, &FenceProxyAsync, true},
    {"cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes",
     "[r],[l,{r,r,r,r}],[r]", 0, &CopyBulk, true},
    {"wgmma.fence.sync.aligned", "", 0, &FenceProducts, true},
    {"wgmma.commit_group.sync.aligned", "", 0, &CommitProducts, true},
    {"wgmma.wait_group.sync.aligned", "n", 0, &WaitForProducts, true},
    {"setmaxnreg.inc.sync.aligned.u32", "n", 0, &SetMaxRegisters, true},
    {"setmaxnreg.dec.sync.aligned.u32", "n", 0, &SetMaxRegisters, true},
};

// wgmma.mma_async of N columns: sums, a, b, whether the sums before count, signs of the factors, and
// whether the factors in shared memory are transposed.
std::vector<Instruction> ProductInstructions() {
  std::vector<Instruction> products;
  for (const int columns : {64, 128}) {
    std::string sums = "f";
    for (int n = 1; n < columns / 2; ++n) sums += ",f";
    for (const bool is_bf16 : {false, true}) {
      const std::string type = is_bf16 ? ".bf16" : ".f16";
      const std::string opcode =
          "wgmma.mma_async.sync.aligned.m64n" + std::to_string(columns) + "k16.f32" + type + type;
      for (int transposed = 0; transposed < 4; ++transposed) {
        const bool of_a = transposed / 2 == 1, of_b = transposed % 2 == 1;
        products.push_back({opcode,
                            "{" + sums + "},l,l,p,1,1," + (of_a ? "1," : "0,") + (of_b ? "1" : "0"),
                            static_cast<size_t>(columns) / 2,
                            &MultiplyInGroup,
                            true,
                            {columns, is_bf16, false, of_a, of_b}});
        if (of_a) continue;
        products.push_back({opcode,
                            "{" + sums + "},{r,r,r,r},l,p,1,1," + (of_b ? "1" : "0"),
                            static_cast<size_t>(columns) / 2,
                            &MultiplyInGroup,
                            true,
                            {columns, is_bf16, true, false, of_b}});
      }
    }
  }
  return products;
}

// Returns the instructions with this opcode, which differ in their operands.
std::vector<const Instruction*> InstructionsOf(const std::string& opcode) {
  static const auto* products = new std::vector<Instruction>(ProductInstructions());
  std::vector<const Instruction*> found;
  for (const Instruction& instruction : kInstructions) {
    if (instruction.opcode == opcode) found.push_back(&instruction);
  }
  for (const Instruction& instruction : *products) {
    if (instruction.opcode == opcode) found.push_back(&instruction);
  }
  return found;
}

constexpr size_t kMaxOperands = 80;  // of an instruction

// A text, read once.
struct Statement {
  const char* text = nullptr;
  size_t given = 0;  // the number of operands, of which the text may name some several times
  const Instruction* instruction = nullptr;
  std::vector<int> operands;  // numbers of the operands, in the order of the text
  std::string wrong;          // says why it cannot be executed; empty where it can
};

std::string WithoutSpaces(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (std::isspace(static_cast<unsigned char>(c)) == 0) result += c;
  }
  return result;
}

// Returns the numbers of the operands "%3", "%0", ... in a text, and replaces each by the type of
// that operand, or by "?" where it is not given. "!3" is operand 3 as a predicate.
std::vector<int> TakeOperands(const std::vector<PtxOperand>& given, std::string* text) {
  std::vector<int> numbers;
  std::string types;
  for (size_t at = 0; at < text->size();) {
    const bool is_predicate = (*text)[at] == '!';
    if ((*text)[at] != '%' && !is_predicate) {
      types += (*text)[at++];
      continue;
    }
    size_t number = 0;
    for (++at; at < text->size() && std::isdigit(static_cast<unsigned char>((*text)[at])); ++at) {
      number = number * 10 + static_cast<size_t>((*text)[at] - '0');
    }
    const char type = number < given.size() ? given[number].type() : '?';
    types += is_predicate && (type == 'r' || type == 'n') ? 'p' : type;
    numbers.push_back(static_cast<int>(number));
  }
  *text = types;
  return numbers;
}

// Returns why the operand cannot be the n-th of the instruction; empty where it can.
std::string WrongConstraint(const Instruction& instruction, size_t n, const PtxOperand& operand) {
  const bool writes = n < instruction.written;
  const bool changes = instruction.product.columns > 0 && writes;
  if (operand.is_consistent() && (writes ? operand.is_written() : operand.is_read()) &&
      (!changes || operand.is_read())) {
    return "";
  }
  return changes ? " changes" : writes ? " writes" : " reads";
}

// Tells whether operands of these types can be those of an instruction: a constant can be a
// register's value.
bool Match(const std::string& types, const std::string& wanted) {
  if (types.size() != wanted.size()) return false;
  for (size_t n = 0; n < types.size(); ++n) {
    if (types[n] != wanted[n] && !(types[n] == 'n' && wanted[n] == 'r')) return false;
  }
  return true;
}

// Takes "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; INSTRUCTION; selp.u32 %0, 1, 0, q; }" apart: the
// predicates are the operands "!3" and "!0" of the instruction. Returns it with a semicolon, or
// nothing where the text is not of this form.
std::string WithoutPredicates(const std::string& text) {
  const size_t end = text.find('}', text.rfind(';'));
  if (text.front() != '{' || end == std::string::npos || end != text.find_last_not_of(' ')) {
    return "";
  }
  std::vector<std::string> declared;
  std::map<std::string, std::string> read, written;  // the operands' numbers, by predicate
  std::string instruction;
  for (size_t at = 1; at < end;) {
    at = text.find_first_not_of(' ', at);
    if (at == end) break;
    const size_t semicolon = text.find(';', at);
    if (semicolon == std::string::npos || semicolon > end) return "";
    const std::string line = text.substr(at, semicolon - at);
    at = semicolon + 1;
    char name[2] = {}, other[2] = {};
    int number = 0, length = 0;
    const auto is = [&](const char* format, auto*... values) {
      length = 0;
      return std::sscanf(line.c_str(), format, values..., &length) >= 0 &&
             length == static_cast<int>(line.size());
    };
    if (is(".reg .pred %1[a-z]%n", name)) {
      declared = {name};
    } else if (is(".reg .pred %1[a-z], %1[a-z]%n", name, other)) {
      declared = {name, other};
    } else if (is("setp.ne.u32 %1[a-z], %%%d, 0%n", name, &number) ||
               is("setp.ne.b32 %1[a-z], %%%d, 0%n", name, &number)) {
      if (!instruction.empty()) return "";
      read[name] = std::to_string(number);
    } else if (is("selp.u32 %%%d, 1, 0, %1[a-z]%n", &number, name)) {
      if (instruction.empty()) return "";
      written[name] = std::to_string(number);
    } else if (instruction.empty()) {
      instruction = line;
    } else {
      return "";
    }
  }
  // A predicate has one letter, and stands alone as an operand: others are of more.
  const size_t operands = instruction.find(' ');
  for (const std::string& name : declared) {
    if (read.count(name) + written.count(name) != 1) return "";
    const std::string& number = read.count(name) != 0 ? read[name] : written[name];
    size_t at = instruction.find(name, operands);
    while (at != std::string::npos && at + 1 < instruction.size() &&
           std::strchr(" ,", instruction[at + 1]) == nullptr) {
      at = instruction.find(name, at + 1);
    }
    if (at == std::string::npos) return "";
    instruction.replace(at, 1, "!" + number);
  }
  return declared.size() == read.size() + written.size() ? instruction + ";" : "";
}

Statement Read(const char* text, const std::vector<PtxOperand>& given) {
  Statement statement;
  statement.text = text;
  statement.given = given.size();
  const std::string line = text[0] == '{' ? WithoutPredicates(text) : text;
  if (line.empty()) {
    statement.wrong = std::string("\"") + text + "\", which the simulator does not know";
    return statement;
  }
  const size_t end = std::min(line.find_first_of(" ;"), line.size());
  const std::string opcode = line.substr(0, end);
  std::string operands = WithoutSpaces(line.substr(end));
  const std::vector<const Instruction*> candidates = InstructionsOf(opcode);
  if (candidates.empty()) {
    statement.wrong = "the instruction " + opcode + ", which the simulator does not know";
    return statement;
  }
  if (operands.empty() || operands.back() != ';') {
    statement.wrong = opcode + " without a semicolon at its end";
    return statement;
  }
  operands.pop_back();
  statement.operands = TakeOperands(given, &operands);
  for (const Instruction* candidate : candidates) {
    if (Match(operands, candidate->operands)) statement.instruction = candidate;
  }
  if (statement.instruction == nullptr) {
    statement.wrong =
        opcode + " with the operands " + operands + "; it has " + candidates[0]->operands;
    return statement;
  }
  for (size_t n = 0; n < statement.operands.size() && statement.wrong.empty(); ++n) {
    const int number = statement.operands[n];
    const std::string does =
        WrongConstraint(*statement.instruction, n, given[static_cast<size_t>(number)]);
    if (does.empty()) continue;
    statement.wrong =
        opcode + does + " operand %" + std::to_string(number) + ", which its constraint forbids";
  }
  // The predicate comes first among a product's operands.
  if (statement.wrong.empty() && statement.instruction->product.columns > 0) {
    const auto predicate = statement.operands.end() - 1;
    std::rotate(statement.operands.begin(), predicate, statement.operands.end());
  }
  return statement;
}

// Returns the statement of a text, whose operands are of the same types in each call.
const Statement& StatementOf(const char* text, const PtxOperand* operands, size_t count) {
  static auto* known = new std::unordered_map<const void*, Statement>;  // by the text's address
  static const Statement* recent = nullptr;  // lanes execute the same text one after another
  if (recent != nullptr && recent->text == text && recent->given == count) return *recent;
  Statement& statement = (*known)[text];
  if (statement.text == nullptr || statement.given != count) {
    statement = Read(text, {operands, operands + count});
  }
  recent = &statement;
  return statement;
}

}  // namespace

size_t __cvta_generic_to_shared(const void* address) {
  Machine& machine = *running_machine;
  if (!machine.checker.IsShared(address)) {
    machine.Report(FindingKind::kOutOfBounds, __builtin_return_address(0), [&] {
      return "takes as shared memory what is not, " +
             machine.checker.Describe(reinterpret_cast<uintptr_t>(address));
    });
    machine.block.Abandon();
  }
  return machine.checker.SharedAddress(address);
}

void ExecutePtxAt(const void* site, const char* text, const PtxOperand* operands, size_t count) {
  // An empty list of outputs, or of inputs, is an operand of no type.
  if (count > 0 && operands[0].type() == ' ') ++operands, --count;
  if (count > 0 && operands[count - 1].type() == ' ') --count;
  const Statement& statement = StatementOf(text, operands, count);
  if (!statement.wrong.empty()) {
    running_machine->Report(FindingKind::kBadInstruction, site,
                            [&] { return "executes " + statement.wrong; });
    running_machine->block.Abandon();
  }
  const Instruction& instruction = *statement.instruction;
  if (instruction.is_hopper) {
    const Gpu& gpu = running_machine->settings.gpu;
    if (gpu.compute_capability_major != 9) {
      running_machine->Report(FindingKind::kBadInstruction, site, [&] {
        return "executes " + instruction.opcode + ", which " + gpu.name + " has not";
      });
      running_machine->block.Abandon();
    }
    running_machine->checker.TrackAll(running_machine->block.count());
  }
  void* places[kMaxOperands];
  for (size_t n = 0; n < statement.operands.size(); ++n) {
    places[n] = operands[statement.operands[n]].place();
  }
  instruction.execute({instruction.opcode.c_str(), &instruction.product, places, site});
}

}  // namespace cuda_simulator
