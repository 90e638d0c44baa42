#include <lockstep/deferred/shape_inference.h>

#include <ATen/ATen.h>

#include <lockstep/deferred/as_is.h>
#include <lockstep/deferred/record.h>

namespace lockstep::deferred {

namespace {

at::Tensor without_elements(const at::Tensor& tensor) {
  at::Tensor shape = at::empty_strided(tensor.sizes(), tensor.strides(),
                                       tensor.options().device(at::kMeta).requires_grad(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    shape.unsafeGetTensorImpl()->set_wrapped_number(true);
  return shape;
}

c10::IValue on_meta(const c10::IValue& argument) {
  if (argument.isDevice()) return c10::Device(c10::kMeta);
  c10::IValue shapes = with_own_lists(argument);
  for_each_tensor(argument, [&](const at::Tensor& tensor, auto element) {
    set_tensor(shapes, element, without_elements(tensor));
  });
  return shapes;
}

}  // namespace

InferredShapes infer_shapes(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  const AsIs as_is;
  InferredShapes inferred;
  try {
    for (const c10::IValue& argument : arguments) inferred.arguments.push_back(on_meta(argument));
    inferred.results = inferred.arguments;
    op.callBoxed(&inferred.results);
    inferred.outcome = InferredShapes::Outcome::known;
  } catch (const c10::NotImplementedError&) {
    inferred.outcome = InferredShapes::Outcome::unknown;
  } catch (const std::exception&) {
    inferred.outcome = InferredShapes::Outcome::failed;
  }
  return inferred;
}

}  // namespace lockstep::deferred
