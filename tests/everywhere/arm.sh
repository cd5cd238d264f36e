#!/bin/sh
# Runs a module on 64-bit ARM, as QEMU emulates it, with Python 3.11 and the libraries of constraints.txt:
#   sh tests/everywhere/arm.sh FOLDER tests.everywhere.steps llama
# Debian: qemu-user, and `dpkg --add-architecture arm64 && apt-get update`. What FOLDER lacks is downloaded
# (1 GB). A case of `steps` took 10 to 20 minutes of one core.
set -e
folder=$1 && shift
mkdir -p "$folder/packages" "$folder/root"
folder=$(cd "$folder" && pwd) project=$(pwd)
if [ ! -d "$folder/site" ]; then
    cd "$folder/packages"
    for name in libc6 libgcc-s1 libstdc++6 zlib1g libffi8 libssl3 libexpat1 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 \
        libcrypt1 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib; do
        apt-get download -q "$name:arm64"
    done
    for package in *.deb; do dpkg-deb -x "$package" ../root; done
    cd "$project"
    needs='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")'
    python -c "$needs" > "$folder/needs.txt"
    python -m pip install -q --only-binary=:all: --python-version 3.11 --implementation cp -c constraints.txt \
        --platform manylinux_2_17_aarch64 --platform manylinux_2_24_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_31_aarch64 --platform manylinux2014_aarch64 \
        --target "$folder/new" -r "$folder/needs.txt" pytest
    mv "$folder/new" "$folder/site"
fi
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1 NPROC=1 PYTHONPATH="$folder/site:$project"
export XLA_FLAGS="--xla_allow_excess_precision=false --xla_backend_optimization_level=0" # compiles faster
export GLIBC_TUNABLES= # with them a stage would start Python anew, which the kernel cannot run here
exec qemu-aarch64 -L "$folder/root" "$folder/root/usr/bin/python3.11" -m "$@"
