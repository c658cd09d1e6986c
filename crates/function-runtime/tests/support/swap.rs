//! Swap space for a test: a dedicated compressed memory device (zram) if the kernel supports it,
//! otherwise a file.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Size of the swap space.
const SWAP_BYTES: u64 = 64 << 20;
/// Directory with the files that add and remove devices of compressed memory.
const ZRAM_CONTROL: &str = "/sys/class/zram-control";
/// `SWAP_FLAG_PREFER` with the highest priority, so that the kernel prefers this swap space.
const FLAGS: libc::c_int = 0x8000 | 0x7fff;
/// Timeout for other programs to close a new device that they probe.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Swap space in use until this value is dropped.
pub struct Swap {
    path: CString,
    _device: Option<Zram>,
    _directory: Option<tempfile::TempDir>,
}

impl Swap {
    /// Fails without root, and on file systems without support for swap files.
    pub fn on() -> io::Result<Self> {
        if let Ok(device) = Zram::new()
            && let Ok(path) = enable_swap(&device.path())
        {
            return Ok(Self {
                path,
                _device: Some(device),
                _directory: None,
            });
        }
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("swap");
        // A swap file must have no holes.
        fs::write(&file, vec![0; usize::try_from(SWAP_BYTES).unwrap()])?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
        Ok(Self {
            path: enable_swap(&file)?,
            _device: None,
            _directory: Some(directory),
        })
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: the path is terminated by zero.
        let off = unsafe { libc::swapoff(self.path.as_ptr()) };
        assert_eq!(off, 0, "{}", io::Error::last_os_error());
    }
}

fn enable_swap(path: &Path) -> io::Result<CString> {
    let created = Command::new("/usr/sbin/mkswap").arg(path).output()?;
    if !created.status.success() {
        let said = String::from_utf8_lossy(&created.stderr).into_owned();
        return Err(io::Error::other(said));
    }
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is terminated by zero.
    match unsafe { libc::swapon(path.as_ptr(), FLAGS) } {
        0 => Ok(path),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Device created for the test. Other devices are unchanged.
struct Zram(u32);

impl Zram {
    fn new() -> io::Result<Self> {
        let number = fs::read_to_string(format!("{ZRAM_CONTROL}/hot_add"))?;
        let device = Self(number.trim().parse().map_err(io::Error::other)?);
        fs::write(device.attribute("disksize"), SWAP_BYTES.to_string())?;
        Ok(device)
    }

    fn path(&self) -> PathBuf {
        format!("/dev/zram{}", self.0).into()
    }

    fn attribute(&self, name: &str) -> String {
        format!("/sys/block/zram{}/{name}", self.0)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let start = Instant::now();
        let removed = || {
            fs::write(self.attribute("reset"), "1")?;
            fs::write(format!("{ZRAM_CONTROL}/hot_remove"), self.0.to_string())
        };
        while let Err(error) = removed() {
            assert!(start.elapsed() < RELEASE_TIMEOUT, "{error}");
            std::thread::yield_now();
        }
    }
}
