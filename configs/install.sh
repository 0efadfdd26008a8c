#!/bin/sh
# Sets this project up: `sh configs/install.sh PYTHON VENV [EXTRAS]`, called by the Makefile.
# Makes VENV with PYTHON (3.11 to 3.13) and installs the project into it, with EXTRAS such as `dev`. As root on Debian it also
# installs the system packages that are missing; otherwise it names them. Running it again is cheap.
set -eu
PATH=$PATH:/usr/sbin:/sbin  # where Debian has daemons

PYTHON=${1:?usage: sh configs/install.sh PYTHON VENV [EXTRAS]}
VENV=${2:?usage: sh configs/install.sh PYTHON VENV [EXTRAS]}
EXTRAS=${3:-}
ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
LOG=$(mktemp)
trap 'rm -f "$LOG"' EXIT

say() { printf 'install: %s\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }

# Runs a command quietly; shows what it said only if it fails.
quietly() {
    if ! "$@" >"$LOG" 2>&1; then
        cat "$LOG" >&2
        fail "failed: $*"
    fi
}

# Prints the Debian packages that are missing.
missing() {
    command -v bwrap >/dev/null 2>&1 || printf ' bubblewrap'
    command -v git >/dev/null 2>&1 || printf ' git'
    if ! command -v "$PYTHON" >/dev/null 2>&1; then
        printf ' python3 python3-venv'
    elif ! "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        printf ' python3-venv'
    fi
}

# Prints the Debian packages that the tests alone need and that are missing: a real small Slurm
# (with accounting), and a browser that looks at the report. Without them those tests are skipped.
missing_for_tests() {
    command -v slurmctld >/dev/null 2>&1 || printf ' slurmctld'
    command -v slurmd >/dev/null 2>&1 || printf ' slurmd slurm-wlm-basic-plugins'
    command -v sbatch >/dev/null 2>&1 || printf ' slurm-client'
    command -v munged >/dev/null 2>&1 || printf ' munge'
    command -v ip >/dev/null 2>&1 || printf ' iproute2'
    command -v slurmdbd >/dev/null 2>&1 || printf ' slurmdbd'
    command -v mariadbd >/dev/null 2>&1 || printf ' mariadb-server'
    command -v chromium >/dev/null 2>&1 || printf ' chromium'
}

is_root_on_debian() {
    [ "$(id -u)" -eq 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null 2>&1
}

install_packages() {
    say "installing $* with apt-get"
    # packages start their services; the tests run daemons of their own
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends "$@" >"$LOG" 2>&1 || {
        quietly apt-get update -qq
        quietly env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
            apt-get install -qq -y --no-install-recommends "$@"
    }
}

provide_packages() {
    wanted=$(missing)
    if [ -n "$wanted" ] && is_root_on_debian; then
        # shellcheck disable=SC2086  # a list of package names
        install_packages $wanted
        wanted=$(missing)
    fi
    [ -z "$wanted" ] || fail "missing:$wanted. On Debian: sudo apt-get install$wanted; then again"
}

provide_for_tests() {
    wanted=$(missing_for_tests)
    [ -n "$wanted" ] || return 0
    if is_root_on_debian; then
        # shellcheck disable=SC2086
        install_packages $wanted
    else
        say "some tests will be skipped. They need:$wanted, and root"
    fi
}

# Without Apptainer its tests are skipped, so nothing of this is demanded.
provide_apptainer() {
    ! command -v apptainer >/dev/null 2>&1 || return 0
    if ! is_root_on_debian; then
        say "some tests will be skipped. They need Apptainer, which root installs on Debian:" \
            "sh configs/install_apptainer.sh"
        return 0
    fi
    say "installing Apptainer, for tests"
    sh "$ROOT/configs/install_apptainer.sh" >"$LOG" 2>&1 ||
        say "without it: its tests will be skipped. $(cat "$LOG")"
}

check_python() {
    found=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
        fail "$PYTHON does not run; give another: make PYTHON=/path/to/python3.11"
    case $found in
    3.11 | 3.12 | 3.13) ;;
    *) fail "$PYTHON is Python $found; needed is 3.11, 3.12 or 3.13: make PYTHON=python3.11" ;;
    esac
}

make_venv() {
    if "$VENV/bin/python" -c '' >/dev/null 2>&1; then
        return 0
    fi
    say "making $VENV with Python $found"
    quietly "$PYTHON" -m venv --clear "$VENV"
}

install_project() {
    say "installing the project and what it needs (a few minutes the first time)"
    # compiling all modules takes longer than all else; those that are imported compile themselves
    quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        -c "$ROOT/constraints.txt" -e "$ROOT${EXTRAS:+[$EXTRAS]}"
    "$VENV/bin/agentrl" --help >/dev/null || fail "$VENV/bin/agentrl does not start"
    say "done: $VENV/bin/agentrl"
}

provide_packages
if [ "$EXTRAS" = dev ]; then
    provide_for_tests
    provide_apptainer
fi
check_python
make_venv
install_project
