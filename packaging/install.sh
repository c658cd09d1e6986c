#!/bin/sh
# Installs Jiffy from jiffy-VERSION-x86_64.tar.zst, or uninstalls it.
#
#   sh install.sh ARCHIVE [--sha256 HEX] [--prefix DIRECTORY | --user]
#   sh install.sh --uninstall [--prefix DIRECTORY | --user]
#
# ARCHIVE is a file or an https URL. Its SHA-256 is compared with --sha256 or, for a file, with
# SHA256SUMS in its directory. A URL always needs --sha256. The default prefix is /usr/local; --user
# selects ~/.local. An uninstallation removes the installed files, and retains data.
set -eu

TOTAL_KB_FACTOR=2
prefix=/usr/local
archive=
expected=
uninstall=false
work=

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "$0"
}

finish() {
    status=$?
    if [ -n "$work" ]; then rm -rf "$work"; fi
    exit "$status"
}

missing_package() { # PROGRAM: names the package of a missing program
    if command -v apt-get >/dev/null 2>&1; then manager=apt-get; column=2
    elif command -v dnf >/dev/null 2>&1; then manager=dnf; column=3
    elif command -v pacman >/dev/null 2>&1; then manager=pacman; column=4
    else echo "$1"; return
    fi
    # Program, then its package in Debian, Fedora and Arch.
    packages="zstd zstd zstd zstd
curl curl curl curl
tar tar tar tar
sha256sum coreutils coreutils coreutils
ip iproute2 iproute iproute2
nft nftables nftables nftables
mkfs.erofs erofs-utils erofs-utils erofs-utils
mkfs.ext4 e2fsprogs e2fsprogs e2fsprogs
mmdebstrap mmdebstrap mmdebstrap mmdebstrap
pasta passt passt passt
newuidmap uidmap shadow-utils shadow"
    echo "$packages" | while read -r program debian fedora arch; do
        if [ "$program" = "$1" ]; then
            case $column in 2) echo "$debian" ;; 3) echo "$fedora" ;; 4) echo "$arch" ;; esac
        fi
    done
}

install_command() { # PACKAGES
    case ${manager:-} in
        apt-get) echo "apt-get install $*" ;;
        dnf) echo "dnf install $*" ;;
        pacman) echo "pacman -S $*" ;;
        *) echo "install: $*" ;;
    esac
}

find_manager() {
    manager=
    for candidate in apt-get dnf pacman; do
        if command -v "$candidate" >/dev/null 2>&1; then manager=$candidate; return; fi
    done
}

has() { # PROGRAM: also searches directories that the PATH of an unprivileged user lacks
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ]
}

need() { # PROGRAM...: fails and prints the packages of missing programs
    absent=
    for program in "$@"; do
        if ! has "$program"; then absent="$absent $(missing_package "$program")"; fi
    done
    # shellcheck disable=SC2086
    [ -z "$absent" ] || fail "programs are missing: $(install_command $absent)"
}

suggest() { # PROGRAM...: prints the packages of missing optional programs
    absent=
    for program in "$@"; do
        if ! has "$program"; then absent="$absent $(missing_package "$program")"; fi
    done
    if [ -n "$absent" ]; then
        echo "Some features need further packages (\`jiffy doctor\` explains them):"
        # shellcheck disable=SC2086
        echo "  $(install_command $absent)"
    fi
}

manifest_of() { echo "$1/lib/jiffy/installed-files"; }

remove_installed() { # PREFIX: removes the files of a manifest and empty directories
    manifest=$(manifest_of "$1")
    [ -f "$manifest" ] || fail "$1 has no installation of this script: $manifest does not exist"
    while read -r name; do
        case $name in
            /* | *..* | '') fail "the manifest $manifest has an unexpected name: $name" ;;
        esac
        rm -f "$1/$name"
    done <"$manifest"
    rm -f "$manifest"
    for name in share/doc/jiffy share/jiffy/templates share/jiffy lib/jiffy lib/systemd/system lib/systemd; do
        rmdir "$1/$name" 2>/dev/null || true
    done
}

verify() { # FILE NAME
    actual=$(sha256sum "$1" | cut -d ' ' -f 1)
    if [ -z "$expected" ]; then
        sums=$(dirname "$1")/SHA256SUMS
        [ -f "$sums" ] || fail "no SHA-256 is known for $2: pass --sha256 HEX or put SHA256SUMS in the same directory"
        expected=$(awk -v name="$2" '$2 == name { print $1 }' "$sums")
        [ -n "$expected" ] || fail "$sums does not list $2: pass --sha256 HEX"
    fi
    [ "$actual" = "$expected" ] || fail "$2 has the SHA-256 $actual instead of $expected"
}

fetch() { # URL FILE
    need curl
    curl --fail --location --proto '=https' --proto-redir '=https' --silent --show-error --output "$2" "$1" ||
        fail "cannot download $1"
}

check_prefix() {
    case $prefix in
        /*) ;;
        *) fail "the prefix $prefix is not an absolute path" ;;
    esac
    case $prefix in
        *[%\|\&\\\"\']* | *"
"*) fail "the prefix $prefix contains a character that is not permitted in unit files" ;;
    esac
}

while [ $# -gt 0 ]; do
    case $1 in
        --prefix | --sha256)
            [ $# -ge 2 ] || fail "$1 needs a value"
            if [ "$1" = --prefix ]; then prefix=${2%/}; else expected=$(echo "$2" | tr A-F a-f); fi
            shift 2
            ;;
        --user)
            [ -n "${HOME:-}" ] || fail "HOME is not set: pass --prefix DIRECTORY"
            prefix=$HOME/.local
            shift
            ;;
        --uninstall) uninstall=true; shift ;;
        -h | --help) usage; exit 0 ;;
        -*) fail "unknown option $1: see sh install.sh --help" ;;
        *)
            [ -z "$archive" ] || fail "only one archive can be installed: $archive or $1"
            archive=$1
            shift
            ;;
    esac
done
check_prefix
find_manager

if [ "$uninstall" = true ]; then
    [ -z "$archive" ] || fail "--uninstall takes no archive"
    remove_installed "$prefix"
    echo "jiffy was removed from $prefix. Data is retained in /var/lib/jiffy or ~/.local/share/jiffy."
    exit 0
fi

[ -n "$archive" ] || { usage >&2; exit 1; }
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "this archive is for Linux on x86-64, not for $(uname -s)-$(uname -m)"
need tar zstd sha256sum
mkdir -p "$prefix" 2>/dev/null && [ -w "$prefix" ] ||
    fail "cannot write to $prefix: run as root, or pass --user or --prefix DIRECTORY"

# The archive is unpacked below the prefix, so that each file can be replaced by a rename.
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
# The process that reads the messages may have exited.
trap 'exit 141' PIPE
for old in "$prefix"/.jiffy-install.*; do
    # Removes the remains of an installation that was interrupted by a power failure.
    if [ -d "$old" ] && ! kill -0 "${old##*.}" 2>/dev/null; then rm -rf "$old"; fi
done
work=$prefix/.jiffy-install.$$
mkdir -m 0700 "$work"

case $archive in
    https://*)
        [ -n "$expected" ] || fail "a URL needs --sha256 HEX"
        fetch "$archive" "$work/archive"
        verify "$work/archive" "${archive##*/}"
        file=$work/archive
        ;;
    *://*) fail "only https URLs are accepted, not $archive" ;;
    *)
        [ -f "$archive" ] || fail "the archive $archive does not exist"
        verify "$archive" "$(basename "$archive")"
        file=$archive
        ;;
esac

# The installation needs space for a second copy of the files.
packed_kb=$(($(wc -c <"$file") / 1024))
free_kb=$(df -Pk "$prefix" | awk 'NR == 2 { print $4 }')
[ "$free_kb" -gt $((packed_kb * TOTAL_KB_FACTOR)) ] ||
    fail "the disk of $prefix is full: only $free_kb KiB are free"
mkdir "$work/tree"
zstd -dcq <"$file" | tar -xf - -C "$work/tree" --strip-components=1 --no-same-owner ||
    fail "cannot unpack $archive below $prefix (is the disk full?); nothing was changed"
rm -f "$work/archive"
for name in bin/jiffy lib/jiffy/jiffy-vmm lib/jiffy/jiffy-agent; do
    [ -f "$work/tree/$name" ] || fail "$archive does not contain $name; nothing was changed"
done
for name in lib/systemd/system/jiffy.service share/jiffy/apparmor; do
    sed "s|@PREFIX@|$prefix|" "$work/tree/$name" >"$work/edited"
    cat "$work/edited" >"$work/tree/$name"
done
(cd "$work/tree" && find . -type f | sed 's|^\./||' | LC_ALL=C sort) >"$work/files"
sync -f "$work/tree" 2>/dev/null || true

# The manifest is written first, with the old and the new names, so that an interrupted installation
# can be removed or repeated.
manifest=$(manifest_of "$prefix")
mkdir -p "$prefix/lib/jiffy"
cp "$work/files" "$work/manifest"
if [ -f "$manifest" ]; then LC_ALL=C sort -u "$manifest" "$work/files" >"$work/manifest"; fi
mv "$work/manifest" "$manifest"
while read -r name; do
    mkdir -p "$(dirname "$prefix/$name")"
    mv -f "$work/tree/$name" "$prefix/$name"
done <"$work/files"
# Removes files that only the previous version has.
LC_ALL=C comm -23 "$manifest" "$work/files" | while read -r name; do rm -f "$prefix/$name"; done
mv "$work/files" "$manifest"
rm -rf "$work"

echo "jiffy $("$prefix/bin/jiffy" --version 2>/dev/null | cut -d ' ' -f 2) is installed in $prefix."
case :$PATH: in
    *:"$prefix/bin":*) ;;
    *) echo "Add its programs to PATH: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
suggest ip nft mkfs.erofs mkfs.ext4 mmdebstrap pasta newuidmap
echo "Next: jiffy doctor, then jiffy run -- uname -r"
