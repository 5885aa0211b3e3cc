// Makes repositories for tests of bisections, whose commits build a fake sweep.
#ifndef TFB_RESULTS_HISTORY_BISECT_TESTING_H_
#define TFB_RESULTS_HISTORY_BISECT_TESTING_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tfb {

// A commit to make. Its build copies a script that runs results/history/fake_sweep.cc.
struct FakeCommit {
  std::string name;                  // its subject, and its tag
  std::vector<std::string> parents;  // names; empty: the commit before it
  std::string behaviour;             // of its sweep, as fake_sweep.cc reads it
  bool builds = true;
  bool same_program = false;  // whether it changes nothing that the sweep is made of
};

// A repository of its own folder with a checkout of its last commit.
class FakeRepository {
 public:
  // Makes the folder anew within the test's temporary folder, and sets the variables of git's and
  // of the fake sweep's for this process and its children.
  explicit FakeRepository(const std::string& name);

  // Makes the commits in one go, each with a tag of its name.
  void Commit(const std::vector<FakeCommit>& commits);

  // Makes `count` commits "c0", "c1", ... and lets `behaviour` say what each of them does.
  void CommitLine(int count, const std::function<std::string(int)>& behaviour);

  const std::string& folder() const { return folder_; }  // of everything
  const std::string& checkout() const { return checkout_; }
  // Returns what a command line of the shell prints in the checkout; aborts where it fails.
  std::string Shell(const std::string& command) const;
  // Returns what must not change: branches, the checkout's state, and the list of worktrees.
  std::string Untouched() const;
  std::string Hash(const std::string& name) const;
  // Return the lines that the fake sweep's measurements, and the builds, have written.
  std::vector<std::string> Measurements() const;
  std::vector<std::string> Builds() const;

 private:
  std::string folder_, checkout_;
  int mark_ = 0;
  std::map<std::string, int> marks_;
};

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_BISECT_TESTING_H_
