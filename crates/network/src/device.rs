//! Creates network devices (taps and ends of veth pairs) in the network namespace of this thread.

use crate::NetError;
use crate::rtnetlink::RouteBatch;
use nix::errno::Errno;
use std::fs::File;
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// System calls for devices.
mod calls {
    // TUNSETIFF and TUNSETPERSIST (linux/if_tun.h) declare an `int`, although the first reads an
    // `ifreq`.
    nix::ioctl_write_ptr_bad!(
        set_iff,
        nix::request_code_write!(b'T', 202, size_of::<libc::c_int>()),
        libc::ifreq
    );
    nix::ioctl_write_int_bad!(
        set_persist,
        nix::request_code_write!(b'T', 203, size_of::<libc::c_int>())
    );
    nix::ioctl_read_bad!(get_flags, libc::SIOCGIFFLAGS, libc::ifreq);
    nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);
    nix::ioctl_read_bad!(get_mtu, libc::SIOCGIFMTU, libc::ifreq);
}

/// Argument of an `ioctl` on a network device, which contains only the name of the device.
fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an all-zero `ifreq` is valid: it consists of integers and a union of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(Errno::ENAMETOOLONG.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    Ok(request)
}

/// Creates a tap with this name in the network namespace of this thread, with the flags that the
/// VMM requires. Closing its descriptor removes it.
pub(crate) fn tap(name: &str) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    let mut request = request(name)?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    // The three flags fit the field (if_tun.h).
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads one `ifreq`, which `request` is.
    unsafe { calls::set_iff(file.as_raw_fd(), &request) }?;
    Ok(file)
}

/// Closes a tap whose unnamed network namespace is about to be removed. The tap is made persistent
/// first: otherwise the close would remove the device and wait for the removal.
pub(crate) fn close_with_namespace(tap: File) {
    // SAFETY: TUNSETPERSIST takes a number, here 1 for a device that outlives its descriptors.
    if let Err(e) = unsafe { calls::set_persist(tap.as_raw_fd(), 1) } {
        tracing::debug!(error = %e, "cannot make a tap device persistent");
    }
}

/// Switches a device of this thread's network namespace on or off.
pub(crate) fn switch(name: &str, on: bool) -> io::Result<()> {
    // Any socket of the namespace can be the handle for requests about devices.
    let socket = UdpSocket::bind(("127.0.0.1", 0))?;
    let mut request = request(name)?;
    // SAFETY: SIOCGIFFLAGS reads and writes one `ifreq`, which `request` is.
    unsafe { calls::get_flags(socket.as_raw_fd(), &mut request) }?;
    // SAFETY: SIOCGIFFLAGS has just filled this member.
    let before = unsafe { request.ifr_ifru.ifru_flags };
    let up = libc::IFF_UP as libc::c_short;
    request.ifr_ifru.ifru_flags = if on { before | up } else { before & !up };
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which `request` is.
    unsafe { calls::set_flags(socket.as_raw_fd(), &request) }?;
    Ok(())
}

/// Returns the MTU in bytes of a device in this thread's network namespace.
pub(crate) fn mtu(name: &str) -> io::Result<u32> {
    // Any socket of the namespace can be the handle for requests about devices.
    let socket = UdpSocket::bind(("127.0.0.1", 0))?;
    let mut request = request(name)?;
    // SAFETY: SIOCGIFMTU reads and writes one `ifreq`, which `request` is.
    unsafe { calls::get_mtu(socket.as_raw_fd(), &mut request) }?;
    // SAFETY: SIOCGIFMTU has just filled this member.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(u32::try_from(mtu).unwrap_or(0))
}

/// Returns the names of the devices in this thread's network namespace.
pub(crate) fn names() -> io::Result<Vec<String>> {
    let devices = nix::net::if_::if_nameindex()?;
    let names = devices
        .iter()
        .map(|device| device.name().to_string_lossy().into_owned());
    Ok(names.collect())
}

/// Returns true if this thread's network namespace has a device with this name.
pub(crate) fn exists(name: &str) -> bool {
    nix::net::if_::if_nametoindex(name).is_ok()
}

/// Returns the index of the device with this name in this thread's network namespace.
pub(crate) fn index(name: &str) -> io::Result<u32> {
    Ok(nix::net::if_::if_nametoindex(name)?)
}

/// Removes a device of this thread's network namespace.
pub(crate) fn remove(name: &str) -> Result<(), NetError> {
    let index = index(name).map_err(NetError::host(format!("finding {name}")))?;
    remove_all(&[index], 0)
}

/// Removes devices of this thread's network namespace by their indices. Several devices are removed
/// together as `group`, which must have no other members: the kernel waits for RCU readers once per
/// removal.
pub(crate) fn remove_all(indices: &[u32], group: u32) -> Result<(), NetError> {
    let mut changes = RouteBatch::default();
    match indices {
        [] => return Ok(()),
        [index] => changes.delete_link(*index),
        indices => {
            indices
                .iter()
                .for_each(|&index| changes.set_group(index, group));
            changes.delete_group(group);
        }
    }
    changes.send()
}
