# Creates the layer that a recipe adds to the root file system of another template. Runs as root in
# a private mount namespace, so its mounts are removed when it exits. $1 is the directory of the
# build; the layer is written to its subdirectory `upper`. $2 is the image of the other template.
# Further arguments are packages. Files that only the build needs are on mounts, so that they do not
# become part of `upper`.
set -eu
work=$1
image=$2
root=$work/root
shift 2
cd "$work"
mkdir -m 0755 below overlay root
# The files are in memory, since removing thousands of small files from a disk takes longer than the
# rest of the build. The tmpfs drops set-user-id bits, which only programs of this build would see.
mount -t tmpfs -o mode=0755 tmpfs below
fsck.erofs --extract=below/root --preserve "$image"
# Relative paths, because a comma or a colon in a path would end the option. overlayfs must create
# no marks except "deleted" and "opaque".
mount -t overlay -o lowerdir=below/root,upperdir=upper,workdir=overlay,redirect_dir=off,metacopy=off,index=off,xino=off overlay root
mount -t proc proc root/proc
mount --rbind /sys root/sys
mount --rbind /dev root/dev
mount -t tmpfs -o mode=1777 tmpfs root/tmp
mount -t tmpfs -o mode=0755 tmpfs root/run
mount -t tmpfs -o mode=0755 tmpfs root/var/lib/apt/lists
mkdir -p "$JIFFY_CACHE/partial"
mount --bind "$JIFFY_CACHE" root/var/cache/apt/archives
if [ -e /etc/resolv.conf ]; then mount --bind /etc/resolv.conf root/etc/resolv.conf; fi

# The build uses the mirrors and the proxy of this host.
printf '%s\n' "$JIFFY_SOURCES" >root/tmp/sources.list
printf '%s\n' "$JIFFY_APT" >root/tmp/apt.conf
if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
    cp /etc/ssl/certs/ca-certificates.crt root/tmp/authorities.pem
    echo 'Acquire::https::CAInfo "/tmp/authorities.pem";' >>root/tmp/apt.conf
fi
unset SSL_CERT_FILE SSL_CERT_DIR CURL_CA_BUNDLE REQUESTS_CA_BUNDLE PIP_CERT PIP_FIND_LINKS
export APT_CONFIG=/tmp/apt.conf DEBIAN_FRONTEND=noninteractive HOME=/tmp TMPDIR=/tmp
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

if [ $# -gt 0 ]; then
    # Services of installed packages must not start during the build.
    printf '#!/bin/sh\nexit 101\n' >root/usr/sbin/policy-rc.d
    chmod 0755 root/usr/sbin/policy-rc.d
    chroot root apt-get update
    chroot root apt-get --yes install -- "$@"
    # Removes packages of earlier builds that the mirror no longer has.
    chroot root apt-get autoclean
    rm root/usr/sbin/policy-rc.d
fi
# Mounted after the installation, because packages may install certificate authorities, which
# rewrites this file.
if [ -e root/tmp/authorities.pem ]; then mount --bind root/tmp/authorities.pem root/etc/ssl/certs/ca-certificates.crt; fi
if [ -n "$JIFFY_CUSTOMIZE" ]; then "$JIFFY_CUSTOMIZE" "$root"; fi

# Removes files that depend on the time and place of the build.
rm -f root/etc/*- root/var/lib/dpkg/*-old root/var/cache/debconf/*-old root/var/cache/ldconfig/aux-cache root/var/cache/apt/*.bin
rm -f root/var/log/dpkg.log root/var/log/alternatives.log root/var/log/apt/*.log root/var/log/apt/*.xz
