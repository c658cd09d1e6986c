//! Configuration of the C library's allocator.

/// Makes the allocator obtain each large buffer from the kernel, which zeroes only the pages that
/// are touched. The sets of written disk blocks are large and nearly empty. By default, the
/// allocator reuses freed buffers and then zeroes them completely.
pub fn map_large_buffers() {
    const MMAP_THRESHOLD: libc::c_int = 128 << 10;
    // SAFETY: sets a parameter of the allocator. If the call fails, the default remains.
    let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD) };
}
