#include "attention/linformer/fit.h"

#include <algorithm>
#include <cmath>

#include "Eigen/Dense"

namespace tfb::linformer {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;

// Squares of singular values below this share of the largest are rounding errors, since inputs are
// fp32; so are those below this share of the squares of all rows before their mean was subtracted.
constexpr double kLeastSquare = 1e-12;
constexpr double kLeastSquareOfRows = 1e-24;

// Returns the rows of the tensors' tokens side by side.
MatrixXd Gather(const std::vector<ConstTensorView>& tensors, const std::vector<int64_t>& tokens) {
  int64_t columns = 0;
  for (const ConstTensorView& tensor : tensors) columns += tensor.dim(1);
  MatrixXd rows(tokens.size(), columns);
  int64_t column = 0;
  for (const ConstTensorView& tensor : tensors) {
    for (int64_t c = 0; c < tensor.dim(1); ++c, ++column) {
      for (size_t n = 0; n < tokens.size(); ++n) {
        rows(n, column) = tensor.Get(tensor.Offset(tokens[n], c));
      }
    }
  }
  return rows;
}

// U and the squares of S of a truncated singular value decomposition.
struct LeftSingular {
  MatrixXd vectors;
  VectorXd squares;
};

// Computes those of the `most` largest singular values whose squares exceed `least`, by the
// eigenvectors of whichever of M^T M and M M^T is smaller.
LeftSingular Decompose(const MatrixXd& m, int64_t most, double least) {
  const bool is_tall = m.rows() > m.cols();
  MatrixXd products;
  if (is_tall) {
    products.noalias() = m.transpose() * m;
  } else {
    products.noalias() = m * m.transpose();
  }
  const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(products);  // ascending
  const VectorXd& values = solver.eigenvalues();
  least = std::max(least, kLeastSquare * values(values.size() - 1));
  const int64_t rank = std::min<int64_t>(most, (values.array() > least).count());
  LeftSingular left{solver.eigenvectors().rightCols(rank), values.tail(rank)};
  if (is_tall) {
    left.vectors = m * left.vectors;
    left.vectors.array().rowwise() /= left.squares.array().sqrt().transpose();
  }
  return left;
}

// Returns U V^T of m = U S V^T, the matrix with orthonormal columns that is closest to m.
MatrixXd PolarFactor(const MatrixXd& m) {
  constexpr int kThin = Eigen::ComputeThinU | Eigen::ComputeThinV;
#if EIGEN_VERSION_AT_LEAST(3, 4, 90)
  const Eigen::BDCSVD<MatrixXd, kThin> svd(m);
#else
  const Eigen::BDCSVD<MatrixXd> svd(m, kThin);
#endif
  return svd.matrixU() * svd.matrixV().transpose();
}

// Returns R of linformer.h. |sqrt(slots / n) R S - rows S|^2 over the orthonormal R is least for
// the polar factor of rows S^2 (Schoenemann's orthogonal Procrustes problem).
MatrixXd Rotation(const LeftSingular& left, int64_t slots) {
  const int64_t tokens = left.vectors.rows(), rank = left.vectors.cols();
  MatrixXd rows(slots, rank + 1);
  rows.col(0).setConstant(1 / std::sqrt(static_cast<double>(slots)));
  for (int64_t s = 0; s < slots; ++s) {
    rows.row(s).rightCols(rank) = left.vectors.row(s * tokens / slots);
  }
  for (int64_t c = 1; c <= rank; ++c) {
    rows.col(c).array() -= rows.col(c).mean();
    rows.col(c) *= left.squares(c - 1) / left.squares(rank - 1);
  }
  return PolarFactor(rows);
}

}  // namespace

absl::Status FitTable(const std::vector<ConstTensorView>& keys_and_values,
                      const std::vector<bool>& is_token, const TensorView& e) {
  Fill(e, 0);
  std::vector<int64_t> tokens;
  for (size_t t = 0; t < is_token.size(); ++t) {
    if (is_token[t]) tokens.push_back(static_cast<int64_t>(t));
  }
  if (tokens.empty() || e.dim(0) == 0) return absl::OkStatus();
  const double n = static_cast<double>(tokens.size());
  const int64_t slots = e.dim(0);

  MatrixXd rows = Gather(keys_and_values, tokens);
  if (!rows.allFinite()) {
    return absl::InvalidArgumentError(
        "projection=fit needs finite keys and values; there is an infinity or NaN among them");
  }
  const double least = kLeastSquareOfRows * rows.squaredNorm();
  rows.rowwise() -= rows.colwise().mean().eval();
  const LeftSingular left = Decompose(rows, slots - 1, least);
  const MatrixXd rotation = Rotation(left, slots);
  MatrixXd fitted = rotation.rightCols(left.vectors.cols()) * left.vectors.transpose();
  // This adds the product of the two constant columns.
  fitted.array() += 1 / std::sqrt(static_cast<double>(slots) * n);
  fitted *= std::sqrt(static_cast<double>(slots) / n);
  for (int64_t s = 0; s < slots; ++s) {
    for (size_t t = 0; t < tokens.size(); ++t) {
      *e.MutableAt<float>(s, tokens[t]) = static_cast<float>(fitted(s, t));
    }
  }
  return absl::OkStatus();
}

}  // namespace tfb::linformer
