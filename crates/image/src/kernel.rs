//! Guest kernel and its modules. They are embedded in this program and unpacked into the data
//! directory on first use. The user can specify another kernel instead.

use crate::file::{FileError, OnPath, create};
use crate::home::Home;
use crate::verified::{FileCheck, VerifiedFile, VerifyError, hex, sum, sum_of};
use sha2::{Digest, Sha256};
use std::env;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

/// A guest kernel (an uncompressed ELF `vmlinux`) and the image with its modules.
#[derive(Clone, Debug)]
pub struct Kernel(KernelSource);

/// Origin of the kernel.
#[derive(Clone, Debug)]
enum KernelSource {
    /// Embedded in this program.
    BuiltIn { kernel: Packed, modules: Packed },
    /// Files that the user specified. They are used unchanged.
    Own {
        kernel: PathBuf,
        modules: Option<PathBuf>,
    },
}

/// Error of the guest kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("the {what} inside this program is damaged ({detail}): install or build Jiffy again")]
    Packed { what: &'static str, detail: String },
    #[error(
        "cannot use the kernel in JIFFY_KERNEL: correct the path, or unset the variable to use the built-in kernel"
    )]
    Own(#[source] FileError),
    #[error(
        "cannot use the modules in JIFFY_KERNEL_MODULES: correct the path, or unset the variable"
    )]
    OwnModules(#[source] FileError),
    #[error(
        "the kernel modules {sha256} that this snapshot was taken with are not in this data \
         directory: use the version of jiffy that took it, or create the sandbox again"
    )]
    NoSuchModules { sha256: String },
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("cannot unpack the kernel")]
    File(#[from] FileError),
}

// The build script of the kernel writes these files. They are part of the source tree.
static KERNEL: Package = Package {
    what: "kernel image",
    stem: "vmlinux",
    extension: "",
    compressed: include_bytes!("../../../kernel/vmlinux.zst"),
    sums: include_str!("../../../kernel/vmlinux.zst.sha256"),
};
static MODULES: Package = Package {
    what: "kernel modules image",
    stem: "modules",
    extension: ".erofs",
    compressed: include_bytes!("../../../kernel/modules.erofs.zst"),
    sums: include_str!("../../../kernel/modules.erofs.zst.sha256"),
};

/// An embedded file as the build wrote it: a zstd frame, and the text of a checksum file. The text
/// has `sha256sum` lines for `NAME.zst` and `NAME`; the second line is optional. [`Packed`] has the
/// parsed checksums.
#[derive(Debug)]
struct Package {
    /// Kind of file in messages.
    what: &'static str,
    /// File name without checksum and extension.
    stem: &'static str,
    /// File name extension, with its dot.
    extension: &'static str,
    /// Content of `NAME.zst`: the zstd frame.
    compressed: &'static [u8],
    /// Content of the file with the checksums.
    sums: &'static str,
}

/// A [`Package`] with the checksums that were parsed from its text, or computed.
#[derive(Clone, Debug)]
struct Packed {
    package: &'static Package,
    /// Checksum of the zstd frame, [`Package::compressed`].
    compressed: String,
    /// Checksum of the file that the zstd frame contains.
    plain: String,
}

impl Package {
    /// Parses the checksums. The checksum of the content is computed if it is missing.
    fn open(&'static self) -> Result<Packed, KernelError> {
        let name = format!("{}{}", self.stem, self.extension);
        let of = |name: &str| {
            let mut lines = self
                .sums
                .lines()
                .filter_map(|line| line.split_once(char::is_whitespace));
            // `sha256sum` marks binary mode by an asterisk in front of the name.
            let found = lines.find(|(_, file)| file.trim_start_matches([' ', '*']) == name);
            found
                .map(|(sum, _)| sum.to_owned())
                // 64 hexadecimal digits are a SHA-256.
                .filter(|sum| sum.len() == 64)
        };
        let damaged = |detail: String| KernelError::Packed {
            what: self.what,
            detail,
        };
        let packed = format!("{name}.zst");
        let compressed = of(&packed).ok_or_else(|| damaged(format!("no checksum of {packed}")))?;
        let plain = match of(&name) {
            Some(sum) => sum,
            None => {
                let plain =
                    zstd::decode_all(self.compressed).map_err(|e| damaged(e.to_string()))?;
                sum_of(&plain)
            }
        };
        Ok(Packed {
            package: self,
            compressed,
            plain,
        })
    }

    /// Returns the name of the file in the data directory. Returns `None` if `sha256` is not a
    /// checksum.
    fn file_name(&self, sha256: &str) -> Option<String> {
        let is_sum = sha256.len() == 64 && sha256.bytes().all(|b| b.is_ascii_hexdigit());
        let short = sha256.get(..12).filter(|_| is_sum)?;
        Some(format!("{}-{short}{}", self.stem, self.extension))
    }

    /// Returns the check of the unpacked file with this checksum.
    fn check<'a>(&self, sha256: &'a str) -> FileCheck<'a> {
        FileCheck {
            what: self.what,
            sha256: Some(sha256),
            size: None,
            sparse: false,
            remedy: "remove it and run again",
        }
    }
}

impl Packed {
    /// Opens the verified file. The first call unpacks it into `home`.
    fn open(&self, home: &Home) -> Result<VerifiedFile, KernelError> {
        let Package {
            what, compressed, ..
        } = *self.package;
        let damaged = |expected: &str, found: String| KernelError::Packed {
            what,
            detail: format!("expected sha256 {expected}, found {found}"),
        };
        // `plain` is a checksum, so the name is never empty.
        let name = self.package.file_name(&self.plain).unwrap_or_default();
        let path = home.kernel().join(&name);
        let check = self.package.check(&self.plain);
        check.open_or_make(&path, home, "kernel", || {
            // The frame is checked before the decoder reads it: a damaged program is reported as
            // such.
            let found = sum_of(compressed);
            if found != self.compressed {
                return Err(damaged(&self.compressed, found));
            }
            create(&home.kernel(), &name, |file| {
                let mut output = Hashing {
                    inner: file,
                    hasher: Sha256::new(),
                };
                // The checksum is computed while the file is written. An error removes the
                // unfinished file.
                zstd::stream::copy_decode(compressed, &mut output).on("write", &path)?;
                match hex(output.hasher) {
                    found if found == self.plain => Ok(()),
                    found => Err(damaged(&self.plain, found)),
                }
            })?;
            Ok(())
        })
    }
}

impl Kernel {
    /// Returns the kernel at `$JIFFY_KERNEL` with the modules at `$JIFFY_KERNEL_MODULES`. Defaults
    /// to the built-in kernel.
    pub fn choose() -> Result<Self, KernelError> {
        let path = |name| env::var_os(name).filter(|path| !path.is_empty());
        match path("JIFFY_KERNEL") {
            Some(kernel) => Ok(Self(KernelSource::Own {
                kernel: kernel.into(),
                modules: path("JIFFY_KERNEL_MODULES").map(PathBuf::from),
            })),
            None => Self::built_in(),
        }
    }

    /// Built-in kernel.
    pub fn built_in() -> Result<Self, KernelError> {
        Self::packed(&KERNEL, &MODULES)
    }

    fn packed(kernel: &'static Package, modules: &'static Package) -> Result<Self, KernelError> {
        Ok(Self(KernelSource::BuiltIn {
            kernel: kernel.open()?,
            modules: modules.open()?,
        }))
    }

    /// Opens the verified kernel. The first call unpacks it into `home`.
    pub fn open(&self, home: &Home) -> Result<VerifiedFile, KernelError> {
        match &self.0 {
            KernelSource::BuiltIn { kernel, .. } => kernel.open(home),
            KernelSource::Own { kernel, .. } => open_user_file(kernel).map_err(KernelError::Own),
        }
    }

    /// Opens the verified image with the modules. The first call unpacks the built-in modules into
    /// `home`. Returns `None` if the user specified a kernel without modules.
    pub fn modules(&self, home: &Home) -> Result<Option<VerifiedFile>, KernelError> {
        match &self.0 {
            KernelSource::BuiltIn { modules, .. } => modules.open(home).map(Some),
            KernelSource::Own { modules, .. } => {
                let opened = modules.as_ref().map(open_user_file).transpose();
                opened.map_err(KernelError::OwnModules)
            }
        }
    }

    /// Opens the modules that a snapshot requires. They belong to this kernel, or to an earlier
    /// kernel that was unpacked into this data directory.
    pub fn modules_named(&self, sha256: &str, home: &Home) -> Result<VerifiedFile, KernelError> {
        match &self.0 {
            KernelSource::BuiltIn { modules, .. } if modules.plain == sha256 => {
                // Unpacks the file if this data directory does not contain it yet.
                return modules.open(home);
            }
            KernelSource::Own { .. } => {
                if let Some(own) = self.modules(home)?.filter(|own| own.sha256 == sha256) {
                    return Ok(own);
                }
            }
            KernelSource::BuiltIn { .. } => {}
        }
        let missing = || KernelError::NoSuchModules {
            // The text may come from a damaged snapshot.
            sha256: sha256.chars().take(64).collect(),
        };
        let name = MODULES.file_name(sha256).ok_or_else(missing)?;
        // The file name contains 12 digits only, so `open` verifies the whole checksum.
        let path = home.kernel().join(name);
        MODULES.check(sha256).open(&path)?.ok_or_else(missing)
    }
}

/// Opens a kernel or an image with modules that the user specified. Computes the checksum, but does
/// not validate the content.
fn open_user_file(path: &PathBuf) -> Result<VerifiedFile, FileError> {
    let open = || {
        let file = File::open(path)?;
        Ok((sum(&file)?, file.metadata()?.len(), file))
    };
    let (sha256, size, file) = open().on("read", path)?;
    Ok(VerifiedFile {
        file,
        path: path.clone(),
        sha256,
        size,
    })
}

/// Writer that computes the checksum of all written bytes.
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

    /// Returns a kernel of some bytes. With `second_line`, its checksums also cover the unpacked
    /// file.
    fn small(second_line: bool) -> Kernel {
        let compressed = zstd::encode_all(&b"a kernel"[..], 1).unwrap().leak();
        let mut sums = format!("{}  vmlinux.zst\n", sum_of(compressed));
        if second_line {
            sums += &format!("{}  vmlinux\n", sum_of(b"a kernel"));
        }
        packed(compressed, sums)
    }

    /// Returns a kernel with this content and these checksums.
    fn packed(compressed: &'static [u8], sums: String) -> Kernel {
        let kernel = Package {
            compressed,
            sums: sums.leak(),
            ..KERNEL
        };
        Kernel::packed(Box::leak(Box::new(kernel)), &MODULES).unwrap()
    }

    #[test]
    fn the_built_in_kernel_matches_its_checksums_and_is_an_elf_file() {
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
    fn a_checksum_file_may_lack_the_second_line() {
        let (_dir, home) = home();
        assert_eq!(
            small(false).open(&home).unwrap().path,
            small(true).open(&home).unwrap().path
        );
    }

    #[test]
    fn a_corrupted_kernel_is_rejected_with_its_path() {
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
        let error = packed(compressed, sums).open(&home).unwrap_err();
        assert!(matches!(error, KernelError::Packed { .. }));
        assert_eq!(fs::read_dir(home.kernel()).unwrap().count(), 0);
    }

    #[test]
    fn concurrent_threads_share_one_unpacked_file() {
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
    fn a_missing_custom_kernel_is_named() {
        let (_dir, home) = home();
        let path = PathBuf::from("/nonexistent/vmlinux");
        let kernel = Kernel(KernelSource::Own {
            kernel: path,
            modules: None,
        });
        let error = kernel.open(&home).unwrap_err();
        assert!(error.to_string().contains("JIFFY_KERNEL"));
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "cannot read /nonexistent/vmlinux");
    }

    #[test]
    fn a_custom_kernel_uses_the_specified_modules() {
        let (_dir, home) = home();
        let own = |modules| {
            Kernel(KernelSource::Own {
                kernel: "/nonexistent/vmlinux".into(),
                modules,
            })
        };
        assert!(own(None).modules(&home).unwrap().is_none());
        let path = home.run().join("modules");
        fs::write(&path, "modules").unwrap();
        let kernel = own(Some(path));
        let sum = sum_of(b"modules");
        assert_eq!(kernel.modules(&home).unwrap().unwrap().sha256, sum);
        assert_eq!(kernel.modules_named(&sum, &home).unwrap().sha256, sum);
    }

    #[test]
    fn modules_of_an_earlier_kernel_are_found_by_their_checksum() {
        let (_dir, home) = home();
        let kernel = small(true);
        let sum = sum_of(b"earlier modules");
        for unknown in [sum.as_str(), "", "../../../etc/passwd", "é"] {
            let error = kernel.modules_named(unknown, &home).unwrap_err();
            assert!(matches!(error, KernelError::NoSuchModules { .. }));
        }
        let path = home.kernel().join(format!("modules-{}.erofs", &sum[..12]));
        fs::write(&path, "earlier modules").unwrap();
        assert_eq!(kernel.modules_named(&sum, &home).unwrap().path, path);
        fs::write(&path, "something else").unwrap();
        let error = kernel.modules_named(&sum, &home).unwrap_err();
        assert!(matches!(error, KernelError::Verify(_)), "{error}");
    }

    #[test]
    fn the_built_in_modules_are_an_erofs_image_and_found_by_their_checksum() {
        let (_dir, home) = home();
        let kernel = Kernel::built_in().unwrap();
        let modules = kernel.modules(&home).unwrap().unwrap();
        let mut magic = [0; 4];
        modules.file.read_exact_at(&mut magic, 1024).unwrap();
        assert_eq!(u32::from_le_bytes(magic), 0xE0F5_E1E2);
        let again = kernel.modules_named(&modules.sha256, &home).unwrap();
        assert_eq!(again.path, modules.path);
    }
}
