//! A tap in a network namespace of its own. Neither has a name outside this process: both are gone
//! when their descriptors are.

use jiffy_microvm_engine::NetSpec;
use jiffy_network::guest::GATEWAY_MAC;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;

/// Host's end.
pub const HOST: &str = "10.77.0.1";
/// Words that tell the guest's agent its end.
pub const CMDLINE: &str = "jiffy.net=10.77.0.2/24,10.77.0.1";
/// Guest's end.
pub const GUEST: &str = "10.77.0.2";
/// Address of the guest's card.
pub const MAC: [u8; 6] = [0x02, 0x4a, 0x49, 0x46, 0x46, 0x01];

nix::ioctl_write_ptr_bad!(
    set_iff,
    nix::request_code_write!(b'T', 202, size_of::<libc::c_int>()),
    libc::ifreq
);

/// Makes the tap and runs `host` on a thread inside its namespace, to make the sockets of the
/// host's side; sockets and threads made there stay inside. An error means that this machine does
/// not let us.
pub fn lay<T: Send>(mtu: u16, host: impl FnOnce() -> T + Send) -> io::Result<(NetSpec, T)> {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
            let tap = tap()?;
            // That of every gateway: a copy goes on with its original's idea of it.
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

fn tap() -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: an all-zero `ifreq` is valid: it is plain integers and a union of them.
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
