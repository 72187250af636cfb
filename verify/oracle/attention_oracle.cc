#include "verify/oracle/attention_oracle.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace shardproof::verify {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Stride = Eigen::OuterStride<>;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

void check_sizes(const AttentionProblem& p, int64_t row_block) {
  SP_CHECK(row_block >= 1, "row_block is {}", row_block);
  if (p.batch < 0 || p.q_tokens < 0 || p.kv_tokens < 0 || p.q_heads < 0) {
    bad_input("attention oracle: sizes must not be negative, got B={} Sq={} Sk={} H={}", p.batch,
              p.q_tokens, p.kv_tokens, p.q_heads);
  }
  if (p.kv_heads < 1 || p.head_dim < 1) {
    bad_input("attention oracle: needs at least one key head and channel, got Hk={} D={}",
              p.kv_heads, p.head_dim);
  }
  if (p.q_heads % p.kv_heads != 0) {
    bad_input("attention oracle: query heads must be a multiple of key heads, got H={} Hk={}",
              p.q_heads, p.kv_heads);
  }
  if (!std::isfinite(p.scale)) bad_input("attention oracle: scale must be finite, got {}", p.scale);
}

bool has_queries(const AttentionProblem& p) {
  return p.batch > 0 && p.q_tokens > 0 && p.q_heads > 0;
}

void check_data(const AttentionProblem& p) {
  const bool has_keys = p.batch > 0 && p.kv_tokens > 0;
  SP_CHECK(!has_queries(p) || p.q != nullptr, "q is missing");
  SP_CHECK(!has_keys || (p.k != nullptr && p.v != nullptr), "k or v is missing");
}

// Sums in runs of 128, so that the rounding error grows with the number of runs and not of terms.
template <class Row>
double run_sum(const Eigen::ArrayBase<Row>& row) {
  constexpr Eigen::Index kRun = 128;
  double sum = 0;
  for (Eigen::Index i = 0; i < row.size(); i += kRun) {
    sum += row.segment(i, std::min(kRun, row.size() - i)).sum();
  }
  return sum;
}

// Turns a row of logits into probabilities and returns its log-sum-exp. Divides by the sum rather
// than exponentiating x - lse: the rounding error of a large lse would become one of every P.
template <class Row>
double softmax_in_place(Row row) {
  const Eigen::Index n = row.size();
  double largest = kMinusInfinity;  // NaN is passed over here and comes back through exp
  for (Eigen::Index j = 0; j < n; ++j) largest = std::max(largest, row[j]);
  // std::exp, because Eigen's errs by more than one unit in the last place.
  for (Eigen::Index j = 0; j < n; ++j) row[j] = std::exp(row[j] - largest);
  const double sum = run_sum(row);
  row /= sum;
  return largest + std::log(sum);
}

// One evaluation. Loops: sample, key head, query head that reads it, block of query rows.
class Evaluation {
 public:
  Evaluation(const AttentionProblem& problem, int64_t row_block);
  AttentionReference run();

 private:
  struct Block {  // rows [first, first + rows) of one query head of one sample
    int64_t sample, head, first, rows;
  };

  void gather_valid_keys(int64_t sample);
  void load_key_head(int64_t sample, int64_t key_head);
  void forward(const Block& block);
  void backward(const Block& block);
  void store_key_gradients(int64_t sample, int64_t key_head);

  // A block of rows of one head of a [B,Sq,H,D] tensor, as a strided rows x D matrix.
  template <class T>
  auto head_rows(T* data, const Block& b) const {
    using Maybe = std::conditional_t<std::is_const_v<T>, const Matrix, Matrix>;
    const int64_t offset =
        ((b.sample * problem_.q_tokens + b.first) * problem_.q_heads + b.head) * problem_.head_dim;
    return Eigen::Map<Maybe, 0, Stride>(data + offset, b.rows, problem_.head_dim,
                                        Stride(problem_.q_heads * problem_.head_dim));
  }
  int64_t key_offset(int64_t sample, int64_t token, int64_t key_head) const {
    return ((sample * problem_.kv_tokens + token) * problem_.kv_heads + key_head) *
           problem_.head_dim;
  }

  const AttentionProblem& problem_;
  const int64_t row_block_;
  const bool with_gradients_;
  AttentionReference result_;

  // Of the current sample and key head: only the keys that may be attended to, n of them.
  std::vector<int64_t> valid_keys_;
  Matrix key_, key_abs_;    // n x D
  Matrix value_and_abs_;    // n x 2D, [v | |v|]: one product with P yields out and out_abs
  Matrix dkey_, dkey_abs_;  // n x D, without the factor scale
  Matrix dvalue_and_abs_;   // n x 2D

  // Of the current block of rows.
  Matrix probability_;           // rows x n: logits, then probabilities
  Matrix ds_, ds_abs_;           // rows x n: dP, then dS
  Matrix out_and_abs_;           // rows x 2D
  Matrix dout_and_abs_, q_abs_;  // rows x 2D, rows x D
};

Evaluation::Evaluation(const AttentionProblem& problem, int64_t row_block)
    : problem_(problem),
      row_block_(std::min(row_block, std::max<int64_t>(problem.q_tokens, 1))),
      with_gradients_(problem.dout != nullptr || !has_queries(problem)) {
  // The values of whatever is not visited below: rows without a key, masked keys.
  const size_t q_size = problem_.batch * problem_.q_tokens * problem_.q_heads * problem_.head_dim;
  result_.out.resize(q_size);
  result_.out_abs.resize(q_size);
  result_.lse.resize(problem_.batch * problem_.q_heads * problem_.q_tokens, kMinusInfinity);
  const int64_t n = problem_.kv_tokens, d = problem_.head_dim;
  key_.resize(n, d);
  value_and_abs_.resize(n, 2 * d);
  probability_.resize(row_block_, n);
  out_and_abs_.resize(row_block_, 2 * d);
  valid_keys_.reserve(n);
  if (!with_gradients_) return;
  const size_t kv_size = problem_.batch * n * problem_.kv_heads * d;
  for (auto* gradient : {&result_.dq, &result_.dq_abs}) gradient->resize(q_size);
  for (auto* gradient : {&result_.dk, &result_.dk_abs, &result_.dv, &result_.dv_abs}) {
    gradient->resize(kv_size);
  }
  for (Matrix* m : {&key_abs_, &dkey_, &dkey_abs_}) m->resize(n, d);
  dvalue_and_abs_.resize(n, 2 * d);
  for (Matrix* m : {&ds_, &ds_abs_}) m->resize(row_block_, n);
  dout_and_abs_.resize(row_block_, 2 * d);
  q_abs_.resize(row_block_, d);
}

AttentionReference Evaluation::run() {
  const int64_t heads_per_key_head = problem_.q_heads / problem_.kv_heads;
  for (int64_t sample = 0; sample < problem_.batch; ++sample) {
    gather_valid_keys(sample);
    if (valid_keys_.empty()) continue;
    for (int64_t key_head = 0; key_head < problem_.kv_heads; ++key_head) {
      load_key_head(sample, key_head);
      for (int64_t i = 0; i < heads_per_key_head; ++i) {
        for (int64_t first = 0; first < problem_.q_tokens; first += row_block_) {
          const Block block{sample, key_head * heads_per_key_head + i, first,
                            std::min(row_block_, problem_.q_tokens - first)};
          forward(block);
          if (with_gradients_) backward(block);
        }
      }
      if (with_gradients_) store_key_gradients(sample, key_head);
    }
  }
  return std::move(result_);
}

void Evaluation::gather_valid_keys(int64_t sample) {
  valid_keys_.clear();
  for (int64_t j = 0; j < problem_.kv_tokens; ++j) {
    if (problem_.key_mask == nullptr || problem_.key_mask[sample * problem_.kv_tokens + j] != 0) {
      valid_keys_.push_back(j);
    }
  }
}

void Evaluation::load_key_head(int64_t sample, int64_t key_head) {
  const int64_t n = valid_keys_.size(), d = problem_.head_dim;
  for (int64_t j = 0; j < n; ++j) {
    const int64_t offset = key_offset(sample, valid_keys_[j], key_head);
    key_.row(j) = Eigen::Map<const Eigen::RowVectorXd>(problem_.k + offset, d);
    value_and_abs_.row(j).head(d) = Eigen::Map<const Eigen::RowVectorXd>(problem_.v + offset, d);
  }
  value_and_abs_.topRightCorner(n, d) = value_and_abs_.topLeftCorner(n, d).cwiseAbs();
  if (!with_gradients_) return;
  key_abs_.topRows(n) = key_.topRows(n).cwiseAbs();
  for (Matrix* sum : {&dkey_, &dkey_abs_, &dvalue_and_abs_}) sum->topRows(n).setZero();
}

void Evaluation::forward(const Block& b) {
  const int64_t n = valid_keys_.size(), d = problem_.head_dim;
  auto p = probability_.topLeftCorner(b.rows, n);
  p.noalias() = problem_.scale * (head_rows(problem_.q, b) * key_.topRows(n).transpose());
  double* lse =
      result_.lse.data() + (b.sample * problem_.q_heads + b.head) * problem_.q_tokens + b.first;
  for (int64_t i = 0; i < b.rows; ++i) lse[i] = softmax_in_place(p.row(i).array());

  auto out_and_abs = out_and_abs_.topRows(b.rows);
  out_and_abs.noalias() = p * value_and_abs_.topRows(n);
  head_rows(result_.out.data(), b) = out_and_abs.leftCols(d);
  head_rows(result_.out_abs.data(), b) = out_and_abs.rightCols(d);
}

void Evaluation::backward(const Block& b) {
  const int64_t n = valid_keys_.size(), d = problem_.head_dim;
  const auto q = head_rows(problem_.q, b);
  auto q_abs = q_abs_.topRows(b.rows);
  q_abs = q.cwiseAbs();
  auto dout = dout_and_abs_.topLeftCorner(b.rows, d);
  auto dout_abs = dout_and_abs_.topRightCorner(b.rows, d);
  dout = head_rows(problem_.dout, b);
  dout_abs = dout.cwiseAbs();

  const auto p = probability_.topLeftCorner(b.rows, n);
  auto ds = ds_.topLeftCorner(b.rows, n);
  auto ds_abs = ds_abs_.topLeftCorner(b.rows, n);
  ds.noalias() = dout * value_and_abs_.topLeftCorner(n, d).transpose();
  ds_abs.noalias() = dout_abs * value_and_abs_.topRightCorner(n, d).transpose();
  for (int64_t i = 0; i < b.rows; ++i) {
    const auto p_row = p.row(i).array();
    auto row = ds.row(i).array();
    auto row_abs = ds_abs.row(i).array();
    const double delta = run_sum(p_row * row);
    const double delta_abs = run_sum(p_row * row_abs);
    row = p_row * (row - delta);
    row_abs = p_row * (row_abs + delta_abs);
  }

  head_rows(result_.dq.data(), b).noalias() = problem_.scale * (ds * key_.topRows(n));
  head_rows(result_.dq_abs.data(), b).noalias() =
      std::abs(problem_.scale) * (ds_abs * key_abs_.topRows(n));
  dkey_.topRows(n).noalias() += ds.transpose() * q;
  dkey_abs_.topRows(n).noalias() += ds_abs.transpose() * q_abs;
  dvalue_and_abs_.topRows(n).noalias() += p.transpose() * dout_and_abs_.topRows(b.rows);
}

void Evaluation::store_key_gradients(int64_t sample, int64_t key_head) {
  const int64_t n = valid_keys_.size(), d = problem_.head_dim;
  for (int64_t j = 0; j < n; ++j) {
    const int64_t offset = key_offset(sample, valid_keys_[j], key_head);
    const auto store = [&](std::vector<double>& to, const auto& row) {
      Eigen::Map<Eigen::RowVectorXd>(to.data() + offset, d) = row;
    };
    store(result_.dk, problem_.scale * dkey_.row(j));
    store(result_.dk_abs, std::abs(problem_.scale) * dkey_abs_.row(j));
    store(result_.dv, dvalue_and_abs_.row(j).head(d));
    store(result_.dv_abs, dvalue_and_abs_.row(j).tail(d));
  }
}

}  // namespace

AttentionReference attention_oracle(const AttentionProblem& problem, int64_t row_block) {
  check_sizes(problem, row_block);
  check_data(problem);
  return Evaluation(problem, row_block).run();
}

}  // namespace shardproof::verify
