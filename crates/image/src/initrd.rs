//! Initial ramdisk of microVMs: a cpio archive with the guest agent as `/init`.

use crate::cpio::Archive;
use crate::erofs::WriteImageError;
use crate::file::{FileError, OnPath, create};
use crate::home::Home;
use crate::verified::{FileCheck, VerifiedFile, VerifyError, sum_of};
use jiffy_installation::{Component, Package};
use std::io::Write;

/// An initial ramdisk with the guest agent as `/init`.
#[derive(Clone, Copy, Debug)]
pub struct Initrd<'a> {
    agent: &'a [u8],
}

/// Error of the initial ramdisk.
#[derive(Debug, thiserror::Error)]
pub enum InitrdError {
    #[error(
        "the guest agent is not an ELF executable: {}",
        Package::current().remedy(Component::Host)
    )]
    NotAProgram,
    #[error("the guest agent has {size} bytes, but an initial ramdisk holds at most 4 GiB")]
    TooLarge { size: usize },
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("cannot create the initial ramdisk")]
    File(#[from] FileError),
    #[error("cannot create the image of the guest agent")]
    Image(#[from] WriteImageError),
}

/// Part of the name of cached ramdisks. It must be raised if the layout of the archive changes.
const LAYOUT_VERSION: u32 = 1;

impl<'a> Initrd<'a> {
    /// Creates a ramdisk for an agent binary, which must be static, since there are no libraries.
    pub fn new(agent: &'a [u8]) -> Result<Self, InitrdError> {
        if !agent.starts_with(b"\x7fELF") {
            return Err(InitrdError::NotAProgram);
        }
        // The size field of the format has 32 bits.
        if u32::try_from(agent.len()).is_err() {
            return Err(InitrdError::TooLarge { size: agent.len() });
        }
        Ok(Self { agent })
    }

    /// Builds the archive. It contains `/dev/console`, because the kernel opens this device before
    /// `/init` can mount a file system.
    pub fn archive(&self) -> Vec<u8> {
        let mut archive = Archive::default();
        // Mount points and directories that the agent uses.
        for name in ["dev", "proc", "sys", "run", "mnt"] {
            archive.directory(name, 0o755);
        }
        // The kernel passes `/dev/console` to `/init` as standard input, output and error.
        archive.character_device("dev/console", 0o600, (5, 1));
        archive.character_device("dev/null", 0o666, (1, 3));
        archive.file("init", 0o755, self.agent);
        archive.finish()
    }

    /// Opens the archive as a file. It is built once per agent binary.
    pub fn file(&self, home: &Home) -> Result<VerifiedFile, InitrdError> {
        let name = format!("{}-{LAYOUT_VERSION}.cpio", &sum_of(self.agent)[..12]);
        let path = home.initrd().join(&name);
        let check = FileCheck {
            what: "initial ramdisk",
            sha256: None,
            size: None,
            sparse: false,
            remedy: "remove it together with its .stamp file and run again",
        };
        check.open_or_make(&path, home, "initrd", || {
            create(&home.initrd(), &name, |file| {
                file.write_all(&self.archive()).on("write", &path)
            })?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skipped;
    use std::process::{Command, Stdio};

    #[test]
    fn cpio_reads_the_archive_back() {
        if Command::new("cpio").arg("--version").output().is_err() {
            skipped(
                "initrd::tests::cpio_reads_the_archive_back",
                "cpio is not installed",
            );
            return;
        }
        let agent = b"\x7fELF and the rest".as_slice();
        let mut command = Command::new("cpio");
        command
            .args(["-itv", "--quiet", "--numeric-uid-gid"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(&Initrd::new(agent).unwrap().archive())
            .unwrap();
        let listing = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        let line = |name: &str| {
            listing
                .lines()
                .find(|line| line.ends_with(&format!(" {name}")))
                .unwrap()
        };
        assert!(line("init").starts_with("-rwxr-xr-x"));
        // The length of `agent` in bytes.
        assert!(line("init").contains(" 17 "));
        assert!(line("dev/console").starts_with("crw-------"));
        assert!(line("dev/console").contains("5,   1"));
        assert!(line("proc").starts_with("drwxr-xr-x"));
        // Five directories, two devices and `init`.
        assert_eq!(listing.lines().count(), 8);
    }

    #[test]
    fn every_agent_has_its_own_cached_ramdisk() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path().join("home")).unwrap();
        let one = Initrd::new(b"\x7fELF one").unwrap();
        let file = one.file(&home).unwrap();
        assert_eq!(std::fs::read(&file.path).unwrap(), one.archive());
        assert_eq!(one.file(&home).unwrap().path, file.path);
        assert_ne!(
            Initrd::new(b"\x7fELF two")
                .unwrap()
                .file(&home)
                .unwrap()
                .path,
            file.path
        );
    }

    #[test]
    fn an_agent_that_is_not_an_elf_file_is_rejected() {
        assert!(matches!(
            Initrd::new(b"#!/bin/sh"),
            Err(InitrdError::NotAProgram)
        ));
    }
}
