// Runs a packaged model with TT tables, without Python:
//
//   serve OPERATORS PACKAGE INPUTS OUTPUT
//
// OPERATORS is torchrec_tt/_C.so, PACKAGE what export_model.py compiled, INPUTS a list of tensors
// that torch.save wrote; the model's output goes to OUTPUT, for torch.load.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// The library registers its operators where it is loaded: nothing else is to be done.
void load_operators(const char* path) {
  if (!dlopen(path, RTLD_NOW | RTLD_LOCAL)) throw std::runtime_error(dlerror());
}

std::vector<at::Tensor> read_tensors(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("INPUTS must be a file, got ") + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const c10::IValue list = torch::jit::pickle_load(bytes);
  for (const c10::IValue& value : list.toListRef()) tensors.push_back(value.toTensor());
  return tensors;
}

void write_tensor(const at::Tensor& tensor, const char* path) {
  const std::vector<char> bytes = torch::jit::pickle_save(tensor);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error(std::string("OUTPUT must be writable, got ") + path);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: serve OPERATORS PACKAGE INPUTS OUTPUT\n";
    return 2;
  }
  try {
    load_operators(argv[1]);
    torch::inductor::AOTIModelPackageLoader model(argv[2]);
    const std::vector<at::Tensor> outputs = model.run(read_tensors(argv[3]));
    write_tensor(outputs.at(0), argv[4]);
  } catch (const c10::Error& error) {
    std::cerr << "serve: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "serve: " << error.what() << '\n';
    return 1;
  }
}
