#!/usr/bin/env bash
# mlxr on Arm without an Arm machine: builds the aarch64 wheel with a cross compiler, installs it and the wheels that it
# depends on beside a Python for arm64 of Debian, where nothing else is, and runs that Python under QEMU.
#
#   tools/arm.sh                               the demo model answers a question
#   tools/arm.sh -m pytest tests/kernels       the tests of the kernels; any arguments of Python will do
#   QEMU_CPU=cortex-a76 tools/arm.sh ...       another processor than `max`, which has all that QEMU knows
#
# Needs `make .venv/.dev`, Debian or Ubuntu, and apt install g++-aarch64-linux-gnu qemu-user. What it makes is in
# build/arm, with a new wheel each time that a source changed.
set -euo pipefail
cd "$(dirname "$0")/.."
arm=$PWD/build/arm bin=$PWD/.venv/bin
minor=$("$bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
root=$arm/root site=$arm/site abi=cpython-${minor/./}-aarch64-linux-gnu
mkdir -p "$arm"/{apt/lists/partial,apt/cache/archives/partial,debs,dist}

if [ ! -e "$root/usr/bin/python$minor" ]; then # unpacked, not installed
  touch "$arm/apt/status"
  printf '%s\n' 'APT::Architecture "arm64";' 'APT::Architectures {"arm64";};' "Dir::State \"$arm/apt\";" \
    "Dir::State::status \"$arm/apt/status\";" "Dir::Cache \"$arm/apt/cache\";" >"$arm/apt/apt.conf"
  export APT_CONFIG=$arm/apt/apt.conf
  apt-get -qq update
  (cd "$arm/debs" && apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances "python$minor-minimal" "libpython$minor-dev" libstdc++6 libgomp1 |
    grep '^[a-z]' | sort -u | xargs apt-get -qq download)
  for deb in "$arm"/debs/*.deb; do dpkg -x "$deb" "$root"; done
fi

wheel=$(find "$arm/dist" -name '*.whl')
if [ -z "$wheel" ] || [ -n "$(find CMakeLists.txt pyproject.toml csrc src -type f -newer "$wheel" ! -name '*.pyc' -print -quit)" ]; then
  rm -rf "$arm"/dist/*.whl "$site"
  tools="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"
  python="-DPython_INCLUDE_DIR=$root/usr/include/python$minor -DPython_SOABI=$abi"
  CMAKE_ARGS="$tools $python" CXXFLAGS="-idirafter $root/usr/include" _PYTHON_HOST_PLATFORM=linux-aarch64 \
    SETUPTOOLS_EXT_SUFFIX=.$abi.so "$bin/python" -m pip wheel -q --no-build-isolation --no-deps \
    -Cbuild-dir="$arm/wheel" -w "$arm/dist" .
fi

if [ ! -d "$site" ]; then
  platforms=$(printf -- '--platform manylinux_2_%s_aarch64 ' $(seq 17 36))
  # shellcheck disable=SC2086
  "$bin/python" -m pip install -q --target "$site" --only-binary=:all: --python-version "$minor" $platforms \
    --platform manylinux2014_aarch64 --platform linux_aarch64 "$arm"/dist/*.whl \
    gguf hypothesis jsonschema pillow pytest pytest-timeout safetensors
  printf '#!/bin/sh\nexec env PYTHONHOME=%s/usr PYTHONPATH=%s qemu-aarch64 -L %s %s/usr/bin/python%s "$@"\n' \
    "$root" "$site" "$root" "$root" "$minor" >"$arm/python"
  chmod +x "$arm/python"
  echo "import sys; sys.executable = '$arm/python'" >"$site/sitecustomize.py" # for processes that Python starts
fi
[ $# -gt 0 ] || set -- -m mlxr run demo "What does os.path.join do?" --temperature 0
QEMU_CPU=${QEMU_CPU:-max} exec "$arm/python" "$@"
