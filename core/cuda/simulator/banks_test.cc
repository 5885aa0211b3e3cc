#include "core/cuda/simulator/banks.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <set>

namespace cuda_simulator {
namespace {

constexpr unsigned kAll = ~0u;
constexpr uintptr_t kShared = 1 << 20;  // where shared memory begins

// Returns the wavefronts that conflicts add to an access at these offsets.
int Extra(const std::function<uintptr_t(int lane)>& offset, size_t bytes, unsigned lanes = kAll) {
  uintptr_t addresses[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) {
    addresses[lane] = kShared + offset(lane);
  }
  const Wavefronts wavefronts = WavefrontsOf(addresses, lanes, bytes);
  return wavefronts.all - wavefronts.least;
}
uintptr_t Stride(int lane, size_t bytes) { return static_cast<uintptr_t>(lane) * bytes; }

TEST(Wavefronts, WordsOfDifferentBanksTakeOne) {
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 4); }, 4), 0);
  EXPECT_EQ(Extra([](int lane) { return Stride(31 - lane, 4); }, 4), 0);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 33 * 4); }, 4), 0);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 4) + 36; }, 4), 0);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 8); }, 8), 0);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 16); }, 16), 0);
}

TEST(Wavefronts, WordsOfOneBankTakeOneEach) {
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 128); }, 4), 31);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 8); }, 4), 1);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 128); }, 4, 0xffff), 15);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 128); }, 4, 1), 0);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 128); }, 8), 15 + 15);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 128); }, 16), 4 * 7);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 32); }, 16), 4 * 1);
}

TEST(Wavefronts, LanesAtOneWordCountOnce) {
  EXPECT_EQ(Extra([](int) { return 12; }, 4), 0);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 2); }, 2), 0);  // two lanes a word
  EXPECT_EQ(Extra([](int lane) { return Stride(lane, 1); }, 1), 0);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane % 4, 128); }, 4), 3);
  EXPECT_EQ(Extra([](int lane) { return Stride(lane / 8, 128); }, 16), 0);
}

// The least number of passes, by taking away a word of each bank as long as there are any.
TEST(Wavefronts, AreTheFewestPassesThatTakeAWordOfEachBank) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const size_t bytes = size_t{4} << trial % 3;
    const int group = kWarp * 4 / static_cast<int>(bytes);
    const unsigned lanes = trial % 5 == 0 ? static_cast<unsigned>(random()) : kAll;
    uintptr_t addresses[kWarp];
    for (uintptr_t& address : addresses) address = kShared + random() % 64 * bytes;
    int passes = 0;
    for (int first = 0; first < kWarp; first += group) {
      std::set<uintptr_t> words;
      for (int lane = first; lane < first + group; ++lane) {
        for (size_t byte = 0; byte < bytes && (lanes >> lane & 1) != 0; ++byte) {
          words.insert((addresses[lane] + byte) / 4);
        }
      }
      for (; !words.empty(); ++passes) {
        for (uintptr_t bank = 0; bank < 32; ++bank) {
          for (const uintptr_t word : words) {
            if (word % 32 != bank) continue;
            words.erase(word);
            break;
          }
        }
      }
    }
    EXPECT_EQ(WavefrontsOf(addresses, lanes, bytes).all, passes);
  }
}

// ---- Which accesses belong together ----

const char code[64] = {};
const void* Site(int n) { return code + n; }

// The accesses of the first warp.
class Warp {
 public:
  Warp() { banks_.StartLaunch(/*counts=*/true, "Kernel"); }

  void Note(int lane, int site, uintptr_t offset, size_t bytes = 4,
            AccessKind kind = AccessKind::kRead) {
    banks_.Note(lane, kind, kShared + offset, bytes, Site(site));
  }
  void Meet(unsigned lanes = kAll) { banks_.Meet(0, lanes); }
  // Sums up the counts of all places.
  void Take(BankUse* loads, BankUse* stores) {
    for (const BankUse& use : banks_.Take()) {
      BankUse* sum = use.is_store ? stores : loads;
      sum->accesses += use.accesses;
      sum->wavefronts += use.wavefronts;
      sum->extra += use.extra;
    }
  }
  // Returns the counts of the loads, where there are no stores.
  BankUse TakeLoads() {
    BankUse loads, stores;
    Take(&loads, &stores);
    EXPECT_EQ(stores.accesses, 0);
    return loads;
  }

 private:
  Banks banks_;
};

void Expect(const BankUse& use, int64_t accesses, int64_t wavefronts, int64_t extra) {
  EXPECT_EQ(use.accesses, accesses);
  EXPECT_EQ(use.wavefronts, wavefronts);
  EXPECT_EQ(use.extra, extra);
}

TEST(Banks, AccessesOfOnePlaceAndNumberAreOneAccessOfTheWarp) {
  Warp warp;
  // Lane l passes l + 1 times, each time through a row of a tile of 33 columns.
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int row = 0; row <= lane; ++row) {
      warp.Note(lane, 1, Stride(row, 33 * 4) + Stride(lane, 4));
    }
  }
  warp.Meet();
  Expect(warp.TakeLoads(), 32, 32, 0);
}

TEST(Banks, AccessesOfDifferentPlacesHaveNoConflicts) {
  Warp warp;
  for (int lane = 0; lane < kWarp; ++lane) warp.Note(lane, lane % 2, Stride(lane / 2, 4));
  warp.Meet();
  Expect(warp.TakeLoads(), 2, 2, 0);
}

TEST(Banks, LanesThatMeetInBetweenBeginAnew) {
  Warp warp;
  for (int lane = 0; lane < kWarp; ++lane) {
    warp.Note(lane, 1, Stride(lane, 4));
    if (lane >= 16) continue;
    warp.Meet(1u << lane);
    warp.Note(lane, 1, Stride(lane, 4));
  }
  warp.Meet();
  Expect(warp.TakeLoads(), 16 + 1, 17, 0);
}

TEST(Banks, PartsOfAVectorAreOneAccess) {
  Warp warp;
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int part = 0; part < 4; ++part) warp.Note(lane, part, Stride(lane, 16) + 4 * part);
  }
  warp.Meet();
  Expect(warp.TakeLoads(), 1, 4, 0);
  // Three parts are a vector of which one number is not used.
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int part = 0; part < 3; ++part) warp.Note(lane, part, Stride(lane, 16) + 4 * part);
  }
  warp.Meet();
  Expect(warp.TakeLoads(), 1, 4, 0);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int part = 0; part < 2; ++part) warp.Note(lane, part, Stride(lane, 8) + 4 * part);
  }
  warp.Meet();
  Expect(warp.TakeLoads(), 1, 2, 0);
}

TEST(Banks, NeighboursOfALoopOrOfAnUnalignedPlaceAreAccessesOfTheirOwn) {
  Warp warp;
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int part = 0; part < 4; ++part) warp.Note(lane, 0, Stride(lane, 16) + 4 * part);
  }
  warp.Meet();
  Expect(warp.TakeLoads(), 4, 16, 12);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int part = 0; part < 4; ++part) warp.Note(lane, part, Stride(lane, 33 * 4) + 4 * part);
  }
  warp.Meet();
  Expect(warp.TakeLoads(), 4, 4, 0);
  // Two numbers of a vector with one between them.
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int part = 0; part < 2; ++part) warp.Note(lane, part, Stride(lane, 16) + 8 * part);
  }
  warp.Meet();
  Expect(warp.TakeLoads(), 2, 8, 6);
}

TEST(Banks, LoadsStoresAndCopiesAreCountedAndAtomicsAreNot) {
  Warp warp;
  for (int lane = 0; lane < kWarp; ++lane) {
    warp.Note(lane, 1, Stride(lane, 8));
    warp.Note(lane, 2, Stride(lane, 128), 4, AccessKind::kWrite);
    warp.Note(lane, 3, Stride(lane, 16), 16, AccessKind::kCopyBegin);
    warp.Note(lane, 4, Stride(lane, 128), 4, AccessKind::kAtomic);
    warp.Note(lane, 5, Stride(lane, 128), 16, AccessKind::kCopyEnd);
  }
  warp.Meet();
  BankUse loads, stores;
  warp.Take(&loads, &stores);
  Expect(loads, 1, 2, 1);
  Expect(stores, 2, 32 + 4, 31);
}

TEST(Banks, LargeCopiesAreVectors) {
  Warp warp;
  for (int lane = 0; lane < kWarp; ++lane) warp.Note(lane, 1, Stride(lane, 48), 40);
  warp.Meet();
  // Vectors of 16, 16 and 8 bytes, 48 bytes from the next lane's: 12 words, so that eight lanes
  // have each bank once, and sixteen lanes with two words each twice.
  Expect(warp.TakeLoads(), 3, 4 + 4 + 4, 2);
}

}  // namespace
}  // namespace cuda_simulator
