// Tests the conformance cases themselves: a right technique passes them, and the case for each
// fault finds it.
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/runfiles.h"
#include "core/sanitizers.h"
#include "gtest/gtest.h"
#include "harness/testing/tiny_technique.h"

namespace tfb {
namespace {

struct Report {
  int exit_code = -1;
  std::string output;
  std::set<std::string> failed;  // names of cases, without their parameters
  std::set<std::string> skipped;
};

// Returns "TwoRunsGiveTheSameBits" for "[ FAILED ] tiny.TwoRunsGiveTheSameBits/cpu/defaults/... (1
// ms)".
std::string CaseOf(absl::string_view line) {
  const size_t dot = line.find('.');
  const size_t slash = line.find('/');
  if (dot == absl::string_view::npos || slash == absl::string_view::npos) return "";
  return std::string(line.substr(dot + 1, slash - dot - 1));
}

Report Conform(const std::string& arguments) {
  Report report;
  const auto binary = RunfilePath("harness/tiny_conformance");
  EXPECT_TRUE(binary.ok()) << binary.status();
  if (!binary.ok()) return report;
  FILE* pipe = popen(absl::StrCat(*binary, " ", arguments, " 2>&1").c_str(), "r");
  char buffer[4096];
  for (size_t got; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    report.output.append(buffer, got);
  }
  const int status = pclose(pipe);
  report.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  for (absl::string_view line : absl::StrSplit(report.output, '\n')) {
    if (absl::StartsWith(line, "[  FAILED  ]")) report.failed.insert(CaseOf(line));
    if (absl::StartsWith(line, "[  SKIPPED ]")) report.skipped.insert(CaseOf(line));
  }
  return report;
}

// Returns the report of the tiny technique without a fault, which is run once.
const Report& RightTechnique() {
  static const Report& report = *new Report(Conform("--technique=tiny"));
  return report;
}

// The cases of techniques that hand over their state.
const std::set<std::string>& kHandingOver = *new std::set<std::string>{
    "ARunGoesOnWithWhatAnotherHandsOver", "WhatIsHandedOverIsEnoughUnderAnyOptions"};

// The case that limits memory, which it does not in a build with a sanitizer: it skips itself there.
constexpr char kOfLittleMemory[] = "ImpossibleSizesAreAStatus";

// Runs only the cases that are expected to fail, to save time. Returns the output.
std::string ExpectFound(TinyFault fault, const std::string& device,
                        const std::vector<std::string>& cases) {
  if (kIsSanitized && cases == std::vector<std::string>{kOfLittleMemory}) return "";
  const std::string filter = absl::StrCat("*.", absl::StrJoin(cases, "/*:*."), "/*");
  const Report report = Conform(absl::StrCat("--technique=", TinyName(fault), " --devices=", device,
                                             " '--gtest_filter=", filter, "'"));
  EXPECT_EQ(report.exit_code, 1) << TinyName(fault);
  for (const std::string& name : cases) {
    // A sanitizer that sees the fault first ends the run.
    const bool ended = absl::StrContains(report.output, "Sanitizer");
    EXPECT_TRUE(ended || report.failed.count(name) > 0) << TinyName(fault) << " passed " << name;
  }
  return report.output;
}

TEST(Conformance, ARightTechniquePassesEveryCase) {
  const Report& report = RightTechnique();
  EXPECT_EQ(report.exit_code, 0) << report.output;
  EXPECT_TRUE(absl::StrContains(report.output, "window=16")) << "the budget option is not varied";
}

TEST(Conformance, ARightTechniqueIsNotSpared) {
  // The technique has parameters, streams, masks keys and reads q, k and v: no case has a reason to
  // skip it, but those that are about what is handed over, which it is not.
  for (const std::string& name : RightTechnique().skipped) {
    const bool is_sanitized = kIsSanitized && name == kOfLittleMemory;
    EXPECT_TRUE(name.empty() || is_sanitized || kHandingOver.count(name) > 0)
        << name << " was skipped";
  }
}

TEST(Conformance, AStateThatIsNotWhollyHandedOverIsFound) {
  const std::string filter =
      absl::StrCat("'--gtest_filter=*.", absl::StrJoin(kHandingOver, "/*:*."), "/*'");
  const Report right = Conform(absl::StrCat("--technique=tiny_state ", filter));
  EXPECT_EQ(right.exit_code, 0) << right.output;
  EXPECT_TRUE(right.skipped.empty()) << right.output;
  for (const std::string& name : kHandingOver) {
    EXPECT_TRUE(absl::StrContains(right.output, name)) << name << " did not run";
  }
  for (const char* fault : {"tiny_state_forgets", "tiny_state_is_stale"}) {
    const Report report = Conform(absl::StrCat("--technique=", fault, " ", filter));
    for (const std::string& name : kHandingOver) {
      EXPECT_EQ(report.failed.count(name), 1u) << fault << " passed " << name;
    }
  }
}

using Expected = std::vector<std::pair<TinyFault, std::vector<std::string>>>;

// The cases that are there for each fault that a layer has on every device.
const Expected& FaultsOfEveryDevice() {
  static const Expected& expected = *new Expected{
      {TinyFault::kWrongScale, {"HeadDims", "ScoresOf1e4", "SixteenBitsAreAsGoodAsDenseAttention"}},
      {TinyFault::kWindowOffByOne, {"EveryOptionAtItsEndsAndBeyondTheSequence"}},
      {TinyFault::kEmptyRowIsNan,
       {"AFullyMaskedBatchGivesZero", "QueriesBeforeAllKeysGiveZero", "NoKeys"}},
      {TinyFault::kFiniteSentinel,
       {"ScoresOfMinus1e32AreNotTakenForMasked", "ScoresOfMinus3e38AreNotTakenForMasked",
        "AFullyMaskedBatchGivesZero"}},
      {TinyFault::kReadsMaskedValues,
       {"ANanInAMaskedValueReachesNothing", "ANanInAMaskedValueOfTheLastTileReachesNothing",
        "ANanInTheFirstValueReachesWhoSeesIt", "ANanInAValueReachesWhoSeesItAndNobodyElse"}},
      {TinyFault::kDropsNan,
       {"ANanInAKeyReachesWhoSeesItAndNobodyElse", "ANanInAQueryReachesItsOwnRow"}},
      {TinyFault::kLeavesEmptyRows,
       {"AFullyMaskedBatchGivesZero", "QueriesBeforeAllKeysGiveZero", "NoKeys"}},
      {TinyFault::kNoMaxSubtracted, {"ScoresOf1e4", "OneScoreOf1e5AmongSmallOnes"}},
      {TinyFault::kWrongLogSumExp, {"TokensBelowAtAndAboveTiles", "OneTokenOneHeadOneBatch"}},
      {TinyFault::kIgnoresStrides,
       {"GapsBehindRowsOfInputs", "TransposedInputsAndOutputs", "InputsBroadcastOverBatchAndHeads",
        "OffsetsBeyond31Bits"}},
      {TinyFault::kWritesBehindOutput, {"OneTokenOneHeadOneBatch", "TwoRunsGiveTheSameBits"}},
      {TinyFault::kWorkspaceOverrun, {"OneTokenOneHeadOneBatch", "TwoRunsGiveTheSameBits"}},
      {TinyFault::kReadsWorkspace, {"OneTokenOneHeadOneBatch"}},
      {TinyFault::kDependsOnThreads, {"AnyNumberOfThreadsGivesTheSameBits"}},
      {TinyFault::kKeepsState, {"TwoRunsGiveTheSameBits"}},
      {TinyFault::kSeesFuture, {"TheFutureDoesNotReachThePast"}},
      {TinyFault::kWrongGroup, {"GroupedHeads"}},
      {TinyFault::kTopLeftCausal, {"KeysAndQueriesOfDifferentNumber"}},
      {TinyFault::kAllocates, {"RunAllocatesNothing"}},
      {TinyFault::kWrongFlops, {"FlopsAreThoseOfTheKeptPairs"}},
      {TinyFault::kFlopsOfKeys, {"FlopsAreThoseOfTheKeptPairs"}},
      {TinyFault::kForgetsBytes, {"BytesAreThoseOfTheTensors"}},
      {TinyFault::kIgnoresParameters,
       {"ParametersMakeTheLayer", "ChangedParametersChangeTheLayer"}},
      {TinyFault::kForgetsInAppend, {"ASequenceInSegmentsIsTheWhole"}},
      {TinyFault::kRoundsScores, {"HeadDims"}},
      {TinyFault::kThreadsDefine, {"AnyNumberOfThreadsDefinesTheSameBits"}},
      {TinyFault::kDefinesBehindOutput, {"OneTokenOneHeadOneBatch"}},
      {TinyFault::kDependsOnBatch, {"ABatchDoesNotDependOnItsCompany"}},
      {TinyFault::kMaskedTileIsNan,
       {"MaskedTilesBeforeAmongAndBehindTheKeys", "ANanInTheLastValueReachesWhoSeesIt"}},
      {TinyFault::kReadsMaskedKeys, {"ANanInAMaskedKeyReachesNothing"}},
      {TinyFault::kFourTiles, {"LongProblemsAndListsAtRandom"}},
      {TinyFault::kMissesLastTile,
       {"TokensBelowAtAndAboveTiles", "KeysAndQueriesOfDifferentNumber"}},
      {TinyFault::kWholeVectors,
       {"TokensBelowOneTile", "OneTokenOneHeadOneBatch", "ProblemsAndOptionsAtRandom"}},
      {TinyFault::kSmallSentinel, {"ScoresOfMinus1e6AreNotTakenForMasked"}},
      {TinyFault::kNeedsLogSumExp, {"OptionalOutputsMayBeLeftOut"}},
      {TinyFault::kIgnoresOutputStrides,
       {"GapsBehindRowsOfOutputs", "TransposedInputsAndOutputs", "OffsetsBeyond31Bits"}},
      {TinyFault::kRefusesOddStrides, {"AnyStrideInDimensionsOfSizeOne"}},
      {TinyFault::kAppendAllocates, {"AppendAllocatesNothing"}},
      {TinyFault::kResetKeepsAToken, {"ResetForgetsEverything"}},
      {TinyFault::kValuesOfHeadDim, {"ValueDimsOtherThanHeadDim"}},
      {TinyFault::kAddsToSum,
       {"ConstantValues", "ConstantValuesComeBack", "EqualKeys", "ZeroQueries", "ZeroKeys"}},
      {TinyFault::kAddsToValues, {"ZeroValues", "DenormalInputs"}},
      {TinyFault::kWritesDenormals, {"NoDenormalIsComputed"}},
      {TinyFault::kMultipliesValues, {"HugeValues"}},
      {TinyFault::kLimitsProducts, {"ProductsThatOverflow16Bits"}},
      {TinyFault::kDropsTies, {"TiedKeys", "EqualKeys"}},
      {TinyFault::kSubtractsNorms, {"LongVectorsWhoseFeaturesVanish"}},
      {TinyFault::kFewBatches, {"ManyBatchesAndHeads"}},
      {TinyFault::kDrawsAnew, {"TwoLayersOfASeedGiveTheSameBits"}},
      {TinyFault::kAllocatesUnchecked, {kOfLittleMemory}},
      {TinyFault::kFailsWithoutWork, {"NoTokensAndNoBatch", "NoQueries"}},
      {TinyFault::kRefusesUsual, {"AnOrdinaryProblemIsAdmitted"}},
      {TinyFault::kRefusesInCreate, {"TheDefinitionRefusesTheProblemsThatTheLayerDoes"}},
      {TinyFault::kDefinesRowsInOrder, {"ADefinitionOfSomeRowsIsPartOfTheWhole"}},
      {TinyFault::kDefinesTheComputed, {"ADefinitionFollowsNoChoiceOfARunOnOtherInputs"}},
      {TinyFault::kDeclaresOtherOutputs, {"OutputsAreDeclaredAsTheyAreWritten"}},
      {TinyFault::kLacksCitation, {"ItsDescriptionIsComplete"}},
      {TinyFault::kGradientWrongScale,
       {"GradientsAreThoseOfTheDefinition", "GradientsOfProblemsAndOptionsAtRandom"}},
      {TinyFault::kGradientMissesLastTile, {"GradientsOfTokensBelowAtAndAboveATile"}},
      {TinyFault::kGradientOfWholeVectors, {"GradientsOfChannelsThatFillNoVector"}},
      {TinyFault::kGradientOfOneHead, {"GradientsOfGroupedHeads"}},
      {TinyFault::kGradientTopLeftCausal, {"GradientsOfKeysAndQueriesOfDifferentNumber"}},
      {TinyFault::kGradientOfMaskedKeys, {"MaskedKeysHaveNoGradientAndReachNone"}},
      {TinyFault::kGradientReadsMasked, {"MaskedKeysHaveNoGradientAndReachNone"}},
      {TinyFault::kGradientOfEmptyRowIsNan,
       {"AFullyMaskedBatchHasNoGradient", "QueriesBeforeAllKeysHaveNoGradient",
        "GradientsWithoutTokensKeysOrBatch"}},
      {TinyFault::kGradientSeesFuture, {"TheFutureHasNoGradientOfThePast"}},
      {TinyFault::kGradientOfOneBatch, {"EveryParameterHasItsGradient"}},
      {TinyFault::kGradientForgetsLogSumExp, {"GradientsAreThoseOfTheDefinition"}},
      {TinyFault::kGradientRoundsMean, {"ConstantValuesGiveQueriesAndKeysNoGradient"}},
      {TinyFault::kGradientOfRoundedOutput, {"GradientsInSixteenBitsOfOneKeyOfNearlyAllWeight"}},
      {TinyFault::kGradientClips, {"ScaledValuesScaleTheGradientsOfQueriesAndKeys"}},
      {TinyFault::kGradientRounds, {"GradientsInSixteenBitsAreAsGoodAsDenseAttentions"}},
      {TinyFault::kGradientSumsIn16Bits, {"GradientsInSixteenBitsAreAsGoodAsDenseAttentions"}},
      {TinyFault::kGradientOverflows, {"GradientsOfScoresOf1e4"}},
      {TinyFault::kGradientOfDrawnParameters, {"ChangedParametersChangeTheGradients"}},
      {TinyFault::kGradientIgnoresStrides,
       {"GradientsOfInputsWithGaps", "TransposedGradientsOfTransposedInputs",
        "GradientsOfInputsBroadcastOverBatchAndHeads"}},
      {TinyFault::kGradientIgnoresOwnStrides,
       {"GradientsWithGaps", "TransposedGradientsOfTransposedInputs"}},
      {TinyFault::kBackwardRefusesOddStrides, {"GradientsOfAnyStrideInDimensionsOfSizeOne"}},
      {TinyFault::kGradientDependsOnThreads, {"AnyNumberOfThreadsGivesTheSameGradients"}},
      {TinyFault::kGradientDependsOnBatch, {"AGradientDoesNotDependOnItsCompany"}},
      {TinyFault::kGradientKeepsState, {"RepeatedBackwardPassesGiveTheSameBits"}},
      {TinyFault::kGradientNeedsQueries, {"GradientsThatAreLeftOutChangeNoOthers"}},
      {TinyFault::kGradientOfLeftOutOutput, {"AnOutputsGradientThatIsLeftOutIsZero"}},
      {TinyFault::kGradientOfLastRun, {"OtherRunsInBetweenChangeNoGradient"}},
      {TinyFault::kKeepingChangesOutput, {"OutputsOfARunThatKeepsMemoryAreRight"}},
      {TinyFault::kBackwardAllocates, {"BackwardAllocatesNothing"}},
      {TinyFault::kGradientWritesBehind, {"GradientsAreThoseOfTheDefinition"}},
      {TinyFault::kGradientWritesInputs, {"GradientsAreThoseOfTheDefinition"}},
      {TinyFault::kBackwardWorkspaceOverrun, {"GradientsAreThoseOfTheDefinition"}},
      {TinyFault::kKeptOverrun,
       {"GradientsAreThoseOfTheDefinition", "WrongBackwardCallsAreRefusedWithAReason"}},
      {TinyFault::kStopsUnknownGradient, {"EveryGradientIsGivenOrStoppedWithAReason"}},
      {TinyFault::kDefinitionReadsFloats, {"TheDefinitionReadsNumbersInDouble"}},
  };
  return expected;
}

// The faults that a layer has on the CPU alone: on a device the threads are not the host's.
const std::set<TinyFault>& kOfHostThreads =
    *new std::set<TinyFault>{TinyFault::kDependsOnThreads, TinyFault::kGradientDependsOnThreads};

TEST(Conformance, EachFaultIsFoundByTheCaseThatIsThereForIt) {
  size_t of_every_device = 0;
  for (const TinyFault fault : AllTinyFaults()) of_every_device += IsOfDevices(fault) ? 0 : 1;
  EXPECT_EQ(FaultsOfEveryDevice().size() + 2, of_every_device) << "none, and kIgnoresSeed";
  for (const auto& [fault, cases] : FaultsOfEveryDevice()) ExpectFound(fault, "cpu", cases);
}

// The simulator runs fewer problems, and smaller ones, of which each case needs one that shows what
// it is there for.
TEST(Conformance, EachFaultIsFoundInTheSimulatorToo) {
  for (const auto& [fault, cases] : FaultsOfEveryDevice()) {
    if (kOfHostThreads.count(fault) == 0) ExpectFound(fault, "simulator", cases);
  }
}

TEST(Conformance, TheSimulatorNamesTheKernelThatMadeAWrongAccess) {
  for (const auto& [fault, kernel] :
       std::vector<std::pair<TinyFault, std::string>>{{TinyFault::kWritesBehindOutput, "TinyMeans"},
                                                      {TinyFault::kWorkspaceOverrun, "TinySums"},
                                                      {TinyFault::kReadsWorkspace, "TinySums"},
                                                      {TinyFault::kHostPointer, "TinyScores"}}) {
    const std::string output = ExpectFound(fault, "simulator", {"OneTokenOneHeadOneBatch"});
    EXPECT_TRUE(absl::StrContains(output, absl::StrCat("simulated kernel: ", kernel, ", block")))
        << output;
  }
}

// The cases that are there for each fault that a layer has on devices alone.
const Expected& FaultsOfDevices() {
  static const Expected& expected = *new Expected{
      {TinyFault::kDependsOnOrder,
       {"AnyOrderOfBlocksAndThreadsGivesTheSameBits", "RepeatedBackwardPassesGiveTheSameBits"}},
      {TinyFault::kHostPointer, {"OneTokenOneHeadOneBatch"}},
      {TinyFault::kDeviceScale, {"TheDeviceAgreesWithTheCpu", "HeadDims"}},
      {TinyFault::kAllocatesOnDevice, {"RunAllocatesNothing", "BackwardAllocatesNothing"}},
      {TinyFault::kWaits, {"RunDoesNotWaitForTheDevice"}},
      {TinyFault::kHeadsInGridZ, {"ManyBatchesAndHeads"}},
      {TinyFault::kOtherStream,
       {"AGraphOfARunGivesTheSameBits", "AGraphOfEachAppendGivesTheSameBits",
        "AGraphOfABackwardPassGivesTheSameBits", "OnAStreamOfItsOwnItComputesTheSameBits"}},
      {TinyFault::kSetsUpOnOtherStream, {"OnAStreamOfItsOwnItComputesTheSameBits"}},
      {TinyFault::kResetsOnOtherStream, {"OnAStreamOfItsOwnItComputesTheSameBits"}},
  };
  return expected;
}

TEST(Conformance, EachFaultOfADeviceIsFoundByTheCaseThatIsThereForIt) {
  for (const auto& [fault, cases] : FaultsOfDevices()) {
    EXPECT_TRUE(IsOfDevices(fault));
    ExpectFound(fault, "simulator", cases);
    EXPECT_EQ(Conform(absl::StrCat("--technique=", TinyName(fault),
                                   " --gtest_filter=*OneTokenOneHeadOneBatch*"))
                  .exit_code,
              0)
        << "on the CPU " << TinyName(fault) << " is right";
  }
}

// Layer and TechniqueOf refuse these calls before a technique is asked, whatever it would do.
const std::set<std::string>& kOfBaseClasses =
    *new std::set<std::string>{"AFailedCallDoesNotPoisonTheNext",
                               "AppendBeforeSetupIsRefused",
                               "CanonicalOptionsAreFixedPoints",
                               "DtypesThatNoLayerHasAreRefused",
                               "HeadDimsOutOfRangeAreRefusedWithTheRange",
                               "HeadsThatDoNotDivideAreRefused",
                               "NegativeSizesAreRefused",
                               "SegmentsOfNoTokensAreRefused",
                               "UnknownOptionsAreAnsweredWithTheKnownOnes",
                               "ValuesOutOfRangeAreRefusedWithTheRange",
                               "WrongCallsAreRefusedWithAReason",
                               "WrongParametersAreRefused"};
// A technique that lacks what these are about skips them, which harness/conformance/CASES.md shows.
const std::set<std::string>& kOfWhatThereIs =
    *new std::set<std::string>{"ItHasABackwardPass", "OtherSeedsDrawOtherParameters"};

// A case that no fault fails may be one that cannot fail.
TEST(Conformance, EveryCaseIsThereForAFault) {
  std::set<std::string> found = kHandingOver;
  for (const Expected* faults : {&FaultsOfEveryDevice(), &FaultsOfDevices()}) {
    for (const auto& [fault, cases] : *faults) found.insert(cases.begin(), cases.end());
  }
  for (const auto* others : {&kOfBaseClasses, &kOfWhatThereIs}) {
    for (const std::string& name : *others) EXPECT_TRUE(found.insert(name).second) << name;
  }
  std::set<std::string> all;
  const Report list = Conform("--technique=tiny --devices=cpu,simulator --gtest_list_tests");
  for (absl::string_view line : absl::StrSplit(list.output, '\n')) {
    if (absl::StartsWith(line, "  ")) all.insert(CaseOf(absl::StrCat(".", line.substr(2))));
  }
  EXPECT_EQ(found, all) << list.output;
}

// It runs a problem with one mask and one set of options, and the next with others.
TEST(Conformance, TheSimulatorRunsAThirdOfTheProblemsAtLeastWithEachMaskAndWithEachSetOfOptions) {
  const Report list = Conform("--technique=tiny --devices=simulator --gtest_list_tests");
  std::map<std::string, int> counts;
  int all = 0;
  for (absl::string_view line : absl::StrSplit(list.output, '\n')) {
    if (!absl::StrContains(line, "/simulator/")) continue;
    ++all;
    ++counts[absl::StrContains(line, "causal") ? "causal" : "full"];
    ++counts[absl::StrContains(line, "/defaults/") ? "defaults" : "budget"];
  }
  ASSERT_GT(all, 100) << list.output;
  for (const char* part : {"causal", "full", "defaults", "budget"}) {
    EXPECT_GT(counts[part], all / 3) << part << " of " << all;
  }
}

TEST(Conformance, ASeedThatIsIgnoredShows) {
  const Report report = Conform(absl::StrCat("--technique=", TinyName(TinyFault::kIgnoresSeed),
                                             " '--gtest_filter=*OtherSeedsDraw*'"));
  EXPECT_EQ(report.skipped.count("OtherSeedsDrawOtherParameters"), 1u) << report.output;
}

// The test sets up the device's absence itself, since this machine may or may not have a GPU.
TEST(Conformance, AMissingDeviceIsASkipOrAFailureAsTheEnvironmentSays) {
  const std::string cuda = "--technique=tiny --devices=cuda --gtest_filter=*ThereIsADevice*";
  setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
  unsetenv("TFB_REQUIRE_GPU");
  const Report skipped = Conform(cuda);
  EXPECT_EQ(skipped.exit_code, 0);
  EXPECT_EQ(skipped.skipped.count("ThereIsADevice"), 1u) << skipped.output;
  EXPECT_TRUE(absl::StrContains(skipped.output, "no CUDA device: ")) << skipped.output;
  setenv("TFB_REQUIRE_GPU", "1", /*overwrite=*/1);
  const Report failed = Conform(cuda);
  EXPECT_EQ(failed.exit_code, 1);
  EXPECT_EQ(failed.failed.count("ThereIsADevice"), 1u) << failed.output;
  unsetenv("TFB_REQUIRE_GPU");
}

TEST(Conformance, AFaultInOnePlaceDoesNotFailEverything) {
  const Report report = Conform("--technique=tiny_forgets_in_append");
  EXPECT_LE(report.failed.size(), 3u) << report.output;
}

TEST(Conformance, AnUnknownTechniqueIsAnsweredWithTheNearestNames) {
  const Report report = Conform("--technique=tyny");
  EXPECT_EQ(report.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(report.output, "nearest are tiny")) << report.output;
}

}  // namespace
}  // namespace tfb
