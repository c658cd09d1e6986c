//! A tap in a network namespace of its own. Neither has a name outside this process, so both are
//! removed when their descriptors are closed.

use jiffy_microvm_engine::NetSpec;
use jiffy_network::guest::GATEWAY_MAC;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;

/// Address of the host.
pub const HOST: &str = "10.77.0.1";
/// Kernel parameter that configures the guest's network.
pub const CMDLINE: &str = "jiffy.net=10.77.0.2/24,10.77.0.1";
/// Address of the guest.
pub const GUEST: &str = "10.77.0.2";
/// MAC address of the guest's interface.
pub const MAC: [u8; 6] = [0x02, 0x4a, 0x49, 0x46, 0x46, 0x01];

nix::ioctl_write_ptr_bad!(
    set_iff,
    nix::request_code_write!(b'T', 202, size_of::<libc::c_int>()),
    libc::ifreq
);

/// Creates the tap and runs `host` on a thread inside its namespace, to create the sockets of the
/// host. Sockets and threads created there remain in the namespace. Fails if this machine does not
/// permit it.
pub fn create_tap<T: Send>(mtu: u16, host: impl FnOnce() -> T + Send) -> io::Result<(NetSpec, T)> {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
            let tap = open_tap()?;
            // All gateways have this address, because a clone retains its parent's neighbour
            // entries.
            let gateway = GATEWAY_MAC.map(|byte| format!("{byte:02x}")).join(":");
            ip(&["link", "set", "tap0", "address", &gateway])?;
            ip(&["addr", "add", &format!("{HOST}/24"), "dev", "tap0"])?;
            ip(&["link", "set", "tap0", "mtu", &mtu.to_string(), "up"])?;
            let net = NetSpec { tap, mac: MAC, mtu };
            Ok((net, host()))
        });
        inside.join().unwrap()
    })
}

fn open_tap() -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: an all-zero `ifreq` is valid because it contains only integers and a union of
    // integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"tap0") {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags.try_into().unwrap();
    // SAFETY: TUNSETIFF reads one `ifreq`, which `request` is.
    unsafe { set_iff(file.as_raw_fd(), &request) }?;
    Ok(file)
}

/// Calls ip(8).
pub fn ip(args: &[&str]) -> io::Result<()> {
    let output = Command::new("ip").args(args).output()?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("ip {}: {why}", args.join(" "))))
}
