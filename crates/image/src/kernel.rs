//! The guest kernel.

use crate::file::{FileError, OnPath, create};
use crate::home::Home;
use crate::verified::{Check, VerifiedFile, VerifyError, hex, sum, sum_of};
use sha2::{Digest, Sha256};
use std::env;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

/// A guest kernel (an uncompressed ELF `vmlinux`).
#[derive(Clone, Debug)]
pub struct Kernel(Source);

#[derive(Clone, Debug)]
enum Source {
    /// A zstd frame in memory, and what it holds.
    Packed {
        compressed: &'static [u8],
        sums: Sums,
    },
    /// The user's own file, taken as it is.
    Own(PathBuf),
}

/// Why there is no kernel to boot.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("the kernel inside this program is damaged ({detail}): install or build Jiffy again")]
    Packed { detail: String },
    #[error(
        "the kernel named by JIFFY_KERNEL is unusable: correct the path, or unset it to use the built-in kernel"
    )]
    Own(#[source] FileError),
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("cannot unpack the kernel")]
    File(#[from] FileError),
}

const COMPRESSED: &[u8] = include_bytes!("../../../kernel/vmlinux.zst");
const SUMS: &str = include_str!("../../../kernel/vmlinux.zst.sha256");

#[derive(Clone, Debug)]
struct Sums {
    compressed: String,
    vmlinux: String,
}

impl Sums {
    /// Reads `sha256sum` lines for `vmlinux.zst` and `vmlinux`; the latter is computed if it is missing.
    fn parse(text: &str, compressed: &[u8]) -> Result<Self, KernelError> {
        let of = |name: &str| {
            let mut lines = text
                .lines()
                .filter_map(|line| line.split_once(char::is_whitespace));
            let found = lines.find(|(_, file)| file.trim_start_matches([' ', '*']) == name);
            found
                .map(|(sum, _)| sum.to_owned())
                .filter(|sum| sum.len() == 64)
        };
        let damaged = |detail: String| KernelError::Packed { detail };
        let packed =
            of("vmlinux.zst").ok_or_else(|| damaged("no checksum of vmlinux.zst".to_owned()))?;
        let vmlinux = match of("vmlinux") {
            Some(sum) => sum,
            None => {
                let plain = zstd::decode_all(compressed).map_err(|e| damaged(e.to_string()))?;
                sum_of(&plain)
            }
        };
        Ok(Self {
            compressed: packed,
            vmlinux,
        })
    }
}

impl Kernel {
    /// The kernel at `$JIFFY_KERNEL` if set, else the built-in one.
    pub fn choose() -> Result<Self, KernelError> {
        match env::var_os("JIFFY_KERNEL").filter(|path| !path.is_empty()) {
            Some(path) => Ok(Self(Source::Own(path.into()))),
            None => Self::built_in(),
        }
    }

    /// The kernel this program was built with.
    pub fn built_in() -> Result<Self, KernelError> {
        Self::packed(COMPRESSED, SUMS)
    }

    fn packed(compressed: &'static [u8], sums: &str) -> Result<Self, KernelError> {
        let sums = Sums::parse(sums, compressed)?;
        Ok(Self(Source::Packed { compressed, sums }))
    }

    /// Opens the kernel, unpacked and verified; unpacks it into `home` if that has not happened yet.
    pub fn open(&self, home: &Home) -> Result<VerifiedFile, KernelError> {
        let (compressed, sums) = match &self.0 {
            Source::Packed { compressed, sums } => (*compressed, sums),
            Source::Own(path) => return own(path),
        };
        let path = home
            .kernel()
            .join(format!("vmlinux-{}", &sums.vmlinux[..12]));
        let check = Check {
            what: "kernel image",
            sha256: Some(&sums.vmlinux),
            size: None,
            sparse: false,
            remedy: "remove it and run again",
        };
        check.open_or_make(&path, home, "kernel", || {
            let found = sum_of(compressed);
            if found != sums.compressed {
                let detail = format!("expected sha256 {}, found {found}", sums.compressed);
                return Err(KernelError::Packed { detail });
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            create(&home.kernel(), &name, |file| {
                let mut output = Hashing {
                    inner: file,
                    hasher: Sha256::new(),
                };
                zstd::stream::copy_decode(compressed, &mut output).on("write", &path)?;
                match hex(output.hasher) {
                    found if found == sums.vmlinux => Ok(()),
                    found => Err(KernelError::Packed {
                        detail: format!("expected sha256 {}, found {found}", sums.vmlinux),
                    }),
                }
            })?;
            Ok(())
        })
    }
}

/// The user's kernel is their responsibility: it is opened and identified, not judged.
fn own(path: &PathBuf) -> Result<VerifiedFile, KernelError> {
    let open = || {
        let file = File::open(path)?;
        Ok((sum(&file)?, file.metadata()?.len(), file))
    };
    let (sha256, size, file) = open().on("read", path).map_err(KernelError::Own)?;
    Ok(VerifiedFile {
        file,
        path: path.clone(),
        sha256,
        size,
    })
}

struct Hashing<W> {
    inner: W,
    hasher: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::{FileExt, MetadataExt};

    fn home() -> (tempfile::TempDir, Home) {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path().join("home")).unwrap();
        (dir, home)
    }

    fn small(second_line: bool) -> Kernel {
        let compressed = zstd::encode_all(&b"a kernel"[..], 1).unwrap().leak();
        let mut sums = format!("{}  vmlinux.zst\n", sum_of(compressed));
        if second_line {
            sums += &format!("{}  vmlinux\n", sum_of(b"a kernel"));
        }
        Kernel::packed(compressed, &sums).unwrap()
    }

    #[test]
    fn the_built_in_kernel_is_what_its_checksums_say_and_an_elf_file() {
        let (_dir, home) = home();
        let mut kernel = Kernel::built_in().unwrap().open(&home).unwrap();
        let mut magic = [0; 4];
        kernel.file.read_exact(&mut magic).unwrap();
        assert_eq!(&magic, b"\x7fELF");
        let again = Kernel::built_in().unwrap().open(&home).unwrap();
        assert_eq!(
            again.file.metadata().unwrap().ino(),
            kernel.file.metadata().unwrap().ino()
        );
    }

    #[test]
    fn a_checksum_file_without_the_second_line_will_do() {
        let (_dir, home) = home();
        assert_eq!(
            small(false).open(&home).unwrap().path,
            small(true).open(&home).unwrap().path
        );
    }

    #[test]
    fn a_corrupted_kernel_is_refused_by_name() {
        let (_dir, home) = home();
        let kernel = small(true);
        let path = kernel.open(&home).unwrap().path;
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(b"A", 0)
            .unwrap();
        let message = kernel.open(&home).unwrap_err().to_string();
        let expected = format!(
            "kernel image {} is corrupted: expected sha256 {}",
            path.display(),
            sum_of(b"a kernel")
        );
        assert!(message.starts_with(&expected), "{message}");
        fs::remove_file(&path).unwrap();
        kernel.open(&home).unwrap();
    }

    #[test]
    fn damaged_packed_bytes_never_reach_the_disk() {
        let (_dir, home) = home();
        let compressed = zstd::encode_all(&b"another"[..], 1).unwrap().leak();
        let sums = format!(
            "{}  vmlinux.zst\n{}  vmlinux\n",
            sum_of(compressed),
            sum_of(b"a kernel")
        );
        let error = Kernel::packed(compressed, &sums)
            .unwrap()
            .open(&home)
            .unwrap_err();
        assert!(matches!(error, KernelError::Packed { .. }));
        assert_eq!(fs::read_dir(home.kernel()).unwrap().count(), 0);
    }

    #[test]
    fn threads_that_come_at_once_share_one_unpacked_file() {
        let (_dir, home) = home();
        let inodes: Vec<u64> = std::thread::scope(|scope| {
            let open = || {
                small(true)
                    .open(&home)
                    .unwrap()
                    .file
                    .metadata()
                    .unwrap()
                    .ino()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(inodes.iter().all(|inode| *inode == inodes[0]));
    }

    #[test]
    fn a_missing_kernel_of_ones_own_is_named() {
        let error = own(&PathBuf::from("/nonexistent/vmlinux")).unwrap_err();
        assert!(error.to_string().contains("JIFFY_KERNEL"));
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "cannot read /nonexistent/vmlinux");
    }
}
