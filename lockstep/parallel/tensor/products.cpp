#include <string>
#include <string_view>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

namespace {

// self · beta + first · second · alpha; without self, first · second.
struct Product {
  at::Tensor first, second;  // [..., inner], [inner, outer]
  at::Tensor self;
  at::Scalar beta = 1, alpha = 1;
};

Product product_of(const std::string& op, std::span<const c10::IValue> arguments) {
  if (op != "aten::addmm") return {arguments[0].toTensor(), arguments[1].toTensor()};
  return {arguments[1].toTensor(), arguments[2].toTensor(), arguments[0].toTensor(),
          arguments[3].toScalar(), arguments[4].toScalar()};
}

at::Tensor multiplied(const Product& product) {
  return product.self.defined()
             ? at::addmm(product.self, product.first, product.second, product.beta, product.alpha)
             : at::matmul(product.first, product.second);
}

bool is(const at::Scalar& scalar, double number) { return scalar.toDouble() == number; }

// The layer that a weight belongs to.
std::shared_ptr<const std::string> layer_of(const std::shared_ptr<const std::string>& weight) {
  constexpr std::string_view kEnd = ".weight";
  if (!weight->ends_with(kEnd)) return weight;
  return std::make_shared<const std::string>(weight->substr(0, weight->size() - kEnd.size()));
}

class SplitProduct {
 public:
  SplitProduct(std::string op, Product product, SplitOwner& owner)
      : op_(std::move(op)), product_(std::move(product)), owner_(owner) {}

  // Each rank has some columns of the second matrix, and gets those of the result.
  std::optional<at::Tensor> by_columns() {
    const Split& columns = *split_of(product_.second);
    Product part;
    const Alignment alignment = alignment_of(product_.second, columns.cut);
    if (product_.self.defined()) {
      const Split* const cut = split_argument(product_.self, owner_);
      if (cut != nullptr && alignment_of(product_.self, cut->cut) == alignment)
        part.self = part_to_read(product_.self);
      else if (cut == nullptr && has_aligned_part(product_.self, alignment))
        part.self = aligned_part(product_.self, alignment, owner_.axis());
      else
        return {};
      part.beta = product_.beta;
      part.alpha = product_.alpha;
    }
    part.first = nn::enter_products(whole(product_.first), owner_.axis());
    part.second = part_to_read(product_.second);
    const at::Tensor result = multiplied(part);
    note_use(columns, result.numel() * owner_.axis().size());
    return make_split({columns.owner, result, cut_of(result, alignment), layer_of(columns.source)});
  }

  // Each rank has some rows of the second matrix: the ranks' products add up to the result.
  at::Tensor by_rows() {
    const at::Tensor& first = product_.first;
    const CutDim rows{first.dim() - 1, split_of(product_.second)->cut.blocks};
    const Split* const cut = split_argument(first, owner_);
    const at::Tensor mine = cut != nullptr && cut->cut == rows
                                ? part_to_read(first)
                                : take_part(whole(first), rows, owner_.axis());
    at::Tensor sum =
        nn::leave_products(multiplied({mine, part_to_read(product_.second)}), owner_.axis());
    note_use(*split_of(product_.second), sum.numel());
    if (!product_.self.defined()) return sum;
    if (!is(product_.alpha, 1)) sum = at::mul(sum, product_.alpha);
    if (is(product_.beta, 0)) return sum;
    const at::Tensor self = whole(product_.self);
    return at::add(sum, is(product_.beta, 1) ? self : at::mul(self, product_.beta));
  }

 private:
  void note_use(const Split& weight, std::int64_t outputs) {
    if (!owner_.gathers().traces()) return;
    const Split* const fed = split_argument(product_.first, owner_);
    const bool by_features = fed != nullptr && fed->cut == CutDim{product_.first.dim() - 1};
    owner_.gathers().note_use(
        {*layer_of(weight.source), by_features ? *fed->source : std::string(), outputs});
  }

  at::Tensor whole(const at::Tensor& tensor) {
    return split_argument(tensor, owner_) != nullptr ? owner_.gathered(tensor, op_) : tensor;
  }

  std::string op_;
  Product product_;
  SplitOwner& owner_;
};

}  // namespace

bool run_product(intercept::Call& call, SplitOwner& owner) {
  const std::string& op = call.op().operator_name().name;
  Product product = product_of(op, call.arguments());
  const Split* const cut = split_argument(product.second, owner);
  if (cut == nullptr || product.second.dim() != 2 || product.first.dim() == 0 ||
      product.first.size(-1) != product.second.size(0))
    return false;
  const bool by_columns = cut->cut.dim == 1;
  SplitProduct split(op, std::move(product), owner);
  if (!by_columns) {
    return_instead(call, split.by_rows());
    return true;
  }
  const auto result = split.by_columns();
  if (result) return_instead(call, *result);
  return result.has_value();
}

// aten::embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
bool run_lookup(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = call.arguments();
  const Split* const table = split_argument(arguments[0], owner);
  const at::Tensor indices = arguments[1].toTensor();
  const std::int64_t padding = arguments[2].toInt();
  const bool by_frequency = arguments[3].toBool(), sparse = arguments[4].toBool();
  if (table == nullptr || split_argument(indices, owner) != nullptr || sparse) return false;
  const at::Tensor whole_table = arguments[0].toTensor();
  const at::Tensor weight = part_to_read(whole_table);
  if (owner.gathers().traces())
    owner.gathers().note_use({*layer_of(table->source), "", indices.numel() * whole_table.size(1)});
  if (table->cut.dim == 1) {
    const at::Tensor rows = at::embedding(weight, indices, padding, by_frequency, sparse);
    return_instead(call,
                   make_split({table->owner, rows, {rows.dim() - 1}, layer_of(table->source)}));
    return true;
  }
  // Other ranks' tokens would be counted as this rank's first one.
  if (by_frequency) return false;
  // LibTorch checks this, too, and on a GPU without waiting for it. A token that no rank has would
  // give a row of zeros.
  const std::int64_t rows_of_all = whole_table.size(0);
  if (!indices.is_cpu())
    at::_assert_async(indices.ge(0).logical_and(indices.lt(rows_of_all)).all());
  else if (indices.numel() > 0 && (indices.min().item<std::int64_t>() < 0 ||
                                   indices.max().item<std::int64_t>() >= rows_of_all))
    throw UsageError("an index of '{}' is out of range: it has {} rows, and the indices are from "
                     "{} to {}",
                     *table->source, rows_of_all, indices.min().item<std::int64_t>(),
                     indices.max().item<std::int64_t>());
  const std::int64_t first = owner.axis().rank() * weight.size(0);
  const at::Tensor here = indices.ge(first).logical_and(indices.lt(first + weight.size(0)));
  const at::Tensor own = indices.sub(first).masked_fill(here.logical_not(), 0);
  const bool pads_here = padding >= first && padding < first + weight.size(0);
  const at::Tensor rows = at::embedding(weight, own, pads_here ? padding - first : -1);
  return_instead(call, nn::leave_products(rows.masked_fill(here.logical_not().unsqueeze(-1), 0),
                                          owner.axis()));
  return true;
}

}  // namespace lockstep::tensor
