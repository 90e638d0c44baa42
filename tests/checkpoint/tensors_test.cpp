#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/safetensors/writer.h>
#include <lockstep/checkpoint/tensors.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "bytes.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor left = a.cpu().contiguous();
  const at::Tensor right = b.cpu().contiguous();
  return left.nbytes() == 0 || std::memcmp(left.data_ptr(), right.data_ptr(), left.nbytes()) == 0;
}

at::Tensor random_of(c10::ScalarType type, at::IntArrayRef shape) {
  at::Tensor result = at::empty(shape, type);
  auto* const bytes = static_cast<unsigned char*>(result.data_ptr());
  for (std::size_t i = 0; i < result.nbytes(); ++i)
    bytes[i] = type == c10::kBool ? i % 2 : static_cast<unsigned char>(i * 37 + 11);
  return result;
}

// Every type that this LibTorch and safetensors have, with every bit pattern of a byte.
TEST(Tensors, EveryTypeComesBackToTheBit) {
  const TemporaryFolder folder;
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<c10::ScalarType>(i);
    if (!dtype_of(type)) continue;
    EXPECT_EQ(scalar_type_of(*dtype_of(type)), type);
    const std::string name = c10::toString(type);
    tensors.push_back({name, random_of(type, {7, 41})});
    tensors.push_back({name + ".scalar", random_of(type, {})});
    tensors.push_back({name + ".empty", random_of(type, {3, 0})});
  }
  EXPECT_GE(tensors.size(), 3u * 11);
  save_tensors(folder / "file", tensors);
  const auto loaded = load_tensors(folder / "file");
  ASSERT_EQ(loaded.size(), tensors.size());
  std::map<std::string, at::Tensor> by_name;
  for (const NamedTensor& tensor : loaded) by_name[tensor.name] = tensor.tensor;
  std::vector<NamedTensor> targets;
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(same_bits(by_name.at(name), tensor)) << name;
    targets.push_back({name, at::empty_like(tensor)});
  }
  EXPECT_THAT(load_tensors_into(folder / "file", targets).converted, ElementsAre());
  for (std::size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(same_bits(targets[i].tensor, tensors[i].tensor)) << tensors[i].name;
}

TEST(Tensors, AnyStridesAndSharedStorage) {
  const TemporaryFolder folder;
  const at::Tensor base = at::arange(24, at::kFloat).reshape({4, 6});
  const std::vector<NamedTensor> tensors = {{"base", base},
                                            {"transposed", base.t()},
                                            {"strided", base.slice(1, 0, 6, 2)},
                                            {"expanded", base.slice(0, 0, 1).expand({3, 6})},
                                            {"offset", base.slice(0, 2)},
                                            {"again", base}};
  save_tensors(folder / "file", tensors);
  // Targets may be strided, too.
  at::Tensor storage = at::zeros({6, 8});
  const at::Tensor leaf = at::zeros({4, 6}).requires_grad_(true);
  const std::vector<NamedTensor> targets = {{"base", leaf},
                                            {"transposed", storage.slice(1, 0, 8, 2)},
                                            {"strided", at::zeros({4, 3})},
                                            {"expanded", at::zeros({3, 6})},
                                            {"offset", at::zeros({2, 6})},
                                            {"again", at::zeros({6, 4}).t()}};
  const void* const place = leaf.data_ptr();
  load_tensors_into(folder / "file", targets);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(at::equal(targets[i].tensor, tensors[i].tensor)) << tensors[i].name;
  EXPECT_EQ(storage.slice(1, 1, 8, 2).abs().sum().item<float>(), 0);
  EXPECT_EQ(leaf.data_ptr(), place);
  EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
}

TEST(Tensors, FilesOfOtherWritersNeedNotBeAligned) {
  const TemporaryFolder folder;
  std::string data = "x";
  const float values[] = {1.5f, -2.25f};
  data.append(reinterpret_cast<const char*>(values), sizeof values);
  testing::write_file(
      folder / "file",
      testing::safetensors_bytes(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                 R"("y":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}} )",
                                 data));
  const auto loaded = load_tensors(folder / "file");
  EXPECT_TRUE(at::equal(loaded[1].tensor, at::tensor({1.5f, -2.25f})));
}

TEST(Tensors, OtherNamesAndTransposedStorage) {
  const TemporaryFolder folder;
  const StoredForms stored = [](const std::string& name) {
    return StoredForm{.name = "h.0." + name, .transposed = name == "weight"};
  };
  const std::vector<NamedTensor> tensors = {{"weight", at::randn({2, 3})},
                                            {"bias", at::randn({2})}};
  save_tensors(folder / "file", tensors, {.stored = stored});
  const auto raw = load_tensors(folder / "file");
  EXPECT_EQ(raw[0].name, "h.0.bias");
  EXPECT_TRUE(at::equal(raw[1].tensor, tensors[0].tensor.t()));
  const std::vector<NamedTensor> targets = {{"weight", at::zeros({2, 3})},
                                            {"bias", at::zeros({2})}};
  load_tensors_into(folder / "file", targets, {.stored = stored});
  EXPECT_TRUE(at::equal(targets[0].tensor, tensors[0].tensor));
  const std::vector<NamedTensor> three_dims = {{"weight", at::zeros({2, 3, 1})}};
  EXPECT_THAT(usage_error([&] { save_tensors(folder / "x", three_dims, {.stored = stored}); }),
              HasSubstr("'weight' cannot be saved: it is to be stored transposed"));
}

TEST(Tensors, ACheckpointOfAnotherModelIsToldInOneMessage) {
  const TemporaryFolder folder;
  std::vector<NamedTensor> tensors = {{"weight", at::zeros({2, 3})},
                                      {"ids", at::zeros({4}, at::kLong)}};
  for (int i = 0; i < 9; ++i) tensors.push_back({fmt::format("old.{}", i), at::zeros({1})});
  save_tensors(folder / "file", tensors);
  const at::Tensor weight = at::ones({3, 2});
  const at::Tensor fitting = at::ones({1});
  const std::vector<NamedTensor> targets = {{"weight", weight},
                                            {"ids", at::zeros({4}, at::kInt)},
                                            {"old.0", fitting},
                                            {"new.a", weight},
                                            {"new.b", weight}};
  const std::string text = usage_error([&] { load_tensors_into(folder / "file", targets); });
  EXPECT_THAT(text,
              AllOf(HasSubstr((folder / "file").string()),
                    HasSubstr("holds 11 tensors that do not fit the 5 of this model"),
                    HasSubstr("checkpoint of another model"),
                    HasSubstr("2 missing from the file: 'new.a', 'new.b'"),
                    HasSubstr("8 in the file and not in the model: 'old.1', 'old.2', 'old.3', "
                              "'old.4', 'old.5', …"),
                    HasSubstr("1 of another shape: 'weight' is [2, 3] in the file and [3, 2] in "
                              "the model"),
                    HasSubstr("1 of another dtype: 'ids' is I64 in the file and Int in the "
                              "model")));
  EXPECT_EQ(fitting.item<float>(), 1) << "a part of it was loaded";
}

TEST(Tensors, WhatIsUnexpectedCanBeSkipped) {
  const TemporaryFolder folder;
  const std::vector<NamedTensor> tensors = {{"a", at::ones({1})}, {"mask", at::ones({1})}};
  save_tensors(folder / "file", tensors);
  const std::vector<NamedTensor> targets = {{"a", at::zeros({1})}};
  EXPECT_THAT(usage_error([&] { load_tensors_into(folder / "file", targets); }),
              HasSubstr("1 in the file and not in the model: 'mask'"));
  EXPECT_NO_THROW(
      load_tensors_into(folder / "file", targets,
                        {.skipped = [](const std::string& name) { return name == "mask"; }}));
  EXPECT_NO_THROW(load_tensors_into(folder / "file", targets, {.unexpected = Unexpected::ignored}));
}

TEST(Tensors, ConversionIsAskedForAndAnnounced) {
  const TemporaryFolder folder;
  const at::Tensor values = at::randn({100}).to(at::kBFloat16);
  const std::vector<NamedTensor> tensors = {{"a", values}, {"b", at::ones({1})}};
  save_tensors(folder / "file", tensors);
  const std::vector<NamedTensor> targets = {{"a", at::zeros({100})}, {"b", at::zeros({1})}};
  EXPECT_THAT(usage_error([&] { load_tensors_into(folder / "file", targets); }),
              HasSubstr("'a' is BF16 in the file and Float in the model"));
  EXPECT_THAT(
      load_tensors_into(folder / "file", targets, {.conversion = Conversion::floating}).converted,
      ElementsAre("a"));
  EXPECT_TRUE(at::equal(targets[0].tensor, values.to(at::kFloat)));
  const std::vector<NamedTensor> whole = {{"a", at::zeros({100}, at::kInt)}, {"b", at::zeros({1})}};
  EXPECT_THAT(usage_error([&] {
                load_tensors_into(folder / "file", whole, {.conversion = Conversion::floating});
              }),
              HasSubstr("1 of another dtype"));
}

TEST(Tensors, WhatCannotBeSavedIsNamed) {
  const TemporaryFolder folder;
  const auto error = [&](const at::Tensor& tensor) {
    const std::vector<NamedTensor> tensors = {{"fine", at::ones({1})}, {"bad", tensor}};
    const std::string text = usage_error([&] { save_tensors(folder / "file", tensors); });
    EXPECT_THAT(text, HasSubstr("the tensor 'bad' cannot be saved"));
    return text;
  };
  EXPECT_THAT(error({}), HasSubstr("undefined"));
  EXPECT_THAT(error(at::zeros({2}, at::kComplexDouble)), HasSubstr("ComplexDouble"));
  EXPECT_THAT(error(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8)),
              HasSubstr("QInt8"));
  EXPECT_THAT(error(at::ones({2, 2}).to_sparse()), HasSubstr("sparse"));
  EXPECT_THAT(error(at::empty({2}, at::TensorOptions().device(at::kMeta))), HasSubstr("meta"));
  EXPECT_TRUE(is_empty(folder.path()));
}

TEST(Tensors, ADTypeThatLibTorchLacksIsNamed) {
  const TemporaryFolder folder;
  const TensorDeclaration tensors[] = {{"tiny", DType::f6_e2m3, {4}}};
  SafetensorsWriter writer(folder / "file", tensors);
  writer.write(testing::as_bytes("123"));
  writer.commit();
  EXPECT_THAT(usage_error([&] { load_tensors(folder / "file"); }),
              AllOf(HasSubstr("tensor 'tiny'"), HasSubstr("no dtype F6_E2M3")));
}

TEST(Tensors, OnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this LibTorch has no CUDA";
  const TemporaryFolder folder;
  const at::Tensor values = at::randn({5, 7}).cuda();
  const std::vector<NamedTensor> tensors = {{"a", values}, {"b", values.t()}};
  save_tensors(folder / "file", tensors);
  const std::vector<NamedTensor> targets = {{"a", at::zeros({5, 7}, values.options())},
                                            {"b", at::zeros({7, 5})}};
  load_tensors_into(folder / "file", targets);
  EXPECT_TRUE(at::equal(targets[0].tensor, values));
  EXPECT_TRUE(at::equal(targets[1].tensor, values.t().cpu()));
}

}  // namespace
}  // namespace lockstep::checkpoint
