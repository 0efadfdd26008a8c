#!/bin/sh
# Puts Apptainer on a Debian machine: `sh configs/install_apptainer.sh [PREFIX]`, called by install.sh
# for the tests. Root, x86_64; 80 MB, some 15 s. A cluster's nodes have their site's own instead.
#
# Where apt has Apptainer that is taken. Debian 12 and 13 have none; there it is the package of
# Debian's unstable, from the machine's own mirror and verified by apt, unpacked into PREFIX
# (/opt/apptainer) beside the C library that it was linked with. Apt's sources, what apt has
# installed and the system's C library stay as they are.
# The link is in /usr/local/bin, not in the venv: tests start sandboxes as users who cannot enter
# everyone's checkout. To undo: rm -r /opt/apptainer /usr/local/bin/apptainer
set -eu

PREFIX=${1:-/opt/apptainer}
LINK=/usr/local/bin/apptainer
FUSE=/dev/fuse
KEYS=/usr/share/keyrings/debian-archive-keyring.gpg
LIBEXEC=lib/x86_64-linux-gnu
WORK=$(mktemp -d)
NEW=$PREFIX.$$
trap 'rm -rf "$WORK" "$NEW"' EXIT

say() { printf 'install_apptainer: %s\n' "$*"; }
fail() { printf 'install_apptainer: %s\n' "$*" >&2; exit 1; }

check_machine() {
    [ "$(id -u)" -eq 0 ] || fail "run as root"
    command -v apt-get >/dev/null 2>&1 || fail "this machine has no apt-get"
    [ "$(dpkg --print-architecture)" = amd64 ] ||
        fail "only for amd64, not $(dpkg --print-architecture)"
}

install_packages() {
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

# Whether apt itself has a package of it; its lists have to be there.
is_packaged() {
    apt-cache policy apptainer | grep -q 'Candidate: [0-9]'
}

# Runs a program of apt's on unstable alone, with a state of its own: unstable PROGRAM WORDS…
unstable() {
    program=$1
    shift
    "$program" -qq -o APT::Sandbox::User=root -o Dir::State::lists="$WORK/lists" \
        -o Dir::Cache="$WORK/cache" -o Dir::Etc::sourcelist="$WORK/sources.list" \
        -o Dir::Etc::sourceparts=/dev/null "$@"
}

# Downloads and unpacks into $WORK/apptainer and $WORK/libc6.
fetch() {
    # shellcheck disable=SC2016  # apt's own variable
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 'Origin: Debian' \
        "Codename: $(. /etc/os-release && printf %s "$VERSION_CODENAME")" | head -n 1)
    [ -n "$mirror" ] || fail "apt knows no mirror of this Debian: see /etc/apt/sources.list"
    mkdir -p "$WORK/lists/partial" "$WORK/cache/archives/partial"
    echo "deb [signed-by=$KEYS] $mirror unstable main" >"$WORK/sources.list"
    unstable apt-get update
    (cd "$WORK" && unstable apt-get download apptainer libc6)
    for package in apptainer libc6; do
        dpkg -x "$WORK/$package"_*.deb "$WORK/$package"
    done
}

# Lays in $NEW what will run in $PREFIX.
assemble() {
    mkdir -p "$NEW/glibc"
    cp -a "$WORK/apptainer/usr/bin" "$WORK/apptainer/usr/lib" "$WORK/apptainer/etc" "$NEW"
    cp -a "$WORK"/libc6/usr/lib/x86_64-linux-gnu/*.so* "$NEW/glibc"
    for program in bin/apptainer "$LIBEXEC/apptainer/bin/starter"; do
        patchelf --set-interpreter "$PREFIX/glibc/ld-linux-x86-64.so.2" \
            --force-rpath --set-rpath "$PREFIX/glibc" "$NEW/$program"
    done
    # starter takes what is three folders above it for its prefix: here that is PREFIX/lib
    mkdir -p "$NEW/var/lib/apptainer/mnt/session"
    for folder in etc var bin; do
        ln -s "../$folder" "$NEW/lib/$folder"
    done
    ln -s . "$NEW/lib/lib"
    [ -d /run/systemd/system ] || # else each start asks a systemd that is not there
        sed -i 's/^systemd cgroups = yes/systemd cgroups = no/' \
            "$NEW/etc/apptainer/apptainer.conf"
}

install_unstable() {
    [ ! -e "$PREFIX" ] || fail "$PREFIX is there and does not run: remove it, or name another folder"
    # id maps, the file systems it mounts, the images it builds; and what sets its C library
    install_packages uidmap fuse3 fuse-overlayfs squashfuse squashfs-tools libseccomp2 \
        libsqlite3-0 patchelf
    fetch
    assemble
    mv -T "$NEW" "$PREFIX"
    runs || {
        rm -rf "$PREFIX"
        fail "unstable's package does not run here: $(cat "$WORK/said")"
    }
}

runs() {
    "$PREFIX/bin/apptainer" --version >"$WORK/said" 2>&1
}

check_machine
apt-get update -qq
if is_packaged; then
    install_packages apptainer
else
    runs || install_unstable
    ln -sf "$PREFIX/bin/apptainer" "$LINK"
fi
# as udev has it; without udev it is root's alone, and no other user can mount an image
[ ! -e "$FUSE" ] || chmod 666 "$FUSE" || say "$FUSE stays root's alone"
say "$(apptainer --version)"
