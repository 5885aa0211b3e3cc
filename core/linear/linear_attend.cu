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
// After the last tile everything is known that the factors of linear.h need, so that epsilon costs
// a few numbers a row. Causal: weights [64 x 64] of the pairs are multiplied by the values of the
// chunk; before that, the chunk has been added to the sums of each tile, S_t <- S_t + E^T V. So a
// block walks the chunks of one query head, or of a group of them where heads are few, and a head's
// sums stay in its shared memory. Query heads that share keys have a block each.
//
// Multiply-adds of a chunk and tile at 64 channels: 2 x 0.26 M projections, 3 x 0.26 M; of a chunk
// 0.26 M more. W, K and Q are read again for each tile, from L2: at 16 bits 16 + 8 + 8 KiB for 1.3
// M multiply-adds. The next tile's elements are loaded to registers while the products run.
//
// Shared memory in bytes, T tiles (features / 64), up to 64 channels of values (up to 128):
//
//                         inputs or features   W or E^T   values   sums     held sums
//   Fp32       causal     32 K                 17 K       17 (33)  17 (33)  T x 17.3 (33.5) K
//   SplitBf16  causal     37 K                 28 K       18 (35)  18 (35)  T x 17.3 (33.5) K
//   not causal            32 or 37 K           16 or 28 K          17 or 18 (33 or 35) K
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
  using Rows = typename Math::template Inputs<kRows>;  // inputs, then features
  // Weights of pairs, in the place of features.
  using Weights = typename Math::template Across<kTile>;
  using Matrix = typename Math::Matrix;                       // W
  using Scaled = typename Math::template Down<kTile, kTile>;  // features of keys, in W's place
  using Columns = typename Math::template Down<kTile, kColumns>;
  static constexpr int kMatrixBytes =
      kCausal && Scaled::kBytes > Matrix::kBytes ? Scaled::kBytes : Matrix::kBytes;
  static constexpr int kTileBytes =
      Rows::kBytes + kMatrixBytes + (kCausal ? 2 : 1) * Columns::kBytes;

  static constexpr int kStagedStride = (kCausal ? kColumns : kTile) + Math::kPad;
  static_assert(kTile * kStagedStride * 4 <= Columns::kBytes || !kCausal,
                "rows of y take the sums' place");
  static_assert(kRows * kStagedStride * 4 <= Rows::kBytes + kMatrixBytes || kCausal,
                "rows of y take the features' and W's place");

  // Numbers of rows, columns and the block.
  struct Numbers {
    float maximum[kRows];  // maxima of rows' projections so far
    float factor[kRows];   // factor that makes results at the previous maximum relative to this one
    float half_square[kRows];
    float total[kRows];          // sum of a row's features
    float dot[kRows];            // product of the features with the normaliser
    float partial[2][2][kRows];  // results of the two warps that share a row
    float normaliser[kTile];
    // Numbers of the keys of the chunk.
    float seen[kTile];
    float log_scale[kTile];  // rho_j; -inf where j is no token
    float running_reference[kTile];
    float running_maximum[kTile];
    float coefficient[kTile];  // exp(rho_j - R) times the sum of the features
    float gate[kTile];         // key_gates, 0 without gates; decay of the last key behind them
    float decay[kTile];
    // Numbers of the queries, after the last tile.
    float product[kQueries];
    float key[kQueries];
    float constant[kQueries];
    float denominator[kQueries];
    float log_scale_of_row[kQueries];
    float inverse[kQueries];  // inverses of the denominators
    unsigned has_keys[kQueries];
    // Factors of the chunk's pairs.
    float shift[kTile];
    float pair_product[kTile];
    float pair_key[kTile];
    // Columns of values: the sums of all features' sums, and of values.
    float feature_values[kColumns];
    float values[kColumns];
    // The head's numbers so far: R, max M, the normaliser's sum, tokens.
    float reference, key_maximum, normaliser_sum, tokens;
    // The tile's numbers: the factor that makes its sums relative to the chunk's reference, and
    // that reference.
    float tile_rescale, tile_reference;
    // Whether a value of the chunk is not finite; chunks use the two in turn.
    unsigned not_finite[2];
  };

  static constexpr int kNumbersBytes = (sizeof(Numbers) + 15) / 16 * 16;
  static constexpr int kElementBytes = sizeof(typename Math::Raw) / 4;
  // Where two blocks share a multiprocessor, one computes while the other waits for memory.
  static constexpr bool kPrefetches = kCausal;

  // Causal blocks may hold the sums of all tiles, where the GPU has room.
  static constexpr size_t kMostBytes = kCausal ? 0 : kTileBytes + kNumbersBytes;
  static size_t Bytes(const LinearArguments& a) {
    return kTileBytes + kNumbersBytes +
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
        staged_(reinterpret_cast<float*>(kCausal ? memory + Rows::kBytes + kMatrixBytes : memory)),
        numbers_(*reinterpret_cast<Numbers*>(memory + kTileBytes)) {
    const int64_t parts = Parts(a), pieces = Pieces(a);
    const int part = static_cast<int>(task % parts);
    first_column_ = part * kColumns;
    columns_ = min(kColumns, a.value_dim - first_column_);
    task /= parts;
    piece_ = task % pieces;
    const int64_t head = task / pieces;
    head_ = static_cast<int>(head % a.query_heads);
    batch_ = static_cast<int>(head / a.query_heads);
    kv_head_ = static_cast<int>(head_ / (a.query_heads / a.kv_heads));
    const int64_t kv_head = batch_ * a.kv_heads + kv_head_;
    if (!kCausal) {
      from_ = a.total + kv_head * a.sums.head;
      return;
    }
    piece_ += a.groups - pieces;
    if (a.has_prefixes) from_ = a.group_sums + (kv_head * a.groups + piece_) * a.sums.head;
    held_ = a.on_chip ? reinterpret_cast<float*>(memory + kTileBytes + kNumbersBytes)
                      : a.running + ((head * a.groups + piece_) * parts + part) * a.sums.head;
  }

  // Returns the number of blocks that share the columns of values; each repeats the features.
  static __host__ __device__ int64_t Parts(const LinearArguments& a) {
    return (a.value_dim + kColumns - 1) / kColumns;
  }
  // Returns the number of pieces: not causal, tiles of queries; causal, the groups of keys at whose
  // places there are queries.
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
  // A thread loads four channels of each of the rows LoadRow() + 16 n.
  static constexpr int kRowStep = kThreads / 16;
  static constexpr int kLoads = kRows / kRowStep;
  static constexpr int kKeyLoads = kCausal ? kTile / kRowStep : 0;
  static constexpr int kMatrixLoads = kTile / kRowStep;
  __device__ static int LoadRow() { return Thread() / 16; }
  __device__ static int Channel() { return Thread() % 16 * 4; }
  // A warp's place in projections, and in its result. Where causal, half of the warps compute
  // pairs; all others compute rows of y.
  __device__ static int TokenRow() { return OpaqueWarp() % 4 * 32; }
  __device__ static int FeatureColumn() { return OpaqueWarp() / 4 * 32; }
  __device__ static int ResultRow() { return kCausal ? OpaqueWarp() % 2 * 32 : TokenRow(); }
  __device__ static int ResultColumn() {
    return kCausal ? OpaqueWarp() / 2 % 2 * 32 : FeatureColumn();
  }
  __device__ static bool DoesPairs() { return kCausal && OpaqueWarp() < kWarps / 2; }
  static constexpr int kFirstQuery = kCausal ? kTile : 0;  // first query among the rows

  // ---- The head's sums ----

  __device__ const float* Header(const float* sums, int64_t tile) const {
    return sums + tile * a_.sums.tile + (kTile + 1) * a_.sums.row;
  }
  // Returns the maximum of number `which` of the tiles' headers of a head. All threads call it.
  __device__ float MaxOfHeaders(const float* sums, int which) {
    float largest = -INFINITY;
    for (int64_t t = Thread(); t < a_.sums.tiles; t += kThreads) {
      largest = fmaxf(largest, Header(sums, t)[which]);
    }
    largest = MaxOfWarp(largest);
    __syncthreads();
    if (OpaqueLane() == 0) numbers_.partial[0][0][OpaqueWarp()] = largest;
    __syncthreads();
    return MaxOf(numbers_.partial[0][0], kWarps);
  }

  // Takes over the numbers of the keys that all rows see.
  __device__ void Start() {
    const int t = Thread();
    reference_ = from_ == nullptr ? -INFINITY : MaxOfHeaders(from_, 0);
    float maximum = from_ == nullptr ? -INFINITY : MaxOfHeaders(from_, 1);
    if (kCausal && a_.map.stabiliser == KeyStabiliser::kSequence) {
      maximum = MaxOfHeaders(a_.total + (batch_ * a_.kv_heads + kv_head_) * a_.sums.head, 1);
    }
    if (t < kColumns) {
      numbers_.feature_values[t] = t < columns_ ? SumOfTiles(first_column_ + t) : 0;
      numbers_.values[t] = t < columns_ ? ValueSum(first_column_ + t) : 0;
    } else if (t == kThreads - 1) {
      numbers_.normaliser_sum = SumOfTiles(a_.sums.ones);
      numbers_.tokens = ValueSum(a_.sums.ones);
      numbers_.reference = reference_;
      numbers_.key_maximum = maximum;
      numbers_.not_finite[0] = numbers_.not_finite[1] = 0;
    }
    __syncthreads();
  }
  // Returns a column's sum over the rows that hold the sums of a tile's rows.
  __device__ float SumOfTiles(int64_t column) const {
    float sum = 0;
    if (from_ == nullptr || reference_ == -INFINITY) return sum;
    for (int64_t tile = 0; tile < a_.sums.tiles; ++tile) {
      sum += Rescale(Header(from_, tile)[0], reference_) *
             from_[tile * a_.sums.tile + kTile * a_.sums.row + column];
    }
    return sum;
  }
  __device__ float ValueSum(int64_t column) const {
    return from_ == nullptr ? 0 : from_[a_.sums.tiles * a_.sums.tile + column];
  }

  // Loads a tile's sums as an operand, at the head's reference.
  __device__ void LoadSums(int64_t tile) {
    const float* from = from_ == nullptr ? nullptr : from_ + tile * a_.sums.tile;
    tile_reference_ = from == nullptr ? -INFINITY : Header(from_, tile)[0];
    const bool is_empty = tile_reference_ == -INFINITY;
    const float scale = is_empty ? 0 : Rescale(tile_reference_, reference_);
    const int first_row = LoadRow(), channel = Channel();
#pragma unroll
    for (int n = 0; n < kTile / kRowStep; ++n) {
      const int row = first_row + n * kRowStep;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        const int column = p * kTile + channel;
        float4 x = make_float4(0, 0, 0, 0);
        if (!is_empty && column < columns_) {
          x = *reinterpret_cast<const float4*>(from + row * a_.sums.row + first_column_ + column);
        }
        sums_.Store(row, column, Times(x, scale));
      }
    }
    const int t = Thread();
    if (t < kTile) {
      numbers_.normaliser[t] = is_empty ? 0 : scale * from[t * a_.sums.row + a_.sums.ones];
    }
  }

  // Adds the chunk's keys to the tile's sums: 64 x 64 of a panel, of which a warp has 32 x 16.
  __device__ void UpdateSums(int64_t tile) {
    const int row = OpaqueWarp() % 2 * 32, column = OpaqueWarp() / 2 * 16,
              depth = (count_ + 15) / 16 * 16;
    const float* from = from_ == nullptr ? nullptr : from_ + tile * a_.sums.tile;
    float* to = held_ + tile * a_.sums.tile;
    const float rescale = from == nullptr ? 0 : numbers_.tile_rescale;
    const int columns = (columns_ + 3) / 4 * 4;  // padding stays 0
    const int first_row = row + Math::FirstRow();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const int panel_column = p * kTile + column;
      if (panel_column >= columns_) break;
      const int first = panel_column + Math::FirstColumn();
      const int64_t at = first_row * a_.sums.row + first_column_ + first;
      Fragment<16> sums;
      float normalisers[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t skip = Math::Row(i) * a_.sums.row;
#pragma unroll
        for (int j = 0; j < 4; j += Math::kNeighbours) {
          float x[Math::kNeighbours] = {};
          if (from != nullptr && first + Math::Column(j) < columns) {
            LoadVectors(from + at + skip + Math::Column(j), x);
          }
#pragma unroll
          for (int n = 0; n < Math::kNeighbours; ++n) sums.at[i][j + n] = rescale * x[n];
        }
        const bool has_ones = first == 0 && from != nullptr;
        normalisers[i] =
            has_ones ? rescale * from[first_row * a_.sums.row + skip + a_.sums.ones] : 0;
      }
      Math::Multiply(scaled_, row, values_, panel_column, depth, &sums,
                     p == 0 ? normalisers : nullptr);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t skip = Math::Row(i) * a_.sums.row;
#pragma unroll
        for (int j = 0; j < 4; j += Math::kNeighbours) {
          if (first + Math::Column(j) >= columns) continue;
          float x[Math::kNeighbours];
#pragma unroll
          for (int n = 0; n < Math::kNeighbours; ++n) x[n] = sums.at[i][j + n];
          StoreVectors(x, to + at + skip + Math::Column(j));
        }
        if (first == 0) to[first_row * a_.sums.row + skip + a_.sums.ones] = normalisers[i];
      }
    }
    if (Thread() == 0) to[(kTile + 1) * a_.sums.row] = numbers_.tile_reference;
  }

  // ---- Rows ----

  __device__ void BeginRows(int count) {
    count_ = count;
    attends_ = first_query_ + count > 0;
    valid_ = 0;
    __syncthreads();  // the numbers of the previous rows have been read
    const int first_row = LoadRow();
#pragma unroll 1  // not unrolled: the addresses of all rows at once would spill registers
    for (int n = 0; n < kLoads; ++n) {
      const int row = first_row + n * kRowStep;
      if (n < kKeyLoads) {
        const bool is_seen = row < count && IsToken(a_, batch_, first_key_ + row);
        valid_ |= (is_seen ? 1u : 0u) << n;
        if (Channel() == 0) {
          numbers_.seen[row] = is_seen ? 1.0f : 0.0f;
          LoadGates(row, count);
        }
      } else {
        const int query = row - kFirstQuery;
        valid_ |= (query < count && first_query_ + query >= 0 ? 1u : 0u) << n;
      }
    }
    const int t = Thread();
    if (t < kRows) {
      numbers_.maximum[t] = IsExponential(a_) ? -INFINITY : 0;
      numbers_.total[t] = numbers_.dot[t] = 0;
    }
    if (kCausal) keys_ = RowOf(a_.k, batch_, kv_head_, first_key_ + first_row);
    queries_ = RowOf(a_.q, batch_, head_, first_query_ + first_row);
    for (int p = 0; p < kPanels; ++p) result_[p].Clear();
    if (kPrefetches) Fetch(0, 0);
  }

  __device__ void LoadGates(int row, int count) {
    numbers_.gate[row] = numbers_.decay[row] = 0;
    if (!a_.map.gated) return;
    const float* gates =
        GatesOf(a_, batch_ * a_.kv_heads + kv_head_, first_key_ + min(row, count - 1));
    numbers_.gate[row] = gates[0];
    numbers_.decay[row] = gates[1];
  }

  // Loads four channels from `depth` on of the thread's rows, and of its rows of W in a tile.
  __device__ void Fetch(int64_t tile, int depth) {
    FetchInputs(0, kLoads, depth);
    FetchMatrixRows(tile, depth);
  }
  __device__ void FetchInputs(int begin, int end, int depth) {
    const int channel = depth + Channel();
#pragma unroll
    for (int n = begin; n < end; ++n) {
      inputs_[n] = Math::Nothing();
      if ((valid_ >> n & 1) == 0) continue;
      if (n < kKeyLoads) {
        inputs_[n] = FetchFour<Math>(keys_ + n * kRowStep * kElementBytes * a_.k.strides[2],
                                     a_.k.strides[3], channel, a_.head_dim, a_.vector_k);
      } else {
        const int row = (n - kKeyLoads) * kRowStep;
        inputs_[n] = FetchFour<Math>(queries_ + row * kElementBytes * a_.q.strides[2],
                                     a_.q.strides[3], channel, a_.head_dim, a_.vector_q);
      }
    }
  }
  __device__ void FetchMatrixRows(int64_t tile, int depth) {
    const int channel = depth + Channel(), first_row = LoadRow();
    const int64_t projection = tile * TileProjections(a_) + first_row;
#pragma unroll
    for (int n = 0; n < kMatrixLoads; ++n) {
      w_[n] = make_float4(0, 0, 0, 0);
      if (first_row + n * kRowStep >= TileProjections(a_)) continue;
      w_[n] = FetchMatrix(a_, kv_head_, projection + n * kRowStep, channel);
    }
  }

  __device__ void Put(bool is_first_tile, int depth) {
    PutInputs(0, kLoads, is_first_tile, depth);
    PutMatrixRows();
  }
  __device__ void PutInputs(int begin, int end, bool is_first_tile, int depth) {
    const int first_row = LoadRow(), channel = Channel();
#pragma unroll
    for (int n = begin; n < end; ++n) {
      const int row = first_row + n * kRowStep;
      Math::StoreInputs(rows_, row, channel, inputs_[n], a_.q.element);
      if (!is_first_tile) continue;
      AddHalfSquare(a_, Math::Convert(inputs_[n], a_.q.element), depth == 0,
                    numbers_.half_square + row);
    }
  }
  __device__ void PutMatrixRows() {
    const int first_row = LoadRow(), channel = Channel();
#pragma unroll
    for (int n = 0; n < kMatrixLoads; ++n) {
      matrix_.Store(first_row + n * kRowStep, channel, Times(w_[n], a_.map.input_scale));
    }
  }
  // Loads both at once, half of the rows at a time.
  __device__ void Load(int64_t tile, int depth) {
    FetchMatrixRows(tile, depth);
    PutMatrixRows();
#pragma unroll
    for (int begin = 0; begin < kLoads; begin += kLoads / 2) {
      FetchInputs(begin, begin + kLoads / 2, depth);
      PutInputs(begin, begin + kLoads / 2, tile == 0, depth);
    }
  }

  // Loads the keys' values, and zeros where a key is no token.
  __device__ void LoadValues() {
    bool finite = true;
    const int row = LoadRow(), channel = Channel();
    const char* from = RowOf(a_.v, batch_, kv_head_, first_key_ + row);
    const int64_t step = kRowStep * kElementBytes * a_.v.strides[2];
#pragma unroll
    for (int n = 0; n < kTile / kRowStep; ++n, from += step) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        const int column = p * kTile + channel;
        typename Math::Raw raw = Math::Nothing();
        if ((valid_ >> n & 1) != 0) {
          raw = FetchFour<Math>(from, a_.v.strides[3], first_column_ + column, a_.value_dim,
                                a_.vector_v);
        }
        const float4 x = Math::Convert(raw, a_.v.element);
        finite = finite && isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
        values_.Store(row + n * kRowStep, column, x);
      }
    }
    turn_ ^= 1;
    if (!finite) atomicOr(&numbers_.not_finite[turn_], 1u);
    if (Thread() == 0) numbers_.not_finite[turn_ ^ 1] = 0;
  }

  // ---- Tiles of features ----

  __device__ void GoThroughTiles() {
#pragma unroll 1
    for (int64_t tile = 0; tile < a_.sums.tiles; ++tile) {
      LoadSums(tile);
      Fragment<32> features;
      Project(tile, &features);
      FindMaxima(features);
      MakeFeatures(&features);
      if (kPrefetches && tile + 1 < a_.sums.tiles) Fetch(tile + 1, 0);
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
    if (kPrefetches) {
      Put(tile == 0, 0);
    } else {
      Load(tile, 0);
    }
#pragma unroll 1
    for (int depth = 0;;) {
      __syncthreads();
      AddProjections<Math>(a_, rows_, TokenRow(), matrix_, FeatureColumn(),
                           min(kTile, (a_.head_dim - depth + 15) / 16 * 16), features);
      depth += kTile;
      if (depth >= a_.head_dim) break;
      __syncthreads();
      Load(tile, depth);
    }
    BringToUnitLength<Math>(a_, numbers_.half_square + TokenRow(), features);
    HideMissingFeatures<Math>(a_, tile, FeatureColumn(), features);
    MakePlainFeatures<Math>(a_, tile, FeatureColumn(), features);
  }

  // Finds the maxima of rows with this tile, and the factors that follow from them.
  __device__ void FindMaxima(const Fragment<32>& features) {
    float* partial = numbers_.partial[0][FeatureColumn() / 32] + TokenRow() + Math::FirstRow();
    const bool is_first = OpaqueLane() % 4 == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float largest = MaxOfFour(MaxOf(features.at[i], 8));
      if (is_first) partial[Math::Row(i)] = largest;
    }
    __syncthreads();
    const int row = Thread();
    if (row < kRows) {
      const float before = numbers_.maximum[row];
      float now = before;
      if (IsExponential(a_)) {
        now = fmaxf(fmaxf(now, numbers_.partial[0][0][row]), numbers_.partial[0][1][row]);
      }
      numbers_.maximum[row] = now;
      numbers_.factor[row] = Rescale(before, now);
      if (kCausal && row < kTile) {
        const float log_scale = IsExponential(a_)
                                    ? now - HalfSquareOf(a_, numbers_.half_square[row])
                                    : numbers_.gate[row];
        numbers_.log_scale[row] = numbers_.seen[row] != 0 ? log_scale : -INFINITY;
      }
    }
    __syncthreads();
  }

  // Makes features from projections, in shared memory. Ends with a barrier.
  __device__ void MakeFeatures(Fragment<32>* features) {
    const int row = TokenRow(), column = FeatureColumn();
    const bool are_keys = kCausal && row < kTile, is_first = OpaqueLane() % 4 == 0;
    const int first_row = row + Math::FirstRow();
    const float* maxima = numbers_.maximum + first_row;
    const float* normaliser = numbers_.normaliser + column + Math::FirstColumn();
    float* partial = numbers_.partial[0][column / 32] + first_row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float maximum = maxima[Math::Row(i)];
      float total = 0, dot = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float& x = features->at[i][j];
        if (IsExponential(a_)) x = ExpOf(x - maximum);
        total += x;
        if (!are_keys) dot = fmaf(x, normaliser[Math::Column(j)], dot);
      }
      total = SumOfFour(total);
      dot = SumOfFour(dot);
      if (!is_first) continue;
      partial[Math::Row(i)] = total;
      partial[2 * kRows + Math::Row(i)] = dot;
    }
    rows_.Store(row, column, *features);
    if (are_keys && updates_) ScaleKeys(row, column, features);
    RescaleResult();
    __syncthreads();
  }

  // Scales features of keys for the tile's sums: relative to the chunk's reference.
  __device__ void ScaleKeys(int row, int column, Fragment<32>* features) {
    const int lane = OpaqueLane();
    const float reference = fmaxf(
        tile_reference_, MaxOfWarp(fmaxf(numbers_.log_scale[lane], numbers_.log_scale[lane + 32])));
    const float* log_scales = numbers_.log_scale + row + Math::FirstRow();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = ExpOf(log_scales[Math::Row(i)] - Shift(reference));
#pragma unroll
      for (int j = 0; j < 8; ++j) features->at[i][j] *= scale;
    }
    scaled_.Store(row, column, *features);
    if (Thread() == 0) {
      numbers_.tile_rescale = Rescale(tile_reference_, reference);
      numbers_.tile_reference = reference + numbers_.decay[kTile - 1];
    }
  }

  __device__ void RescaleResult() {
    const float* of_queries = numbers_.factor + kFirstQuery + ResultRow() + Math::FirstRow();
    const float* of_keys = numbers_.factor + ResultColumn() + Math::FirstColumn();
    const bool does_pairs = DoesPairs();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float of_row = of_queries[Math::Row(i)];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        result_[0].at[i][j] *= does_pairs ? of_row * of_keys[Math::Column(j)] : of_row;
#pragma unroll
        for (int p = 1; p < kPanels; ++p) result_[p].at[i][j] *= of_row;
      }
    }
  }

  __device__ void AddTotals() {
    const int row = Thread();
    if (row >= kRows) return;
    const float factor = numbers_.factor[row];
    const auto with = [&](float before, const float(*partial)[kRows]) {
      return fmaf(before, factor, partial[0][row] + partial[1][row]);
    };
    numbers_.total[row] = with(numbers_.total[row], numbers_.partial[0]);
    numbers_.dot[row] = with(numbers_.dot[row], numbers_.partial[1]);
  }

  __device__ void AddProducts() {
    if (!attends_) return;
    const int row = kFirstQuery + ResultRow(), column = ResultColumn();
    if (DoesPairs()) {
      Math::Multiply(rows_, row, rows_, column, kTile, &result_[0]);
      return;
    }
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      if (p * kTile + column >= columns_) break;
      Math::Multiply(rows_, row, sums_, p * kTile + column, kTile, &result_[p]);
    }
  }

  // ---- The end of rows ----

  // Computes factors and denominators of queries, one thread for each; `row` counts queries.
  // `reference` and `key_maximum` are those of the keys that the row sees.
  __device__ RowFactors FindFactors(int row, float reference, float key_maximum) {
    const int input = kFirstQuery + row;
    const RowFactors factors =
        FactorsOf(a_,
                  {numbers_.maximum[input], HalfSquareOf(a_, numbers_.half_square[input]),
                   numbers_.total[input]},
                  reference, key_maximum);
    const float carry = reference_ == -INFINITY ? 0 : Rescale(reference_, reference);
    numbers_.product[row] = carry * factors.product;
    numbers_.key[row] = carry * factors.key;
    numbers_.constant[row] = factors.constant;
    numbers_.denominator[row] =
        carry * (factors.product * numbers_.dot[input] + factors.key * numbers_.normaliser_sum) +
        factors.constant * numbers_.tokens + factors.extra;
    numbers_.log_scale_of_row[row] = factors.log_scale + (kCausal ? numbers_.decay[row] : 0);
    return factors;
  }

  // Computes the denominator of a row, to which `more` is added, and the log-sum-exp. One thread
  // calls it.
  __device__ void EndRow(int row, float reference, float more) {
    const int64_t query = first_query_ + row;
    if (row >= count_ || query < 0) return;
    // True for one of the blocks that have parts of the row.
    const bool is_first = first_column_ == 0;
    const bool has_keys = reference != -INFINITY;
    float denominator = 0;
    if (has_keys) {
      denominator = HoldDenominator(a_, numbers_.denominator[row] + more,
                                    numbers_.log_scale_of_row[row], is_first);
    }
    numbers_.inverse[row] = denominator == 0 ? 0 : 1 / denominator;
    numbers_.has_keys[row] = has_keys;
    if (is_first) {
      StoreLogSumExp(a_, batch_, head_, query, denominator, numbers_.log_scale_of_row[row],
                     has_keys);
    }
  }

  // Turns the products with the sums into rows of y times their denominators.
  __device__ void ScaleResult() {
    const int row = ResultRow() + Math::FirstRow(), column = ResultColumn() + Math::FirstColumn();
    const bool has_epsilon = a_.constants.epsilon != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float product = numbers_.product[row + Math::Row(i)];
      const float key = numbers_.key[row + Math::Row(i)];
      const float constant = numbers_.constant[row + Math::Row(i)];
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int at = column + p * kTile + Math::Column(j);
          float& y = result_[p].at[i][j];
          y *= product;
          if (!has_epsilon) continue;
          y += key * numbers_.feature_values[at] + constant * numbers_.values[at];
        }
      }
    }
  }

  // Returns the place of rows of a panel: where causal, in the memory of sums, which are no longer
  // read; else, where there are twice as many rows, in that of features and W.
  __device__ float* StagedAt(int panel, int row, int column) const {
    return staged_ + row * kStagedStride + (kCausal ? panel * kTile : 0) + column;
  }
  // Writes a panel of rows, not divided yet, to shared memory.
  __device__ void PutResult(int panel) {
    float* first =
        StagedAt(panel, ResultRow() + Math::FirstRow(), ResultColumn() + Math::FirstColumn());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; j += Math::kNeighbours) {
        float columns[Math::kNeighbours];
#pragma unroll
        for (int n = 0; n < Math::kNeighbours; ++n) columns[n] = result_[panel].at[i][j + n];
        StoreVectors(columns, first + Math::Row(i) * kStagedStride + Math::Column(j));
      }
    }
  }
  __device__ void StoreResult(int panel) {
    const int channel = Channel(), column = panel * kTile + channel;
    if (column >= columns_) return;
    for (int row = LoadRow(); row < count_; row += kRowStep) {
      const int64_t query = first_query_ + row;
      if (query < 0) continue;
      float4 y = *reinterpret_cast<const float4*>(StagedAt(panel, row, channel));
      if (kCausal && !HasFiniteValues()) AddInfiniteValues(row, column, &y);
      y = numbers_.has_keys[row] != 0 ? Times(y, numbers_.inverse[row]) : make_float4(0, 0, 0, 0);
      StoreOut(a_, batch_, head_, query, first_column_ + column, columns_ - column, y);
    }
  }

  // Finishes rows, not causal.
  __device__ void EndRows() {
    const int t = Thread();
    if (t < kQueries) {
      FindFactors(t, reference_, numbers_.key_maximum);
      EndRow(t, reference_, 0);
    }
    __syncthreads();
    ScaleResult();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      if (p > 0) __syncthreads();
      PutResult(p);
      __syncthreads();
      StoreResult(p);
    }
  }

  // Finishes a chunk, causal: the pairs, the rows, and the head's numbers.
  __device__ void EndChunk() {
    const int t = Thread();
    if (t / kWarp == 0) FindRunningMaxima();
    __syncthreads();
    if (t < kTile && attends_) {
      const float reference = numbers_.running_reference[t];
      const RowFactors factors = FindFactors(t, reference, numbers_.running_maximum[t]);
      numbers_.shift[t] = Shift(reference);
      numbers_.pair_product[t] = factors.product;
      numbers_.pair_key[t] = factors.key;
    }
    const float reference = numbers_.running_reference[kTile - 1];
    const float rescale = reference_ == -INFINITY ? 0 : Rescale(reference_, reference);
    float feature_values = 0, values = 0;
    if (t < kColumns && a_.constants.epsilon != 0 && updates_) {
      feature_values = rescale * numbers_.feature_values[t];
      values = numbers_.values[t];
#pragma unroll 4
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
      AddValues();
#pragma unroll
      for (int p = 0; p < kPanels; ++p) PutResult(p);
    } else if (attends_ && t < kTile) {
      EndRow(t, numbers_.running_reference[t],
             numbers_.partial[0][0][t] + numbers_.partial[0][1][t]);
    }
    __syncthreads();
    if (attends_) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) StoreResult(p);
    }
    if (t < kColumns) {
      numbers_.feature_values[t] = feature_values;
      numbers_.values[t] = values;
    }
    if (t / kWarp == kWarps - 1) CountKeys(reference, rescale);
    reference_ = reference + numbers_.decay[kTile - 1];
  }
  // Adds the chunk's numbers to the head's. One warp calls it.
  __device__ void CountKeys(float reference, float rescale) {
    const int j = OpaqueLane();
    const float seen = SumOfWarp(numbers_.seen[j] + numbers_.seen[j + 32]);
    const float sum = SumOfWarp(numbers_.coefficient[j] + numbers_.coefficient[j + 32]);
    if (j > 0) return;
    numbers_.tokens += seen;
    numbers_.normaliser_sum = fmaf(rescale, numbers_.normaliser_sum, sum);
    numbers_.reference = reference + numbers_.decay[kTile - 1];
    numbers_.key_maximum = numbers_.running_maximum[kTile - 1];
  }

  // Finds the maxima over the keys up to each one of the chunk. One warp calls it.
  __device__ void FindRunningMaxima() {
    const int lane = OpaqueLane();
    const bool whole = a_.map.stabiliser == KeyStabiliser::kSequence;
    const auto maximum_of = [&](int key) {
      return numbers_.seen[key] != 0 && !whole ? numbers_.maximum[key] : -INFINITY;
    };
    const auto reference_of = [&](int key) {
      return numbers_.seen[key] != 0 ? AsReference(numbers_.log_scale[key]) : -INFINITY;
    };
    RunMaxima(numbers_.reference, reference_of(lane), reference_of(lane + 32),
              numbers_.running_reference);
    RunMaxima(numbers_.key_maximum, maximum_of(lane), maximum_of(lane + 32),
              numbers_.running_maximum);
    __syncwarp();
    const float shift = Shift(numbers_.running_reference[kTile - 1]);
    for (int key = lane; key < kTile; key += 32) {
      numbers_.coefficient[key] = ExpOf(numbers_.log_scale[key] - shift) * numbers_.total[key];
    }
  }
  // to[n] = max(before, values 0 to n), of which the lane has n = lane and lane + 32.
  __device__ void RunMaxima(float before, float low, float high, float* to) {
    const int lane = OpaqueLane();
    low = fmaxf(before, low);
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float other = __shfl_up_sync(~0u, low, lanes);
      if (lane >= lanes) low = fmaxf(low, other);
    }
    high = fmaxf(high, __shfl_sync(~0u, low, 31));
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float other = __shfl_up_sync(~0u, high, lanes);
      if (lane >= lanes) high = fmaxf(high, other);
    }
    to[lane] = low;
    to[lane + 32] = high;
  }

  // Turns products of features into the weights of values, and computes the sum of each row.
  __device__ void StoreWeights() {
    const int row = ResultRow() + Math::FirstRow(), column = ResultColumn() + Math::FirstColumn();
    float* partial = numbers_.partial[0][ResultColumn() / 32] + row;
    const bool is_first = OpaqueLane() % 4 == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = row + Math::Row(i);
      const float shift = numbers_.shift[at], product = numbers_.pair_product[at];
      const float key = numbers_.pair_key[at], constant = numbers_.constant[at];
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int of_key = column + Math::Column(j);
        float& x = result_[0].at[i][j];
        const float decay = ExpOf(numbers_.log_scale[of_key] - shift);
        const float weight =
            decay * (product * x + key * numbers_.total[of_key]) + constant * numbers_.seen[of_key];
        x = of_key <= at ? weight : 0;
        sum += x;
      }
      sum = SumOfFour(sum);
      if (is_first) partial[Math::Row(i)] = sum;
    }
    weights_.Store(ResultRow(), ResultColumn(), result_[0]);
  }

  // Adds the weighted values of the chunk.
  __device__ void AddValues() {
    const int row = ResultRow(), column = ResultColumn(), depth = (count_ + 15) / 16 * 16;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      if (p * kTile + column >= columns_) break;
      Math::Multiply(weights_, row, values_, p * kTile + column, depth, &result_[p]);
    }
  }

  // Values that are not finite are left out of the product, since a weight of 0 must not be
  // multiplied by a hidden one; they are then added to the rows that see them. The sums have
  // contained them before.
  __device__ bool HasFiniteValues() const { return numbers_.not_finite[turn_] == 0; }
  __device__ void HideInfiniteValues() {
    if (HasFiniteValues()) return;
    const auto hide = [](float x) { return isfinite(x) ? x : 0; };
    for (int row = LoadRow(); row < kTile; row += kRowStep) {
      for (int column = Channel(); column < kColumns; column += kTile) {
        values_.Store(
            row, column,
            make_float4(hide(values_.Get(row, column)), hide(values_.Get(row, column + 1)),
                        hide(values_.Get(row, column + 2)), hide(values_.Get(row, column + 3))));
      }
    }
  }
  __device__ void AddInfiniteValues(int row, int column, float4* y) const {
    for (int key = 0; key <= row && key < count_; ++key) {
      if (numbers_.seen[key] == 0) continue;
      const float4 value = Math::Convert(
          FetchFour<Math>(RowOf(a_.v, batch_, kv_head_, first_key_ + key), a_.v.strides[3],
                          first_column_ + column, a_.value_dim, a_.vector_v),
          a_.v.element);
      const float weight = weights_.Get(row, key);
      if (!isfinite(value.x)) y->x = fmaf(weight, value.x, y->x);
      if (!isfinite(value.y)) y->y = fmaf(weight, value.y, y->y);
      if (!isfinite(value.z)) y->z = fmaf(weight, value.z, y->z);
      if (!isfinite(value.w)) y->w = fmaf(weight, value.w, y->w);
    }
  }

  const LinearArguments& a_;
  const Rows rows_;
  const Weights weights_;
  const Matrix matrix_;
  const Scaled scaled_;
  const Columns sums_;
  const Columns values_;
  float* const staged_;
  Numbers& numbers_;
  int first_column_, columns_;  // columns of values that this block has
  int head_, batch_, kv_head_;
  int64_t piece_;
  // The head's sums before the chunk, or over all keys; null where there are none.
  const float* from_ = nullptr;
  float* held_ = nullptr;  // memory of the block's running sums

  int64_t first_query_ = 0, first_key_ = 0;
  int count_ = 0;               // rows of queries, and of keys where causal
  unsigned valid_ = 0;          // bit n: the thread's row n of the inputs exists
  bool attends_ = true;         // there are queries here
  bool updates_ = false;        // the chunk is not the last of the block
  int turn_ = 0;                // which of numbers_.not_finite the chunk uses
  float reference_ = 0;         // R of the head's sums
  float tile_reference_ = 0;    // the tile's R
  const char* keys_ = nullptr;  // the thread's first row of keys
  const char* queries_ = nullptr;
  typename Math::Raw inputs_[kLoads];
  float4 w_[kMatrixLoads];
  Fragment<32> result_[kPanels];
};

// Clears the rows that see no key: those before the place of the first one.
__device__ inline void ClearKeylessRows(const LinearArguments& a) {
  const int64_t keyless = min(a.query_tokens - a.kv_tokens, a.query_tokens);
  if (keyless <= 0) return;
  const int64_t rows = a.batch * a.query_heads * keyless;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + OpaqueWarp(); n < rows;
       n += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t i = n % keyless, h = n / keyless % a.query_heads;
    const int64_t b = n / keyless / a.query_heads;
    for (int c = OpaqueLane() * 4; c < a.value_dim; c += 128) {
      StoreOut(a, b, h, i, c, a.value_dim - c, make_float4(0, 0, 0, 0));
    }
    if (OpaqueLane() == 0) StoreLogSumExp(a, b, h, i, 0, 0, false);
  }
}

template <class Math, int kPanels, bool kCausal>
__global__ void __launch_bounds__(kThreads, !kCausal && kPanels == 1 ? 2 : 1)
    LinearAttend(const LinearArguments a) {
  using Block = AttendBlock<Math, kPanels, kCausal>;
  if (kCausal) ClearKeylessRows(a);
  const int64_t tasks = Block::Tasks(a);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Block(a, task, DynamicShared<Block::kMostBytes>()).Run();
    __syncthreads();
  }
}

template <class Math, int kPanels, bool kCausal>
struct Attend {
  using Block = AttendBlock<Math, kPanels, kCausal>;
  static const char* Launch(const char* name, const LinearArguments& a, void* stream) {
    int64_t tasks = Block::Tasks(a);
    // Without keys there still are rows to clear.
    if (kCausal && tasks == 0 && a.batch * a.query_heads * a.query_tokens > 0) tasks = 1;
    return tfb::Launch(name, &LinearAttend<Math, kPanels, kCausal>,
                       {BlocksInTurns(tasks, a.max_blocks), kThreads, Block::Bytes(a)}, stream, a);
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
