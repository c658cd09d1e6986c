//! Configures IPv6 addresses and routes of `eth0` at boot, according to the kernel's command line.

use super::cmdline::Ipv6Config;
use crate::sys;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{AsRawFd, OwnedFd};

/// `struct in6_rtmsg` of linux/ipv6_route.h.
#[repr(C)]
struct Ipv6Route {
    to: libc::in6_addr,
    from: libc::in6_addr,
    gateway: libc::in6_addr,
    kind: u32,
    to_prefix: u16,
    from_prefix: u16,
    metric: u32,
    info: libc::c_ulong,
    flags: u32,
    interface: libc::c_int,
}

/// Prepares the device before it is switched on. The command line contains the address and the
/// gateway, and the host drops packets from all other addresses. The kernel must therefore generate
/// no address, and ignore router advertisements. The address must be usable immediately, so the
/// kernel does not search for duplicates of it.
pub fn prepare() {
    for (name, value) in [
        ("accept_ra", "0"),
        ("accept_dad", "0"),
        // The kernel generates no address (IN6_ADDR_GEN_MODE_NONE).
        ("addr_gen_mode", "1"),
    ] {
        // Ignore the error: a kernel without IPv6 has no such files.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/eth0/{name}"), value);
    }
}

/// Sets the address of `eth0` and the default route.
pub fn configure(config: &Ipv6Config) -> io::Result<()> {
    // SAFETY: the call takes no pointers.
    let socket = unsafe { libc::socket(libc::AF_INET6, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    let socket = match sys::owned(socket) {
        // A kernel without IPv6 is supported.
        Err(e) if e.raw_os_error() == Some(libc::EAFNOSUPPORT) => return Ok(()),
        other => other?,
    };
    // SAFETY: the name is zero-terminated.
    let interface = unsafe { libc::if_nametoindex(c"eth0".as_ptr()) };
    // A guest without `eth0` is supported.
    if interface == 0 {
        return Ok(());
    }
    let interface = libc::c_int::try_from(interface).map_err(io::Error::other)?;
    let mut own = libc::in6_ifreq {
        ifr6_addr: address(config.address),
        ifr6_prefixlen: u32::from(config.prefix),
        ifr6_ifindex: interface,
    };
    // SAFETY: SIOCSIFADDR of an IPv6 socket takes an in6_ifreq.
    unsafe { call(&socket, libc::SIOCSIFADDR, (&raw mut own).cast()) }?;
    let mut out = Ipv6Route {
        to: address(Ipv6Addr::UNSPECIFIED),
        from: address(Ipv6Addr::UNSPECIFIED),
        gateway: address(config.gateway),
        kind: 0,
        to_prefix: 0,
        from_prefix: 0,
        metric: 0,
        info: 0,
        flags: u32::from(libc::RTF_UP | libc::RTF_GATEWAY),
        interface,
    };
    // SAFETY: SIOCADDRT of an IPv6 socket takes an in6_rtmsg, which `Ipv6Route` is.
    unsafe { call(&socket, libc::SIOCADDRT, (&raw mut out).cast()) }
}

/// Converts an address for the kernel.
fn address(ip: Ipv6Addr) -> libc::in6_addr {
    libc::in6_addr {
        s6_addr: ip.octets(),
    }
}

/// Makes an ioctl(2). An address or a route that exists already is not an error.
///
/// # Safety
/// `argument` must be of the type that `request` takes.
unsafe fn call(
    socket: &OwnedFd,
    request: libc::c_ulong,
    argument: *mut libc::c_void,
) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    let result = sys::check(unsafe { libc::ioctl(socket.as_raw_fd(), request as _, argument) });
    match result {
        Err(e) if e.raw_os_error() != Some(libc::EEXIST) => Err(e),
        _ => Ok(()),
    }
}
