#!/bin/sh
# Set up .venv: the pinned packages, this project (editable), and ffcv where it can be built.
#
#   tools/setup.sh              all of it; returns at once when nothing has changed since
#   tools/setup.sh --libraries  only the system libraries that ffcv is built against
#   tools/setup.sh --triton     Triton, for the tests of its kernels, if torch has not brought it
#
# PYTHON names the interpreter that makes .venv (default: python3). The script may be interrupted at
# any point and run again: the stamp goes before the first change and comes back after the last.
#
# ffcv is built from C++ against opencv and turbojpeg. Where those are missing, apt installs them;
# where apt cannot (no apt-get, no root), one line says what to install, and all the rest is set up
# without ffcv. A later run notices that the libraries have come, and builds ffcv then.
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
PY=$VENV/bin/python
TRITON=triton==3.7.1 # what CUDA builds of torch 2.13 require; each version has its own
STAMP=$VENV/setup-stamp
FFCV_LOG=$VENV/setup-ffcv.log
APT_LOG=$VENV/setup-apt.log

main() {
    if up_to_date; then return; fi
    lock
    if up_to_date; then return; fi # another run did it while this one waited
    trap 'exit 130' INT TERM       # or an interrupted build of ffcv would pass for a failed one
    if ! environment_up_to_date; then
        rm -f "$STAMP"
        make_venv
        install_packages
    fi
    install_ffcv
    write_stamp
}

# --- The stamp: line 1, what was installed; line 2, ffcv's state; line 3, why there is no ffcv ----

up_to_date() {
    environment_up_to_date || return 1
    state=$(sed -n 2p "$STAMP")
    [ "$state" != "ffcv built" ] || return 0
    [ "$state" = "$(ffcv_prospects)" ] || return 1
    sed -n 3p "$STAMP"
}

environment_up_to_date() {
    [ -f "$STAMP" ] && [ "$(sed -n 1p "$STAMP")" = "$(inputs_key)" ] && "$PY" -c '' 2>/dev/null
}

# The folder is part of it, because an environment that moved still imports from where it was.
inputs_key() {
    { pwd -P && cat pyproject.toml constraints.txt tools/setup.sh; } | cksum
}

# All that decides whether ffcv builds: when it changes, building is worth another try.
ffcv_prospects() {
    { missing_libraries && pkg-config --modversion opencv4 libturbojpeg; } 2>/dev/null | cksum
}

write_stamp() {
    state="ffcv built"
    if [ -n "$skipped" ]; then state=$(ffcv_prospects); fi
    printf '%s\n' "$(inputs_key)" "$state" "$skipped" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
}

# --- Python ---------------------------------------------------------------------------------------

make_venv() {
    if ! "$PY" -m pip --version >/dev/null 2>&1; then
        check_python "$PYTHON"
        "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
            die "$PYTHON cannot make virtual environments: install python3-venv (its Debian name)"
        say "making $VENV with $("$PYTHON" --version)"
        "$PYTHON" -m venv --clear "$VENV"
    fi
    check_python "$PY"
}

check_python() {
    version=$("$1" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
        die "there is no Python called '$1': name one of 3.10 or newer with make PYTHON=python3.12"
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "torchcomp needs Python 3.10 or newer, $1 is $version: name one with make PYTHON=python3.12"
}

# ffcv, which alone may fail, comes last and by itself: so this takes the `recipes` extra without it.
install_packages() {
    say "installing torch and the other pinned packages (a minute or two; longer for CUDA builds)"
    pip_install -e '.[kernels,dev]'
    recipes=$("$PY" -c '
from importlib.metadata import requires
for line in requires("torchcomp-ddp"):
    name, _, marker = line.partition(";")
    if "recipes" in marker and name.strip() != "ffcv":
        print(name.strip())
')
    # shellcheck disable=SC2086 # one word for each package
    pip_install $recipes
}

# The constraints hold for what is installed and, through the environment, for what builds it.
pip_install() {
    quiet=-qq # only errors; a person at a terminal sees the downloads
    if [ -t 1 ]; then quiet=; fi
    PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
        PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$PY" -m pip install --no-input $quiet "$@"
}

# --- Triton ---------------------------------------------------------------------------------------

# Its interpreter needs no GPU. Where there is no wheel, the tests of the kernels say so and skip.
install_triton() {
    # Beside a CPU build of torch, no other version than this; a CUDA build has brought its own.
    if "$PY" -c 'import sys, torch, triton
sys.exit(torch.version.cuda is None and triton.__version__ != sys.argv[1])' "${TRITON#*==}" \
        2>/dev/null; then return; fi
    say "installing Triton, whose interpreter tests the CUDA kernels (300 MB; 1 GB on disk)"
    pip_install --no-deps --only-binary :all: "$TRITON" || say "there is no Triton for this system"
}

# --- ffcv -----------------------------------------------------------------------------------------

# Sets `skipped` to the line that says why there is no ffcv, or to nothing.
install_ffcv() {
    install_libraries
    if [ -n "$skipped" ]; then return; fi
    say "building ffcv (half a minute)"
    if ! { pip_install ffcv && "$PY" -c 'import ffcv'; } >"$FFCV_LOG" 2>&1; then
        skip "its build failed" "see $FFCV_LOG and remove $STAMP to try again"
    fi
}

install_libraries() {
    skipped=
    missing=$(missing_libraries)
    if [ -z "$missing" ]; then return; fi
    if ! have apt-get; then
        skip "there is no apt-get here" \
            "install $missing (names of Debian and Ubuntu) and run make again"
    elif ! as_root true 2>/dev/null; then
        skip "apt-get needs root" \
            "run apt-get install --no-install-recommends $missing as root, and make again"
    else
        say "installing with apt-get, for ffcv: $missing"
        mkdir -p "$VENV"
        # shellcheck disable=SC2086 # one word for each package
        apt_install $missing >"$APT_LOG" 2>&1 || true
        missing=$(missing_libraries)
        if [ -n "$missing" ]; then
            skip "apt-get failed (see $APT_LOG)" "install $missing and run make again"
        fi
    fi
}

missing_libraries() {
    set --
    have pkg-config || set -- "$@" pkg-config
    has_library libturbojpeg || set -- "$@" libturbojpeg0-dev
    has_library opencv4 || set -- "$@" libopencv-dev
    have c++ || set -- "$@" g++
    has_python_header || set -- "$@" "$(python_header)"
    echo "$*"
}

has_library() { pkg-config --exists "$1" 2>/dev/null; }

has_python_header() {
    [ -x "$PY" ] || return 0 # asked again when there is one
    [ -f "$("$PY" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]
}

python_header() { "$PY" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])'; }

apt_install() {
    as_root apt-get update </dev/null || true # an old list may do
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 \
        install -y --no-install-recommends "$@" </dev/null
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

skip() {
    skipped="ffcv is skipped, because $1: $2; until then the recipes read with torchvision's loader."
    echo "$skipped"
}

# --- Small things ---------------------------------------------------------------------------------

# Two runs at once (make test in two windows) take turns. Not every system has flock.
lock() {
    if have flock; then
        exec 9<tools/setup.sh
        flock 9 || true
    fi
}

have() { command -v "$1" >/dev/null 2>&1; }
say() { echo "setup: $*"; }
die() {
    echo "setup: $*" >&2
    exit 1
}

case ${1-} in
'') main ;;
--libraries) install_libraries ;;
--triton) install_triton ;;
*) die "unknown option '$1': there are only --libraries and --triton" ;;
esac
