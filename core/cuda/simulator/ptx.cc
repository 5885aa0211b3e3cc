// Interprets the inline PTX of kernels: PTX ISA, of the instructions in kInstructions.
#include <algorithm>
#include <cctype>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/device.h"
#include "core/cuda/simulator/hooks.h"
#include "core/cuda/simulator/warp_matrix.h"

namespace cuda_simulator {
namespace {

// The operands of an instruction in the order of its text, without its numbers.
struct Call {
  const char* opcode;
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

// The instructions that kernels use. `operands` are in PTX's form, with a register's type for its
// name; `written` is the number of registers, from the first, that the instruction writes.
const struct Instruction {
  const char* opcode;
  const char* operands;
  size_t written;
  void (*execute)(const Call& call);
} kInstructions[] = {
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "{r,r,r,r},[r]", 4, &LdMatrix<false>},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "{r,r,r,r},[r]", 4, &LdMatrix<true>},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "{f,f,f,f},{r,r,r,r},{r,r},{f,f,f,f}",
     4, &Mma<true>},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "{f,f,f,f},{r,r,r,r},{r,r},{f,f,f,f}", 4,
     &Mma<false>},
    {"cp.async.cg.shared.global.L2::128B", "[r],[l],16,r", 0, &CopyAsync},
    {"ex2.approx.ftz.f32", "f,f", 1, &Exp2},
    {"lg2.approx.ftz.f32", "f,f", 1, &Log2},
};

constexpr size_t kMaxOperands = 16;  // of kInstructions

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
// that operand, or by "?" where it is not given.
std::vector<int> TakeOperands(const std::vector<PtxOperand>& given, std::string* text) {
  std::vector<int> numbers;
  std::string types;
  for (size_t at = 0; at < text->size();) {
    if ((*text)[at] != '%') {
      types += (*text)[at++];
      continue;
    }
    size_t number = 0;
    for (++at; at < text->size() && std::isdigit(static_cast<unsigned char>((*text)[at])); ++at) {
      number = number * 10 + static_cast<size_t>((*text)[at] - '0');
    }
    types += number < given.size() ? given[number].type() : '?';
    numbers.push_back(static_cast<int>(number));
  }
  *text = types;
  return numbers;
}

// Returns why the operand cannot be the n-th of the instruction; empty where it can.
std::string WrongConstraint(const Instruction& instruction, size_t n, const PtxOperand& operand) {
  const bool writes = n < instruction.written;
  if (operand.is_consistent() && (writes ? operand.is_written() : operand.is_read())) return "";
  return writes ? " writes" : " reads";
}

Statement Read(const char* text, const std::vector<PtxOperand>& given) {
  Statement statement;
  statement.text = text;
  statement.given = given.size();
  const std::string line = text;
  const size_t end = std::min(line.find(' '), line.size());
  const std::string opcode = line.substr(0, end);
  std::string operands = WithoutSpaces(line.substr(end));
  for (const Instruction& instruction : kInstructions) {
    if (opcode == instruction.opcode) statement.instruction = &instruction;
  }
  if (statement.instruction == nullptr) {
    statement.wrong = "the instruction " + opcode + ", which the simulator does not know";
    return statement;
  }
  if (operands.empty() || operands.back() != ';') {
    statement.wrong = opcode + " without a semicolon at its end";
    return statement;
  }
  operands.pop_back();
  statement.operands = TakeOperands(given, &operands);
  if (operands != statement.instruction->operands) {
    statement.wrong =
        opcode + " with the operands " + operands + "; it has " + statement.instruction->operands;
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
  void* places[kMaxOperands];
  for (size_t n = 0; n < statement.operands.size(); ++n) {
    places[n] = operands[statement.operands[n]].place();
  }
  statement.instruction->execute({statement.instruction->opcode, places, site});
}

}  // namespace cuda_simulator
