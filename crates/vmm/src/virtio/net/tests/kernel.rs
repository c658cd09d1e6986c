//! Interface over a real tap, in a network namespace that exists as long as the test's thread.

use super::*;
use std::os::fd::{AsRawFd, FromRawFd};

/// `_IOW('T', 202, int)` of Linux `if_tun.h`.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;

/// Returns a request for an interface of this name.
fn request(name: &str, flags: libc::c_int) -> libc::ifreq {
    // SAFETY: an all-zero `ifreq` is valid because it contains only integers and a union of
    // integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::try_from(from).unwrap();
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap();
    request
}

/// Opens a tap.
fn tap(flags: libc::c_int) -> std::io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    let request = request("jiffytest", flags);
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which `request` is.
    if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &request) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(file)
}

/// Enables the interface without IPv6, so that only the test sends frames. Returns a raw socket on
/// it.
fn raw_socket() -> File {
    // Ignore the error: a kernel without IPv6 does not have this file.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/jiffytest/disable_ipv6", "1");
    // SAFETY: the call accesses no memory, and the descriptor has no other owner.
    let socket = unsafe {
        // 0x0300 is `ETH_P_ALL` in network byte order.
        let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0x0300);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        File::from_raw_fd(fd)
    };
    let mut up = request("jiffytest", libc::IFF_UP);
    // SAFETY: both requests read or write one `ifreq`, which `up` is. The kernel has set the value
    // of the union.
    let index = unsafe {
        assert_eq!(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &up), 0);
        assert_eq!(
            libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFINDEX, &mut up),
            0
        );
        up.ifr_ifru.ifru_ifindex
    };
    // SAFETY: an all-zero `sockaddr_ll` is valid because it contains only integers.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
    address.sll_protocol = 0x0300;
    address.sll_ifindex = index;
    let size = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).unwrap();
    // SAFETY: bind reads `size` bytes of `address`, which has this size.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) };
    assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
    socket
}

/// Returns a broadcast frame of the experimental EtherType 0x88b5 (IEEE 802).
fn ethernet(payload: u8) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(MAC);
    frame.extend([0x88, 0xb5]);
    frame.extend([payload; 60]);
    frame
}

/// Exchanges frames between the device and a raw socket at the tap.
fn exchange_frames() {
    let tap_flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let plain = tap(libc::IFF_TAP | libc::IFF_NO_PI).unwrap();
    assert!(matches!(Net::new(plain, MAC, 1500), Err(NetError::Tap(_))));
    let tap = tap(tap_flags).unwrap();
    let mut socket = raw_socket();
    let net = Net::new(tap, MAC, 1500).unwrap();
    let mut driver = NetDriver::new(0);
    driver.net = net;
    driver.activate(driver.net.features());
    driver.add_rx_buffer(0, 2048);

    socket.write_all(&ethernet(0x11)).unwrap();
    for ready in driver.harness.ready(2000) {
        driver.net.host_event(ready.token, ready.flags).unwrap();
    }
    // The header, and the frame of 74 bytes.
    assert_eq!(driver.rx.used(), [(0, 86)]);
    assert_eq!(driver.bytes(RX_BUFFERS_ADDRESS + 12, 74), ethernet(0x11));
    // A header without offloads, in which `num_buffers` is 1.
    assert_eq!(
        driver.bytes(RX_BUFFERS_ADDRESS, 12),
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    );

    driver.send([0; HEADER_BYTES], &ethernet(0x22)).unwrap();
    assert_eq!(driver.net.counters().tx_frames, 1);
    let mut frame = [0; 100];
    // The socket receives all frames of the interface: skip frames of the kernel, if any.
    let mut seen = Vec::new();
    while seen.last() != Some(&0x22) {
        let count = socket.read(&mut frame).unwrap();
        seen = frame[..count].to_vec();
    }
    assert_eq!(seen, ethernet(0x22));

    // Frames that the kernel rejects are dropped.
    driver.send([0; HEADER_BYTES], &[]).unwrap();
    let mut nonsense = [0xff; HEADER_BYTES];
    (nonsense[0], nonsense[1]) = (1, 1);
    driver.send(nonsense, &ethernet(0x33)).unwrap();
    assert_eq!(driver.net.counters().tx_dropped, 2);
}

#[test]
fn frames_pass_both_ways_through_a_real_tap() {
    std::thread::spawn(|| {
        // SAFETY: the call accesses no memory. Only this thread, which ends with the test, enters
        // the new namespace.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } < 0 {
            let error = std::io::Error::last_os_error();
            eprintln!("not tested: no network namespace: {error}");
            return;
        }
        exchange_frames();
    })
    .join()
    .unwrap();
}
