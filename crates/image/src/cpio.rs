//! Writer of cpio archives in the "newc" format, which the kernel unpacks as initial ramdisk
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

/// Type bits of a mode.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER: u32 = 0o020_000;

/// Builder of a cpio archive. Entries belong to root and have a fixed time, so equal content gives
/// equal bytes.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    pub(crate) fn directory(&mut self, name: &str, mode: u32) {
        self.entry(name, DIRECTORY | mode, (0, 0), &[]);
    }

    pub(crate) fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, REGULAR | mode, (0, 0), content);
    }

    pub(crate) fn character_device(&mut self, name: &str, mode: u32, major_minor: (u32, u32)) {
        self.entry(name, CHARACTER | mode, major_minor, &[]);
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    /// Appends an entry in the format `newc`. `major` and `minor` are the numbers of a device,
    /// otherwise 0.
    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        // The number of the entry serves as inode number: equal numbers would mean hard links.
        self.entries += 1;
        self.bytes.extend_from_slice(b"070701");
        let links = if mode & DIRECTORY != 0 { 2 } else { 1 };
        // The size of the name includes its terminating zero byte.
        let name_size = name.len() + 1;
        // Fields of the header, in this order: inode, mode, uid, gid, links, mtime, size, device
        // (2), special device (2), name size, checksum (unused).
        let before_size = [self.entries, mode, 0, 0, links, 0];
        let before = before_size.iter().map(|field| format!("{field:08x}"));
        let size = std::iter::once(format!("{:08x}", content.len()));
        let after = [0, 0, major, minor].map(|field| format!("{field:08x}"));
        let name_size = [format!("{name_size:08x}"), format!("{:08x}", 0)];
        for field in before.chain(size).chain(after).chain(name_size) {
            self.bytes.extend_from_slice(field.as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        // Name and content are each padded to a multiple of four bytes.
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
