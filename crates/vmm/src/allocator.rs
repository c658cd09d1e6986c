//! Setting of the C library's allocator.

/// Has each large buffer come from the kernel, which zeroes only the pages of it that are touched.
/// Sets of units of disks are large and nearly empty; by default the allocator keeps such buffers
/// once they were freed, and zeroes all of one that is used again.
pub fn keep_large_buffers_apart() {
    const MMAP_THRESHOLD: libc::c_int = 128 << 10;
    // SAFETY: sets a parameter of the allocator; refused, the default stays.
    let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD) };
}
