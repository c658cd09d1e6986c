//! Configures the network interfaces of a microVM at boot: `lo` and `eth0`. The kernel's command
//! line has the addresses. A few ioctls make a netlink library unnecessary.

use super::cmdline::{GuestNetConfig, addresses};
use super::ipv6;
use crate::sys;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

/// Opens a socket for ioctls on network interfaces.
fn socket() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    sys::owned(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })
}

/// Brings `lo` up, and `eth0` if it exists and the command line configures it. A guest without a
/// network is usable, so failures are only reported on the console.
pub fn bring_up() {
    // A server whose backlog is full must drop the SYN, so that `port_forward` tries again. With
    // SYN cookies, the kernel would accept the connection and drop the data that follows.
    let _ = std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", "0");
    let cmdline = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let config = GuestNetConfig::parse(&cmdline);
    let outcome = socket().and_then(|socket| {
        up(&socket, b"lo")?;
        match &config {
            Some(config) => configure(&socket, config),
            None => Ok(()),
        }
    });
    if let Err(e) = outcome {
        eprintln!("jiffy-agent: cannot configure the network: {e}");
    }
    if let Some(config) = config {
        name_servers(&config.dns, cmdline.contains("jiffy.dns="));
    }
}

/// Sets the comma-separated name servers of `list`, in a sandbox whose network is already
/// configured (gVisor). An empty list changes nothing.
pub fn set_host_name_servers(list: &str) {
    name_servers(&addresses(list), true);
}

/// Writes the name servers to `/etc/resolv.conf`. Servers that the host specifies replace the
/// servers of the image, because the host lets the guest reach only these. The default servers only
/// replace an empty or missing file. `from_host` states that the host has specified `servers`.
fn name_servers(servers: &[Ipv4Addr], from_host: bool) {
    let present = std::fs::metadata("/etc/resolv.conf").is_ok_and(|m| m.len() > 0);
    if (present && !from_host) || servers.is_empty() {
        return;
    }
    let text: String = servers
        .iter()
        .map(|s| format!("nameserver {s}\n"))
        .collect();
    // A dangling symbolic link, for example of systemd-resolved, is replaced.
    if std::fs::write("/etc/resolv.conf", &text).is_err() {
        let _ = std::fs::remove_file("/etc/resolv.conf");
        let _ = std::fs::write("/etc/resolv.conf", &text);
    }
}

/// Returns the argument of an ioctl on the interface `name`.
fn request(name: &[u8]) -> libc::ifreq {
    // SAFETY: ifreq is plain data, for which all zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
    request
}

/// Converts an address for the kernel.
fn address(ip: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: sockaddr_in is plain data of the size of sockaddr, for which all zeroes are valid.
    unsafe {
        let mut address: libc::sockaddr_in = std::mem::zeroed();
        address.sin_family = libc::AF_INET as libc::sa_family_t;
        address.sin_addr.s_addr = u32::from(ip).to_be();
        std::mem::transmute(address)
    }
}

/// Makes an ioctl on the interface that `request` names.
fn ioctl(socket: &OwnedFd, call: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: all calls used here take an ifreq.
    sys::check(unsafe { libc::ioctl(socket.as_raw_fd(), call as _, &raw mut *request) }).map(drop)
}

/// Switches an interface on.
fn up(socket: &OwnedFd, name: &[u8]) -> io::Result<()> {
    let mut flags = request(name);
    flags.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    ioctl(socket, libc::SIOCSIFFLAGS, &mut flags)
}

/// Configures `eth0`: address, IPv6, and the default route through the gateway. Does nothing if the
/// guest has no such device.
fn configure(socket: &OwnedFd, config: &GuestNetConfig) -> io::Result<()> {
    let mut own = request(b"eth0");
    own.ifr_ifru.ifru_addr = address(config.address);
    match ioctl(socket, libc::SIOCSIFADDR, &mut own) {
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => return Ok(()),
        other => other?,
    }
    let mut mask = request(b"eth0");
    mask.ifr_ifru.ifru_addr = address(config.netmask());
    ioctl(socket, libc::SIOCSIFNETMASK, &mut mask)?;
    ipv6::prepare();
    up(socket, b"eth0")?;
    if let Some(ipv6) = &config.ipv6 {
        ipv6::configure(ipv6)?;
    }
    let mask = u32::from(config.netmask());
    let any = Ipv4Addr::UNSPECIFIED;
    if u32::from(config.address) & mask != u32::from(config.gateway) & mask {
        // The gateway is reachable on the link, but is not in the network of the guest.
        route(socket, config.gateway, Ipv4Addr::BROADCAST, None)?;
    }
    route(socket, any, any, Some(config.gateway))
}

/// Adds a route to the network `to`/`mask` over `eth0`, directly or through the gateway `via`.
fn route(socket: &OwnedFd, to: Ipv4Addr, mask: Ipv4Addr, via: Option<Ipv4Addr>) -> io::Result<()> {
    // SAFETY: rtentry is plain data, for which all zeroes are valid.
    let mut entry: libc::rtentry = unsafe { std::mem::zeroed() };
    let mut device = *b"eth0\0";
    entry.rt_dst = address(to);
    entry.rt_genmask = address(mask);
    entry.rt_flags = libc::RTF_UP;
    entry.rt_dev = device.as_mut_ptr().cast();
    if let Some(via) = via {
        entry.rt_gateway = address(via);
        entry.rt_flags |= libc::RTF_GATEWAY;
    }
    // SAFETY: SIOCADDRT takes an rtentry; `device` outlives the call.
    let result =
        sys::check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT, &raw mut entry) });
    match result {
        Err(e) if e.raw_os_error() != Some(libc::EEXIST) => Err(e),
        _ => Ok(()),
    }
}
