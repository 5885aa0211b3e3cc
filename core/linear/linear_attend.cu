// Engine linear on CUDA: queries.
//
// A block takes 128 rows of inputs at a time: not causal, 128 queries; causal, the 64 keys of a chunk
// and the 64 queries at their places. It goes through the features in tiles of 64, as flash attention
// goes through keys: projections, the maximum of each row so far, exponentials, and two products that
// are kept in registers and rescaled when a maximum grows,
//
//   output [queries x value_dim] += F S      against the sums of the tile
//   pairs  [64 x 64]             += F E^T    causal: of half of the warps, while the others do the first
//
// After the last tile everything is known that the factors of linear.h need, so that epsilon costs a
// few numbers a row. Causal: weights [64 x 64] of the pairs meet the values of the chunk, and
// meanwhile the sums of each tile have been brought forward by the chunk, S_t <- S_t + E^T V. So a
// block walks the chunks of one query head, or of a group of them where heads are few, and a
// head's sums stay in its shared memory. Query heads that share keys have a block each.
//
// Multiply-adds of a chunk and tile at 64 channels: 2 x 0.26 M projections, 3 x 0.26 M; of a chunk
// 0.26 M more. W, K and Q are read anew for each tile, from L2: at 16 bits 16 + 8 + 8 KiB for 1.3 M
// multiply-adds. The next tile's are on their way, in registers, while the products run.
//
// Shared memory in bytes, T tiles (features / 64), up to 64 channels of values (up to 128):
//
//                         inputs or features   W or E^T   values   sums     held sums
//   Fp32       causal     32 K                 17 K       17 (33)  17 (33)  T x 17.3 (33.5) K
//   SplitBf16  causal     36 K                 18 K       18 (34)  18 (34)  T x 17.3 (33.5) K
//   not causal            32 or 36 K           16 or 18 K          17 or 18 (33 or 34) K
//
// and 11 K of rows. The 256 features of the usual problem, 69 K, are on chip on sm_90 and, in Fp32, on
// sm_80; where they do not fit they are kept in L2, 2 x 17 KiB a chunk and tile.
#include "core/linear/linear_math.cuh"
#include "core/linear/linear_rows.cuh"

namespace tfb {
namespace {

constexpr int kRows = 128;  // of inputs

template <class Math, int kPanels, bool kCausal>
class AttendBlock {
 public:
  static constexpr int kColumns = kTile * kPanels;
  static constexpr int kQueries = kCausal ? kTile : kRows;
  using Rows = typename Math::template Across<kRows>;         // inputs, then features
  using Weights = typename Math::template Across<kTile>;      // of pairs, in the place of features
  using Matrix = typename Math::template Across<kTile>;       // W
  using Scaled = typename Math::template Down<kTile, kTile>;  // features of keys, in W's place
  using Columns = typename Math::template Down<kTile, kColumns>;
  static constexpr int kMatrixBytes =
      kCausal && Scaled::kBytes > Matrix::kBytes ? Scaled::kBytes : Matrix::kBytes;
  static constexpr int kTileBytes =
      Rows::kBytes + kMatrixBytes + (kCausal ? 2 : 1) * Columns::kBytes;

  // Numbers of rows, columns and the block.
  struct Numbers {
    float maximum[kRows];  // of a row's projections so far
    float factor[kRows];   // which brings to it what was relative to the one before
    float half_square[kRows];
    float total[kRows];          // sum of a row's features
    float dot[kRows];            // their product with the normaliser
    float partial[2][2][kRows];  // of the two warps that share a row
    float normaliser[kTile];
    // Keys of the chunk.
    float seen[kTile];
    float log_scale[kTile];  // rho_j; -inf for what is no token
    float running_reference[kTile];
    float running_maximum[kTile];
    float coefficient[kTile];  // exp(rho_j - R) times the sum of the features
    // Queries, after the last tile.
    float product[kQueries];
    float key[kQueries];
    float constant[kQueries];
    float denominator[kQueries];
    float log_scale_of_row[kQueries];
    // By which the chunk's pairs are read.
    float shift[kTile];
    float pair_product[kTile];
    float pair_key[kTile];
    // Columns of values: the sums of all features' sums, and of values.
    float feature_values[kColumns];
    float values[kColumns];
    // Of the head's sums so far: R, max M, the normaliser's sum, tokens.
    float reference, key_maximum, normaliser_sum, tokens;
    // Of the tile's sums: what brings them to the reference that the chunk makes.
    float tile_rescale, tile_reference;
    unsigned not_finite[2];  // whether a value of the chunk is not; chunks take turns
  };

  static size_t Bytes(const LinearArguments& a) {
    return kTileBytes + (sizeof(Numbers) + 15) / 16 * 16 +
           (kCausal && a.on_chip ? a.sums.tiles * a.sums.tile * sizeof(float) : 0);
  }

  __device__ AttendBlock(const LinearArguments& a, int64_t task, unsigned char* memory)
      : a_(a),
        rows_(memory),
        weights_(memory),
        matrix_(memory + Rows::kBytes),
        scaled_(memory + Rows::kBytes),
        sums_(memory + Rows::kBytes + kMatrixBytes),
        values_(memory + Rows::kBytes + kMatrixBytes + Columns::kBytes),
        numbers_(*reinterpret_cast<Numbers*>(memory + kTileBytes)) {
    const int64_t parts = Parts(a);
    first_column_ = static_cast<int>(task % parts) * kColumns;
    columns_ = min(kColumns, a.value_dim - first_column_);
    task /= parts;
    const int64_t pieces = Pieces(a);
    piece_ = task % pieces;
    head_ = task / pieces % a.query_heads;
    batch_ = task / pieces / a.query_heads;
    kv_head_ = head_ / (a.query_heads / a.kv_heads);
    const int64_t sums_head = batch_ * a.kv_heads + kv_head_;
    if (!kCausal) {
      from_ = a.total + sums_head * a.sums.head;
      return;
    }
    piece_ += a.groups - pieces;
    if (a.has_prefixes) from_ = a.group_sums + (sums_head * a.groups + piece_) * a.sums.head;
    held_ = a.on_chip
                ? reinterpret_cast<float*>(memory + kTileBytes + (sizeof(Numbers) + 15) / 16 * 16)
                : a.running + (((batch_ * a.query_heads + head_) * a.groups + piece_) * parts +
                               first_column_ / kColumns) *
                                  a.sums.head;
  }

  static __host__ __device__ int64_t Parts(const LinearArguments& a) {
    return (a.value_dim + kColumns - 1) / kColumns;
  }
  // Not causal: tiles of queries. Causal: the groups of keys at whose places there are queries.
  static __host__ __device__ int64_t Pieces(const LinearArguments& a) {
    if (!kCausal) return (a.query_tokens + kQueries - 1) / kQueries;
    const int64_t offset = a.kv_tokens - a.query_tokens;
    return a.groups - (offset > 0 ? offset / a.group_tokens : 0);
  }
  static __host__ __device__ int64_t Tasks(const LinearArguments& a) {
    return a.query_tokens == 0 ? 0 : a.batch * a.query_heads * Pieces(a) * Parts(a);
  }

  __device__ void Run() {
    Start();
    if (!kCausal) {
      first_query_ = piece_ * kQueries;
      BeginRows(static_cast<int>(min(a_.query_tokens - first_query_, int64_t{kQueries})));
      GoThroughTiles();
      EndRows();
      return;
    }
    const int64_t begin = piece_ * a_.group_tokens;
    const int64_t end = min(begin + a_.group_tokens, a_.kv_tokens);
    for (int64_t first = begin; first < end; first += kTile) {
      first_key_ = first;
      first_query_ = first - (a_.kv_tokens - a_.query_tokens);
      updates_ = first + kTile < end;
      BeginRows(static_cast<int>(min(end - first, int64_t{kTile})));
      LoadValues();
      GoThroughTiles();
      EndChunk();
    }
  }

 private:
  static constexpr int kRowStep = kThreads / 16;  // threads load rows row_ + 16 n
  static constexpr int kLoads = kRows / kRowStep;
  static constexpr int kMatrixLoads = kTile / kRowStep;

  // ---- The head's sums ----

  __device__ const float* Header(const float* sums, int64_t tile) const {
    return sums + tile * a_.sums.tile + (kTile + 1) * a_.sums.row;
  }
  // The maximum over a head's tiles of number `which` of their headers. For all threads.
  __device__ float MaxOfHeaders(const float* sums, int which) {
    float largest = NegativeInfinity();
    for (int64_t t = Thread(); t < a_.sums.tiles; t += kThreads) {
      largest = fmaxf(largest, Header(sums, t)[which]);
    }
    largest = MaxOfWarp(largest);
    __syncthreads();
    if (Lane() == 0) numbers_.partial[0][0][Warp()] = largest;
    __syncthreads();
    return MaxOf(numbers_.partial[0][0], kWarps);
  }

  // What is known of the keys that all rows see.
  __device__ void Start() {
    const int t = Thread();
    const float reference = from_ == nullptr ? NegativeInfinity() : MaxOfHeaders(from_, 0);
    float maximum = from_ == nullptr ? NegativeInfinity() : MaxOfHeaders(from_, 1);
    if (kCausal && a_.map.stabiliser == KeyStabiliser::kSequence) {
      maximum = MaxOfHeaders(a_.total + (batch_ * a_.kv_heads + kv_head_) * a_.sums.head, 1);
    }
    reference_ = reference;
    if (t < kColumns) {
      numbers_.feature_values[t] = t < columns_ ? SumOfTiles(first_column_ + t) : 0;
      numbers_.values[t] = t < columns_ ? ValueSum(first_column_ + t) : 0;
    } else if (t == kThreads - 1) {
      numbers_.normaliser_sum = SumOfTiles(a_.value_dim);
      numbers_.tokens = ValueSum(a_.value_dim);
      numbers_.reference = reference;
      numbers_.key_maximum = maximum;
      numbers_.not_finite[0] = numbers_.not_finite[1] = 0;
    }
    if (kCausal && a_.on_chip) {
      const int64_t tile = a_.sums.tile, length = a_.sums.tiles * tile;
      for (int64_t n = t * 4; n < length; n += kThreads * 4) {
        float4 x = make_float4(0, 0, 0, 0);
        if (from_ != nullptr) {
          x = *reinterpret_cast<const float4*>(from_ + n);
        } else if (n % tile == tile - 4) {
          x.x = NegativeInfinity();
        }
        *reinterpret_cast<float4*>(held_ + n) = x;
      }
    }
    __syncthreads();
    if (kCausal && a_.on_chip) from_ = held_;
  }
  // Of the rows that hold the sums of a tile's rows.
  __device__ float SumOfTiles(int column) const {
    float sum = 0;
    if (from_ == nullptr || reference_ == NegativeInfinity()) return sum;
    for (int64_t tile = 0; tile < a_.sums.tiles; ++tile) {
      sum += Rescale(Header(from_, tile)[0], reference_) *
             from_[tile * a_.sums.tile + kTile * a_.sums.row + column];
    }
    return sum;
  }
  __device__ float ValueSum(int column) const {
    return from_ == nullptr ? 0 : from_[a_.sums.tiles * a_.sums.tile + column];
  }

  // A tile's sums as an operand, at the head's reference.
  __device__ void LoadSums(int64_t tile) {
    const float* from = from_ == nullptr ? nullptr : from_ + tile * a_.sums.tile;
    tile_reference_ = from == nullptr ? NegativeInfinity() : Header(from_, tile)[0];
    const bool is_empty = tile_reference_ == NegativeInfinity();
    const float scale = is_empty ? 0 : Rescale(tile_reference_, reference_);
#pragma unroll
    for (int n = 0; n < kTile / kRowStep; ++n) {
      const int row = row_ + n * kRowStep;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        const int column = p * kTile + channel_;
        float4 x = make_float4(0, 0, 0, 0);
        if (!is_empty && column < columns_) {
          x = *reinterpret_cast<const float4*>(from + row * a_.sums.row + first_column_ + column);
          // The column of ones and what is another part's.
          if (column + 1 >= columns_) x.y = 0;
          if (column + 2 >= columns_) x.z = 0;
          if (column + 3 >= columns_) x.w = 0;
        }
        sums_.Store(row, column, Times(x, scale));
      }
    }
    const int t = Thread();
    if (t < kTile) {
      numbers_.normaliser[t] = is_empty ? 0 : scale * from[t * a_.sums.row + a_.value_dim];
    }
  }

  // ---- Rows ----

  __device__ void BeginRows(int count) {
    count_ = count;
    attends_ = first_query_ + count > 0;
    valid_ = 0;
    __syncthreads();  // what the rows before left has been read
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int row = row_ + n * kRowStep;
      if (kCausal && row < kTile) {
        const bool is_seen = row < count && IsToken(a_, batch_, first_key_ + row);
        valid_ |= (is_seen ? 1u : 0u) << n;
        if (channel_ == 0) numbers_.seen[row] = is_seen ? 1.0f : 0.0f;
      } else {
        const int query = kCausal ? row - kTile : row;
        valid_ |= (query < count && first_query_ + query >= 0 ? 1u : 0u) << n;
      }
    }
    if (Thread() < kRows) {
      numbers_.maximum[Thread()] = IsExponential(a_) ? NegativeInfinity() : 0;
      numbers_.total[Thread()] = numbers_.dot[Thread()] = 0;
    }
    for (int p = 0; p < kPanels; ++p) result_[p].Clear();
    Fetch(0);
  }

  // The first channels of all rows, and of a tile's rows of W.
  __device__ void Fetch(int64_t tile) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) inputs_[n] = InputRow(n).template Fetch<Math>(channel_);
#pragma unroll
    for (int n = 0; n < kMatrixLoads; ++n) {
      w_[n] = ProjectionRow(tile, n).template Fetch<Fp32>(channel_);
    }
  }
  __device__ TensorRow InputRow(int n) const {
    const int row = row_ + n * kRowStep;
    if ((valid_ >> n & 1) == 0) return {nullptr, 1, 0, false};
    if (kCausal && row < kTile) {
      return RowOf(a_.k, batch_, kv_head_, first_key_ + row, a_.head_dim, a_.vector_k);
    }
    const int64_t query = first_query_ + (kCausal ? row - kTile : row);
    return RowOf(a_.q, batch_, head_, query, a_.head_dim, a_.vector_q);
  }
  __device__ TensorRow ProjectionRow(int64_t tile, int n) const {
    const int row = row_ + n * kRowStep;
    if (row >= TileProjections(a_)) return {nullptr, 1, 0, false};
    return MatrixRow(a_, kv_head_, tile * TileProjections(a_) + row);
  }
  __device__ void Put(bool is_first_tile, int depth) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int row = row_ + n * kRowStep;
      const float4 x = Math::Convert(inputs_[n], a_.q.element);
      rows_.Store(row, channel_, x);
      if (is_first_tile) AddHalfSquare(a_, x, depth == 0, numbers_.half_square + row);
    }
#pragma unroll
    for (int n = 0; n < kMatrixLoads; ++n) {
      matrix_.Store(row_ + n * kRowStep, channel_, Times(w_[n], a_.map.input_scale));
    }
  }

  // The keys' values, zeros for what is no token.
  __device__ void LoadValues() {
    bool finite = true;
#pragma unroll
    for (int n = 0; n < kTile / kRowStep; ++n) {
      const int row = row_ + n * kRowStep;
      TensorRow from = {nullptr, 1, 0, false};
      if ((valid_ >> n & 1) != 0) {
        from = RowOf(a_.v, batch_, kv_head_, first_key_ + row, a_.value_dim, a_.vector_v);
      }
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        const int column = p * kTile + channel_;
        const float4 x = Math::Convert(from.Fetch<Math>(first_column_ + column), a_.v.element);
        finite = finite && isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
        values_.Store(row, column, x);
      }
    }
    turn_ ^= 1;
    if (!finite) atomicOr(&numbers_.not_finite[turn_], 1u);
    if (Thread() == 0) numbers_.not_finite[turn_ ^ 1] = 0;
  }

  // ---- Tiles of features ----

  __device__ void GoThroughTiles() {
    for (int64_t tile = 0; tile < a_.sums.tiles; ++tile) {
      LoadSums(tile);
      Fragment<32> features;
      Project(tile, &features);
      FindMaxima(features);
      MakeFeatures(&features);
      if (tile + 1 < a_.sums.tiles) Fetch(tile + 1);
      AddTotals();
      AddProducts();
      __syncthreads();  // the tile's sums have been read
      if (kCausal && updates_) UpdateSums(tile);
      __syncthreads();
    }
    if (kCausal && updates_) from_ = held_;
  }

  __device__ void Project(int64_t tile, Fragment<32>* features) {
    features->Clear();
    Put(tile == 0, 0);
    for (int depth = 0;;) {
      __syncthreads();
      AddProjections<Math>(a_, rows_, row32_, matrix_, column32_,
                           min(kTile, (a_.head_dim - depth + 15) / 16 * 16), features);
      depth += kTile;
      if (depth >= a_.head_dim) break;
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        inputs_[n] = InputRow(n).template Fetch<Math>(depth + channel_);
      }
#pragma unroll
      for (int n = 0; n < kMatrixLoads; ++n) {
        w_[n] = ProjectionRow(tile, n).template Fetch<Fp32>(depth + channel_);
      }
      __syncthreads();
      Put(tile == 0, depth);
    }
    HideMissingFeatures<Math>(a_, tile, column32_, features);
  }

  // The maxima of rows with this tile, and what they change.
  __device__ void FindMaxima(const Fragment<32>& features) {
    const int half = column32_ / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float largest = MaxOfRow(MaxOf(features.at[i], 8));
      if (Lane() % 4 == 0) numbers_.partial[0][half][row32_ + Math::Row(i)] = largest;
    }
    __syncthreads();
    if (Thread() < kRows) {
      const int row = Thread();
      const float before = numbers_.maximum[row];
      float now = before;
      if (IsExponential(a_)) {
        now = fmaxf(fmaxf(now, numbers_.partial[0][0][row]), numbers_.partial[0][1][row]);
      }
      numbers_.maximum[row] = now;
      numbers_.factor[row] = Rescale(before, now);
      if (kCausal && row < kTile) {
        const float log_scale = IsExponential(a_) ? now - numbers_.half_square[row] : 0;
        numbers_.log_scale[row] = numbers_.seen[row] != 0 ? log_scale : NegativeInfinity();
      }
    }
    __syncthreads();
  }

  // From projections, into shared memory. Ends with a barrier.
  __device__ void MakeFeatures(Fragment<32>* features) {
    const bool are_keys = kCausal && row32_ < kTile;
    const int half = column32_ / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row32_ + Math::Row(i);
      const float maximum = numbers_.maximum[row];
      float total = 0, dot = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float& x = features->at[i][j];
        x = IsExponential(a_) ? ExpOf(x - maximum) : x < 0 ? 0 : x;
        total += x;
        if (!are_keys) dot = fmaf(x, numbers_.normaliser[column32_ + Math::Column(j)], dot);
      }
      total = SumOfRow(total);
      dot = SumOfRow(dot);
      if (Lane() % 4 == 0) {
        numbers_.partial[0][half][row] = total;
        numbers_.partial[1][half][row] = dot;
      }
    }
    rows_.Store(row32_, column32_, *features);
    if (are_keys && updates_) ScaleKeys(features);
    RescaleResult();
    __syncthreads();
  }

  // Features of keys as the tile's sums add them: at the reference that the chunk makes.
  __device__ void ScaleKeys(Fragment<32>* features) {
    const float reference =
        fmaxf(tile_reference_,
              MaxOfWarp(fmaxf(numbers_.log_scale[Lane()], numbers_.log_scale[Lane() + 32])));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = ExpOf(numbers_.log_scale[row32_ + Math::Row(i)] - Shift(reference));
#pragma unroll
      for (int j = 0; j < 8; ++j) features->at[i][j] *= scale;
    }
    scaled_.Store(row32_, column32_, *features);
    if (Thread() == 0) {
      numbers_.tile_rescale = Rescale(tile_reference_, reference);
      numbers_.tile_reference = reference;
    }
  }

  __device__ bool DoesPairs() const { return kCausal && Warp() < kWarps / 2; }

  __device__ void RescaleResult() {
    const float* of_queries = numbers_.factor + (kCausal ? kTile : 0) + result_row_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float of_row = of_queries[Math::Row(i)];
      if (DoesPairs()) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          result_[0].at[i][j] *= of_row * numbers_.factor[result_column_ + Math::Column(j)];
        }
        continue;
      }
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int j = 0; j < 8; ++j) result_[p].at[i][j] *= of_row;
      }
    }
  }

  __device__ void AddTotals() {
    if (Thread() >= kRows) return;
    const int row = Thread();
    const auto add = [&](float* to, const float(*partial)[kRows]) {
      to[row] = fmaf(to[row], numbers_.factor[row], partial[0][row] + partial[1][row]);
    };
    add(numbers_.total, numbers_.partial[0]);
    if (!kCausal || row >= kTile) add(numbers_.dot, numbers_.partial[1]);
  }

  __device__ void AddProducts() {
    if (!attends_) return;
    const int row = (kCausal ? kTile : 0) + result_row_;
    if (DoesPairs()) {
      Math::Multiply(rows_, row, rows_, result_column_, kTile, &result_[0], nullptr);
      return;
    }
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      if (p * kTile + result_column_ >= columns_) break;
      Math::Multiply(rows_, row, sums_, p * kTile + result_column_, kTile, &result_[p], nullptr);
    }
  }

  // The tile's sums with the chunk's keys: 64 x 64 of a panel, of which a warp has 32 x 16.
  __device__ void UpdateSums(int64_t tile) {
    const int row = Warp() % 2 * 32, column = Warp() / 2 * 16, depth = (count_ + 15) / 16 * 16;
    const float rescale = numbers_.tile_rescale;
    const float* from = from_ == nullptr ? nullptr : from_ + tile * a_.sums.tile;
    float* to = held_ + tile * a_.sums.tile;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const int first = p * kTile + column;
      if (first >= columns_) break;
      Fragment<16> sums;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int64_t at = SumIndex(row + Math::Row(i), first + Math::Column(j));
          sums.at[i][j] =
              from != nullptr && first + Math::Column(j) < columns_ ? rescale * from[at] : 0;
        }
      }
      float normalisers[4] = {};
      Math::Multiply(scaled_, row, values_, first, depth, &sums, p == 0 ? normalisers : nullptr);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (first + Math::Column(j) >= columns_) continue;
          to[SumIndex(row + Math::Row(i), first + Math::Column(j))] = sums.at[i][j];
        }
        if (first > 0 || Lane() % 4 != 0) continue;
        const int64_t at = (row + Math::Row(i)) * a_.sums.row + a_.value_dim;
        to[at] = (from == nullptr ? 0 : rescale * from[at]) + normalisers[i];
        if (from == to) continue;
        for (int64_t pad = a_.value_dim + 1; pad < a_.sums.row; ++pad) {
          to[(row + Math::Row(i)) * a_.sums.row + pad] = 0;
        }
      }
    }
    if (Thread() == 0) to[(kTile + 1) * a_.sums.row] = numbers_.tile_reference;
  }
  __device__ int64_t SumIndex(int row, int column) const {
    return row * a_.sums.row + first_column_ + column;
  }

  // ---- The end of rows ----

  // Factors and denominators of queries, by one thread each, `row` of the queries. `reference` and
  // `key_maximum` are those of the keys that it sees.
  __device__ RowFactors FindFactors(int row, float reference, float key_maximum) {
    const int input = (kCausal ? kTile : 0) + row;
    const RowFactors factors =
        FactorsOf(a_, {numbers_.maximum[input], numbers_.half_square[input], numbers_.total[input]},
                  reference, key_maximum);
    const float carry = reference_ == NegativeInfinity() ? 0 : Rescale(reference_, reference);
    numbers_.product[row] = carry * factors.product;
    numbers_.key[row] = carry * factors.key;
    numbers_.constant[row] = factors.constant;
    numbers_.denominator[row] =
        carry * (factors.product * numbers_.dot[input] + factors.key * numbers_.normaliser_sum) +
        factors.constant * numbers_.tokens + factors.extra;
    numbers_.log_scale_of_row[row] = factors.log_scale;
    return factors;
  }

  // From the products with the sums to rows of y, times their denominators.
  __device__ void ScaleResult() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = result_row_ + Math::Row(i);
      const float product = numbers_.product[row], key = numbers_.key[row];
      const float constant = numbers_.constant[row];
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int column = p * kTile + result_column_ + Math::Column(j);
          float& y = result_[p].at[i][j];
          y *= product;
          if (a_.map.epsilon == 0) continue;
          y += key * numbers_.feature_values[column] + constant * numbers_.values[column];
        }
      }
    }
  }

  // Divides rows and writes them. `more` is added to the denominators.
  __device__ void StoreResult(const float more[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = result_row_ + Math::Row(i);
      const int64_t query = first_query_ + row;
      if (row >= count_ || query < 0) continue;
      const float reference = kCausal ? numbers_.running_reference[row] : numbers_.reference;
      const bool has_keys = reference != NegativeInfinity();
      const bool is_first = first_column_ == 0 && result_column_ == 0 && Lane() % 4 == 0;
      float denominator = 0;
      if (has_keys) {
        denominator = HoldDenominator(a_, numbers_.denominator[row] + more[i], is_first);
      }
      const float inverse = denominator == 0 ? 0 : 1 / denominator;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int column = p * kTile + result_column_ + Math::Column(j);
          if (column >= columns_) continue;
          StoreOut(a_, batch_, head_, query, first_column_ + column,
                   has_keys ? result_[p].at[i][j] * inverse : 0);
        }
      }
      if (is_first) {
        StoreLogSumExp(a_, batch_, head_, query, denominator, numbers_.log_scale_of_row[row],
                       has_keys);
      }
    }
  }

  // Not causal.
  __device__ void EndRows() {
    if (Thread() < kQueries) {
      FindFactors(Thread(), numbers_.reference, numbers_.key_maximum);
    }
    __syncthreads();
    ScaleResult();
    const float nothing[4] = {};
    StoreResult(nothing);
  }

  // Causal: the pairs, the rows, and the head's numbers with the chunk.
  __device__ void EndChunk() {
    const float tokens = numbers_.tokens, normaliser_sum = numbers_.normaliser_sum;
    if (Warp() == 0) FindRunningMaxima();
    __syncthreads();
    const int t = Thread();
    if (t < kTile && attends_) {
      const float reference = numbers_.running_reference[t];
      const RowFactors factors = FindFactors(t, reference, numbers_.running_maximum[t]);
      numbers_.shift[t] = Shift(reference);
      numbers_.pair_product[t] = factors.product;
      numbers_.pair_key[t] = factors.key;
    }
    const float reference = numbers_.running_reference[kTile - 1];
    const float rescale = reference_ == NegativeInfinity() ? 0 : Rescale(reference_, reference);
    const bool has_epsilon = a_.map.epsilon != 0;
    float feature_values = 0, values = 0;
    if (t < kColumns && has_epsilon && updates_) {
      feature_values = rescale * numbers_.feature_values[t];
      values = numbers_.values[t];
      for (int j = 0; j < count_; ++j) {
        const float value = values_.Get(j, t);
        feature_values = fmaf(numbers_.coefficient[j], value, feature_values);
        values += value;
      }
    }
    __syncthreads();
    if (attends_ && DoesPairs()) StoreWeights();
    HideInfiniteValues();
    __syncthreads();
    if (attends_ && !DoesPairs()) {
      ScaleResult();
      float sums[4] = {};
      AddValues(sums);
      StoreResult(sums);
    }
    __syncthreads();
    if (t < kColumns && updates_) {
      numbers_.feature_values[t] = feature_values;
      numbers_.values[t] = values;
    }
    if (Warp() == kWarps - 1) {
      const int j = Lane();
      const float seen = SumOfWarp(numbers_.seen[j] + numbers_.seen[j + 32]);
      const float sum = SumOfWarp(numbers_.coefficient[j] + numbers_.coefficient[j + 32]);
      if (j == 0) {
        numbers_.tokens = tokens + seen;
        numbers_.normaliser_sum = rescale * normaliser_sum + sum;
        numbers_.reference = reference;
        numbers_.key_maximum = numbers_.running_maximum[kTile - 1];
      }
    }
    reference_ = reference;
  }

  // Of the keys up to each one of the chunk. By one warp.
  __device__ void FindRunningMaxima() {
    const int j = Lane();
    const bool whole = a_.map.stabiliser == KeyStabiliser::kSequence;
    const auto maximum_of = [&](int key) {
      return numbers_.seen[key] != 0 && !whole ? numbers_.maximum[key] : NegativeInfinity();
    };
    RunMaxima(numbers_.reference, numbers_.log_scale[j], numbers_.log_scale[j + 32],
              numbers_.running_reference);
    RunMaxima(numbers_.key_maximum, maximum_of(j), maximum_of(j + 32), numbers_.running_maximum);
    __syncwarp();
    const float shift = Shift(numbers_.running_reference[kTile - 1]);
    for (int key = j; key < kTile; key += 32) {
      numbers_.coefficient[key] = ExpOf(numbers_.log_scale[key] - shift) * numbers_.total[key];
    }
  }
  // to[n] = max(before, values 0 to n), of which the lane has n = lane and lane + 32.
  __device__ void RunMaxima(float before, float low, float high, float* to) {
    low = fmaxf(before, low);
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float other = __shfl_up_sync(~0u, low, lanes);
      if (Lane() >= lanes) low = fmaxf(low, other);
    }
    high = fmaxf(high, __shfl_sync(~0u, low, 31));
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float other = __shfl_up_sync(~0u, high, lanes);
      if (Lane() >= lanes) high = fmaxf(high, other);
    }
    to[Lane()] = low;
    to[Lane() + 32] = high;
  }

  // From products of features to what the values are weighted with.
  __device__ void StoreWeights() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = result_row_ + Math::Row(i);
      const float shift = numbers_.shift[row], product = numbers_.pair_product[row];
      const float key = numbers_.pair_key[row], constant = numbers_.constant[row];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = result_column_ + Math::Column(j);
        float& x = result_[0].at[i][j];
        const float decay = ExpOf(numbers_.log_scale[column] - shift);
        const float weight =
            decay * (product * x + key * numbers_.total[column]) + constant * numbers_.seen[column];
        x = column <= row ? weight : 0;
      }
    }
    weights_.Store(result_row_, result_column_, result_[0]);
  }

  // A weight of 0 must not meet a value that is not finite and not seen: such values are left out of
  // the product, and then added to the rows that see them. The sums have had them.
  __device__ bool HasFiniteValues() const { return numbers_.not_finite[turn_] == 0; }
  __device__ void HideInfiniteValues() {
    if (HasFiniteValues()) return;
    const auto hide = [](float x) { return isfinite(x) ? x : 0; };
    for (int n = 0; n < kTile / kRowStep; ++n) {
      const int row = row_ + n * kRowStep;
      for (int column = channel_; column < kColumns; column += kTile) {
        values_.Store(
            row, column,
            make_float4(hide(values_.Get(row, column)), hide(values_.Get(row, column + 1)),
                        hide(values_.Get(row, column + 2)), hide(values_.Get(row, column + 3))));
      }
    }
  }
  __device__ void AddInfiniteValues() {
    if (HasFiniteValues()) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = result_row_ + Math::Row(i);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int column = p * kTile + result_column_ + Math::Column(j);
          if (column < columns_) AddInfiniteValuesTo(row, column, &result_[p].at[i][j]);
        }
      }
    }
  }
  __device__ void AddInfiniteValuesTo(int row, int column, float* y) const {
    for (int key = 0; key <= row && key < count_; ++key) {
      if (numbers_.seen[key] == 0) continue;
      const float value = LoadElement(a_.v.data, a_.v.element,
                                      batch_ * a_.v.strides[0] + kv_head_ * a_.v.strides[1] +
                                          (first_key_ + key) * a_.v.strides[2] +
                                          (first_column_ + column) * a_.v.strides[3]);
      if (!isfinite(value)) *y = fmaf(weights_.Get(row, key), value, *y);
    }
  }

  // Adds the weighted values of the chunk.
  __device__ void AddValues(float sums[4]) {
    const int depth = (count_ + 15) / 16 * 16;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const int first = p * kTile + result_column_;
      if (first >= columns_) break;
      Math::Multiply(weights_, result_row_, values_, first, depth, &result_[p],
                     p == 0 ? sums : nullptr);
    }
    AddInfiniteValues();
  }

  const LinearArguments& a_;
  const Rows rows_;
  const Weights weights_;
  const Matrix matrix_;
  const Scaled scaled_;
  const Columns sums_;
  const Columns values_;
  Numbers& numbers_;
  int first_column_, columns_;  // of values: this block's part
  int64_t piece_, head_, batch_, kv_head_;
  const float* from_ = nullptr;  // the head's sums before the chunk, or of all keys; null: none
  float* held_ = nullptr;        // where they are brought forward

  // As a thread that loads, and as a warp: in projections, and in results.
  const int row_ = Thread() / 16;
  const int channel_ = Thread() % 16 * 4;
  const int row32_ = Warp() % 4 * 32;
  const int column32_ = Warp() / 4 * 32;
  const int result_row_ = kCausal ? Warp() % 2 * 32 : row32_;
  const int result_column_ = kCausal ? Warp() / 2 % 2 * 32 : column32_;

  int64_t first_query_ = 0, first_key_ = 0;
  int count_ = 0;         // rows of queries, and of keys where causal
  unsigned valid_ = 0;    // bit n: row row_ + 16 n of the inputs is one
  bool attends_ = true;   // there are queries
  bool updates_ = false;  // the chunk is not the last of the block
  int turn_ = 0;
  float reference_ = 0;       // R of the head's sums
  float tile_reference_ = 0;  // and of the tile's
  typename Math::Raw inputs_[kLoads];
  float4 w_[kMatrixLoads];
  Fragment<32> result_[kPanels];
};

// Rows that see no key: those before the first one's place.
__device__ inline void ClearKeylessRows(const LinearArguments& a) {
  const int64_t keyless = min(a.query_tokens - a.kv_tokens, a.query_tokens);
  if (keyless <= 0) return;
  const int64_t rows = a.batch * a.query_heads * keyless;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + Warp(); n < rows;
       n += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t i = n % keyless, h = n / keyless % a.query_heads;
    const int64_t b = n / keyless / a.query_heads;
    for (int c = Lane(); c < a.value_dim; c += 32) StoreOut(a, b, h, i, c, 0);
    if (Lane() == 0) StoreLogSumExp(a, b, h, i, 0, 0, false);
  }
}

template <class Math, int kPanels, bool kCausal>
__global__ void __launch_bounds__(kThreads, !kCausal && kPanels == 1 ? 2 : 1)
    LinearAttend(const LinearArguments a) {
  using Block = AttendBlock<Math, kPanels, kCausal>;
  if (kCausal) ClearKeylessRows(a);
  const int64_t tasks = Block::Tasks(a);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Block(a, task, DynamicShared()).Run();
    __syncthreads();
  }
}

template <class Math, int kPanels, bool kCausal>
struct Attend {
  using Block = AttendBlock<Math, kPanels, kCausal>;
  static const char* Launch(const char* name, const LinearArguments& a, void* stream) {
    int64_t tasks = Block::Tasks(a);
    // Without keys there are rows all the same.
    if (kCausal && tasks == 0 && a.batch * a.query_heads * a.query_tokens > 0) tasks = 1;
    return tfb::Launch(name, &LinearAttend<Math, kPanels, kCausal>,
                       {Blocks(a, tasks), dim3(kThreads), Block::Bytes(a)}, stream, a);
  }
};

// All instantiations: two arithmetics, two widths of values, causal or not.
template <class Math, int kPanels>
const char* AttendWith(const char* causal, const char* whole, const LinearArguments& a,
                       void* stream) {
  return a.causal ? Attend<Math, kPanels, true>::Launch(causal, a, stream)
                  : Attend<Math, kPanels, false>::Launch(whole, a, stream);
}
const char* AttendAll(const LinearArguments& a, void* stream) {
  const bool narrow = a.value_dim <= kTile;
  if (a.q.element == Element::kF32) {
    return narrow ? AttendWith<Fp32, 1>("LinearAttend<Fp32, 1, causal>", "LinearAttend<Fp32, 1>", a,
                                        stream)
                  : AttendWith<Fp32, 2>("LinearAttend<Fp32, 2, causal>", "LinearAttend<Fp32, 2>", a,
                                        stream);
  }
  return narrow ? AttendWith<SplitBf16, 1>("LinearAttend<SplitBf16, 1, causal>",
                                           "LinearAttend<SplitBf16, 1>", a, stream)
                : AttendWith<SplitBf16, 2>("LinearAttend<SplitBf16, 2, causal>",
                                           "LinearAttend<SplitBf16, 2>", a, stream);
}

int64_t SharedBytes(const LinearArguments& a) {
  const bool narrow = a.value_dim <= kTile, is_f32 = a.q.element == Element::kF32;
  return static_cast<int64_t>(narrow   ? is_f32 ? AttendBlock<Fp32, 1, true>::Bytes(a)
                                                : AttendBlock<SplitBf16, 1, true>::Bytes(a)
                                : is_f32 ? AttendBlock<Fp32, 2, true>::Bytes(a)
                                       : AttendBlock<SplitBf16, 2, true>::Bytes(a));
}

}  // namespace

TFB_KERNEL_TABLE(LinearAttendKernels, {&AttendAll, &SharedBytes});

}  // namespace tfb
