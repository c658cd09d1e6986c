//! The `jiffy-agent` command: pid 1 of a guest, its `modprobe`, or a plain server for tests and
//! other engines.

#![no_main]

use jiffy_agent::{boot, modprobe, standalone, sys};
use jiffy_proto::agent::GVISOR;
use std::ffi::{CStr, c_char, c_int};

/// Entry point without Rust's runtime, which gives up when descriptors 0 to 2 are closed and there
/// is no `/dev/null`: both are so when the kernel starts `/init` from an archive that holds nothing
/// else.
///
/// # Safety
/// Called once by the C runtime with its argument vector.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    let began_us = sys::boot_us();
    // SAFETY: no other thread exists; ignoring a signal has no preconditions.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    sys::tune_allocator();
    // SAFETY: no pointers.
    let is_first = unsafe { libc::getpid() } == 1;
    if is_first && argc <= 1 {
        return boot::microvm::run(began_us);
    }
    let mut arguments: Vec<String> = (0..usize::try_from(argc).unwrap_or(0))
        .map(|i| {
            // SAFETY: argv has argc valid C strings.
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
