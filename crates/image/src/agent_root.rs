//! Root image of the guest agent, for engines that boot without an initial ramdisk. The image
//! contains the agent and mount points.

use crate::erofs::{ImageRoot, write};
use crate::file::{OnPath, create};
use crate::home::Home;
use crate::initrd::InitrdError;
use crate::template_model::MAX_IMAGES;
use crate::verified::{FileCheck, VerifiedFile, sum_of};
use jiffy_installation::Installation;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// An image with the guest agent as `/jiffy-agent`.
#[derive(Clone, Copy, Debug)]
pub struct AgentRoot<'a> {
    agent: &'a [u8],
}

/// Part of the name of cached images. It must be raised if the layout of the image changes.
const LAYOUT_VERSION: u32 = 2;
/// Fixed UUID, so that images differ by their content only.
const UUID: &str = "00000000-0000-4000-8000-000000000000";
/// Fixed time of images: 2025-01-01.
const EPOCH: u64 = 1_735_689_600;

impl<'a> AgentRoot<'a> {
    /// Creates an image for an agent binary, which must be static, since there are no libraries.
    pub fn new(agent: &'a [u8]) -> Result<Self, InitrdError> {
        if agent.starts_with(b"\x7fELF") {
            Ok(Self { agent })
        } else {
            Err(InitrdError::NotAProgram)
        }
    }

    /// Creates the content of the image: mount points and the agent.
    fn fill(&self, root: &Path) -> Result<(), InitrdError> {
        let places = ["dev", "newroot", "overlay", "proc", "sys", "tmp"];
        // The agent uses `below` as the lowest layer of every root, and mounts storage for
        // container engines on these directories. The image of the kernel's modules contains the
        // same directories for microVMs.
        let below = ["docker", "containerd", "containers"].map(|n| format!("below/var/lib/{n}"));
        let images = (0..MAX_IMAGES).map(|n| format!("images/{n}"));
        for place in places
            .map(str::to_owned)
            .into_iter()
            .chain(images)
            .chain(below)
        {
            let place = root.join(place);
            fs::create_dir_all(&place).on("create", &place)?;
        }
        let agent = root.join("jiffy-agent");
        fs::write(&agent, self.agent).on("write", &agent)?;
        fs::set_permissions(&agent, Permissions::from_mode(0o755)).on("write", &agent)?;
        Ok(())
    }

    /// File name of the image of this agent, in the data directory and in packages.
    fn name(&self) -> String {
        format!("agent-{}-{LAYOUT_VERSION}.erofs", &sum_of(self.agent)[..12])
    }

    /// Writes the image into `directory` under its name. The same agent gives the same bytes.
    /// Requires `mkfs.erofs`.
    pub fn write(&self, directory: &Path) -> Result<PathBuf, InitrdError> {
        let name = self.name();
        let (path, work) = (
            directory.join(&name),
            directory.join(format!(".new-{name}")),
        );
        let (root, image) = (work.join("root"), work.join("image"));
        // Ignore the error: usually there is no directory of an interrupted attempt.
        let _ = fs::remove_dir_all(&work);
        // Times are set after all files exist, since creating a file changes its directory.
        let result = self.fill(&root).and_then(|()| {
            set_times(&root).on("set the times of", &root)?;
            write(&ImageRoot::Directory(root), &image, UUID, EPOCH, None)?;
            fs::rename(&image, &path).on("rename", &image)?;
            Ok(())
        });
        // Ignore the error: the next attempt removes the directory.
        let _ = fs::remove_dir_all(&work);
        result.map(|()| path)
    }

    /// Copies the image from the installed package, so that hosts do not need `mkfs.erofs`. Returns
    /// false if the package has no image of this agent.
    fn copy_of_package(&self, home: &Home) -> Result<bool, InitrdError> {
        let name = self.name();
        let installation = Installation::current().ok();
        let Some(packaged) = installation.and_then(|i| i.file(&name)) else {
            return Ok(false);
        };
        let mut source = File::open(&packaged).on("open", &packaged)?;
        create::<InitrdError>(&home.initrd(), &name, |file| {
            io::copy(&mut source, file).on("copy", &packaged)?;
            Ok(())
        })?;
        Ok(true)
    }

    /// Opens the image. It is copied from the installed package or built, once per agent binary.
    pub fn file(&self, home: &Home) -> Result<VerifiedFile, InitrdError> {
        let path = home.initrd().join(self.name());
        let check = FileCheck {
            what: "image of the guest agent",
            sha256: None,
            size: None,
            sparse: false,
            remedy: "remove it together with its .stamp file and run again",
        };
        check.open_or_make(&path, home, "initrd", || {
            if self.copy_of_package(home)? {
                Ok(())
            } else {
                self.write(&home.initrd()).map(drop)
            }
        })
    }
}

/// Sets the times of a tree to [`EPOCH`], so that the image depends on the agent only.
fn set_times(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            set_times(&entry?.path())?;
        }
    }
    File::open(path)?.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_image_is_built_once() {
        let place = tempfile::tempdir().unwrap();
        let home = Home::at(place.path()).unwrap();
        let agent = b"\x7fELF and more";
        let root = AgentRoot::new(agent).unwrap();
        let first = root.file(&home).unwrap();
        assert_eq!(root.file(&home).unwrap().sha256, first.sha256);
        let images: Vec<_> = fs::read_dir(place.path().join("initrd")).unwrap().collect();
        // The image and its stamp file.
        assert_eq!(images.len(), 2, "{images:?}");
        assert!(AgentRoot::new(b"#!/bin/sh").is_err());
        // A later build gives the same bytes, as required for reproducible packages.
        let again = root.write(place.path()).unwrap();
        assert_eq!(fs::read(again).unwrap(), fs::read(first.path).unwrap());
    }
}
