//! The program `jiffy-agent`: process 1 of a guest, `modprobe` of the guest, or, in tests, a server
//! that is not process 1.

#![no_main]

use jiffy_agent::{boot, modprobe, standalone, sys};
use jiffy_proto::agent::GVISOR;
use std::ffi::{CStr, c_char, c_int};

/// Entry point without Rust's runtime. The runtime aborts if descriptors 0 to 2 are closed and
/// `/dev/null` does not exist. Both apply when the kernel starts `/init` from an archive that
/// contains only this program.
///
/// # Safety
/// The C runtime must call this function once, with its argument vector.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    let began_us = sys::boot_us();
    // As Rust's runtime does: a write to a closed connection must not terminate the agent.
    // SAFETY: no other thread exists, and ignoring a signal has no preconditions.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    sys::tune_allocator();
    // SAFETY: the call takes no pointers.
    let is_first = unsafe { libc::getpid() } == 1;
    if is_first && argc <= 1 {
        return boot::microvm::run(began_us);
    }
    let mut arguments: Vec<String> = (0..usize::try_from(argc).unwrap_or(0))
        .map(|i| {
            // SAFETY: argv has argc zero-terminated strings.
            let argument = unsafe { CStr::from_ptr(*argv.add(i)) };
            argument.to_string_lossy().into_owned()
        })
        .collect();
    let called = arguments
        .drain(..arguments.len().min(1))
        .next()
        .unwrap_or_default();
    if called == modprobe::PATH {
        return modprobe::run(&arguments);
    }
    if is_first && arguments == [GVISOR] {
        return boot::gvisor::run(began_us);
    }
    standalone::run(&arguments)
}
