#include "core/cuda/simulator/banks.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/cuda/simulator/source_line.h"

namespace cuda_simulator {
namespace {

constexpr size_t kWord = 4;
constexpr size_t kBanks = 32;
constexpr size_t kVector = 16;  // bytes of the largest access of a thread

// Returns the largest number of words in one bank, of the accesses of `count` lanes from `first` on.
int MostInABank(const uintptr_t addresses[kWarp], unsigned lanes, int first, int count,
                size_t bytes) {
  std::vector<uintptr_t> words;
  for (int lane = first; lane < first + count; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const uintptr_t last = (addresses[lane] + bytes - 1) / kWord;
    for (uintptr_t word = addresses[lane] / kWord; word <= last; ++word) words.push_back(word);
  }
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  int in_bank[kBanks] = {};
  for (const uintptr_t word : words) ++in_bank[word % kBanks];
  return *std::max_element(in_bank, in_bank + kBanks);
}

size_t PowerOfTwoFrom(size_t n) {
  size_t power = 1;
  while (power < n) power *= 2;
  return power;
}

}  // namespace

Wavefronts WavefrontsOf(const uintptr_t addresses[kWarp], unsigned lanes, size_t bytes) {
  const int group = kWarp / std::max(1, static_cast<int>(bytes / kWord));
  Wavefronts wavefronts = {};
  for (int first = 0; first < kWarp; first += group) {
    const int most = MostInABank(addresses, lanes, first, group, bytes);
    wavefronts.all += most;
    wavefronts.least += most > 0;
  }
  return wavefronts;
}

// Finds which accesses of lanes belong together.
class Banks::Matching {
 public:
  Matching(const Accesses of_lanes[kWarp], unsigned lanes) {
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((lanes >> lane & 1) != 0) AddLane(lane, of_lanes[lane]);
    }
  }

  // Calls count(first group, bytes) for each access, which may consist of several groups.
  template <class Count>
  void ForEach(const Count& count) {
    std::vector<bool> is_part(groups_.size());
    for (size_t n = 0; n < groups_.size(); ++n) {
      if (is_part[n]) continue;
      const std::vector<size_t> parts = PartsOf(n);
      for (const size_t part : parts) is_part[part] = true;
      count(groups_[n], PowerOfTwoFrom(parts.size() * groups_[n].bytes));
    }
  }

 private:
  void AddLane(int lane, const Accesses& accesses) {
    std::map<std::pair<const void*, size_t>, int> times;  // by site and bytes
    for (size_t place = 0; place < accesses.size(); ++place) {
      const Access& access = accesses[place];
      const int time = times[{access.site, access.bytes}]++;
      const auto [entry, is_new] =
          numbers_.insert({{access.site, access.bytes, time}, groups_.size()});
      if (is_new) groups_.push_back({access.site, access.bytes, 0, {}, {}});
      Group& group = groups_[entry->second];
      group.lanes |= 1u << lane;
      group.addresses[lane] = access.address;
      group.places[lane] = place;
      numbers_of_lane_[lane].push_back(entry->second);
    }
  }

  // Returns the groups that are parts of one vector with group n, itself the first.
  std::vector<size_t> PartsOf(size_t n) const {
    std::vector<size_t> parts = {n};
    size_t whole = 1;  // the parts of the largest vector so far
    const int lane = __builtin_ctz(groups_[n].lanes);
    while ((parts.size() + 1) * groups_[n].bytes <= kVector) {
      const size_t place = groups_[parts.back()].places[lane] + 1;
      if (place >= numbers_of_lane_[lane].size()) break;
      const size_t next = numbers_of_lane_[lane][place];
      if (!Continues(parts, next)) break;
      parts.push_back(next);
      if (IsAligned(groups_[n], PowerOfTwoFrom(parts.size() * groups_[n].bytes))) {
        whole = parts.size();
      }
    }
    parts.resize(whole);
    return parts;
  }
  bool Continues(const std::vector<size_t>& parts, size_t next) const {
    const Group& last = groups_[parts.back()];
    const Group& group = groups_[next];
    if (group.lanes != last.lanes || group.bytes != last.bytes) return false;
    for (const size_t part : parts) {
      if (groups_[part].site == group.site) return false;
    }
    for (unsigned left = group.lanes; left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (group.places[lane] != last.places[lane] + 1) return false;
      if (group.addresses[lane] != last.addresses[lane] + last.bytes) return false;
    }
    return true;
  }
  static bool IsAligned(const Group& group, size_t bytes) {
    for (unsigned left = group.lanes; left != 0; left &= left - 1) {
      if (group.addresses[__builtin_ctz(left)] % bytes != 0) return false;
    }
    return true;
  }

  std::vector<Group> groups_;
  std::map<std::tuple<const void*, size_t, int>, size_t> numbers_;  // of groups
  std::vector<size_t> numbers_of_lane_[kWarp];                      // in the lane's order
};

void Banks::StartLaunch(bool counts, const char* kernel) {
  counts_ = counts;
  if (!counts) return;
  ForgetAccesses();
  counted_here_ = &counted_[kernel];
}

void Banks::Note(int thread, AccessKind kind, uintptr_t address, size_t bytes, const void* site) {
  if (kind == AccessKind::kAtomic || kind == AccessKind::kCopyEnd) return;
  Accesses& accesses = (kind == AccessKind::kRead ? loads_ : stores_)[thread];
  // A larger access is loaded and stored in vectors, as far as it is aligned.
  while (bytes > 0) {
    size_t piece = kVector;
    while (piece > bytes || address % piece != 0) piece /= 2;
    accesses.push_back({site, address, piece});
    address += piece;
    bytes -= piece;
  }
}

void Banks::Meet(int warp, unsigned lanes) {
  for (const bool is_store : {false, true}) {
    Accesses* of_lanes = (is_store ? stores_ : loads_) + warp * kWarp;
    Matching(of_lanes, lanes).ForEach([&](const Group& group, size_t bytes) {
      const Wavefronts wavefronts = WavefrontsOf(group.addresses, group.lanes, bytes);
      Count& count = (*counted_here_)[{group.site, is_store}];
      ++count.accesses;
      count.wavefronts += wavefronts.all;
      count.extra += wavefronts.all - wavefronts.least;
    });
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      of_lanes[__builtin_ctz(left)].clear();
    }
  }
}

void Banks::ForgetAccesses() {
  for (Accesses& accesses : loads_) accesses.clear();
  for (Accesses& accesses : stores_) accesses.clear();
}

std::vector<BankUse> Banks::Take() {
  std::vector<BankUse> uses;
  for (auto& [kernel, counts] : counted_) {
    std::vector<const void*> sites;
    for (const auto& [place, count] : counts) sites.push_back(place.first);
    const std::vector<std::string> lines = SourceLines(sites);
    std::map<std::pair<std::string, bool>, BankUse> by_line;
    size_t n = 0;
    for (const auto& [place, count] : counts) {
      BankUse& use = by_line[{lines[n++], place.second}];
      use.accesses += count.accesses;
      use.wavefronts += count.wavefronts;
      use.extra += count.extra;
    }
    for (auto& [line, use] : by_line) {
      use.kernel = kernel;
      use.source = line.first;
      use.is_store = line.second;
      uses.push_back(std::move(use));
    }
    counts.clear();
  }
  std::stable_sort(uses.begin(), uses.end(),
                   [](const BankUse& a, const BankUse& b) { return a.extra > b.extra; });
  return uses;
}

}  // namespace cuda_simulator
