# Puts what a recipe adds on top of another template's root filesystem. Runs as root with mounts of its own, which go with it.
#
# $1 is the build's directory, whose `upper` gets what is added; $2 the other template's image. Further arguments are packages.
# Everything that only the build needs is hidden from `upper` by mounts.
set -eu
work=$1
image=$2
root=$work/root
shift 2
cd "$work"
mkdir -m 0755 below overlay root
# In memory: on a disk, thousands of small files take longer to remove again than all else. Modes of set-user-id programs suffer, which
# only those see that install.
mount -t tmpfs -o mode=0755 tmpfs below
fsck.erofs --extract=below/root --preserve "$image"
# Relative, because a comma or a colon in a path would end it. No mark is to be made but "deleted" and "opaque".
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

# How this host reaches its mirrors is how the build does.
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
    # Nothing that is installed is to run here.
    printf '#!/bin/sh\nexit 101\n' >root/usr/sbin/policy-rc.d
    chmod 0755 root/usr/sbin/policy-rc.d
    chroot root apt-get update
    chroot root apt-get --yes install -- "$@"
    # Packages of builds long ago.
    chroot root apt-get autoclean
    rm root/usr/sbin/policy-rc.d
fi
# Not earlier: packages may bring authorities, which makes this file anew.
if [ -e root/tmp/authorities.pem ]; then mount --bind root/tmp/authorities.pem root/etc/ssl/certs/ca-certificates.crt; fi
if [ -n "$JIFFY_CUSTOMIZE" ]; then "$JIFFY_CUSTOMIZE" "$root"; fi

# Traces of the build's own time and place.
rm -f root/etc/*- root/var/lib/dpkg/*-old root/var/cache/debconf/*-old root/var/cache/ldconfig/aux-cache root/var/cache/apt/*.bin
rm -f root/var/log/dpkg.log root/var/log/alternatives.log root/var/log/apt/*.log root/var/log/apt/*.xz
