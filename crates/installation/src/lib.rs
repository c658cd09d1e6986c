//! Locates the files that are installed with the running program, and the package that they belong
//! to.
//!
//! ```text
//! <prefix>/bin/jiffy
//! <prefix>/lib/jiffy/jiffy-vmm, jiffy-functions, jiffy-agent, jiffy-gvisor
//! <prefix>/lib/jiffy/package            kind of the package: `deb`, `wheel`, ...
//! <prefix>/lib/jiffy/templates.sha256   checksums of the template files of this version
//! <prefix>/share/jiffy/templates/<name>.tpl
//! ```
//!
//! In a build directory all programs are in one directory, and the other files of this list do not
//! exist.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Maximum number of bytes that are read from the file `package`.
const MAX_PACKAGE_BYTES: u64 = 64;

/// Directories of one installation, usually of the installation that the running program belongs
/// to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    /// Directory that contains `jiffy`.
    programs: PathBuf,
}

/// Package that an installation belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Package {
    /// No package: a build directory, or `make install`.
    Source,
    /// Debian package.
    Deb,
    /// Python wheel.
    Wheel,
    /// Archive that `install.sh` unpacked.
    Tarball,
    /// npm package.
    Npm,
    /// Container image.
    Oci,
}

/// Part of an installation that packages may omit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// `jiffy`, `jiffy-vmm`, `jiffy-functions` and `jiffy-agent`.
    Host,
    /// `jiffy-gvisor`.
    Gvisor,
}

impl Installation {
    /// Returns the installation of the running program.
    pub fn current() -> io::Result<Self> {
        // The kernel returns the path without symbolic links, so that a link in another directory
        // finds the same installation.
        let executable = env::current_exe()?;
        let programs = executable.parent().unwrap_or(Path::new("/"));
        Ok(Self::at(programs))
    }

    /// Returns the installation whose `jiffy` is in the directory `programs`.
    pub fn at(programs: &Path) -> Self {
        Self {
            programs: programs.to_owned(),
        }
    }

    /// Returns the directory that contains `jiffy`.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Returns the path of `jiffy`, which is the running program except in the instruments of
    /// `bench/`.
    pub fn jiffy(&self) -> PathBuf {
        self.programs.join("jiffy")
    }

    /// Returns the path of another program or of a file in its directory. `None` if the file does
    /// not exist.
    pub fn file(&self, name: &str) -> Option<PathBuf> {
        // In a build, test executables are in `deps/` below the directory of the programs, so the
        // parent directory is searched as well.
        let library = self.library();
        let directories = [&*self.programs, &*library, self.prefix()];
        let mut paths = directories.into_iter().map(|d| d.join(name));
        // A directory may have the name of a program.
        paths.find(|path| path.is_file())
    }

    /// Returns the directory of the template files.
    pub fn templates(&self) -> PathBuf {
        self.prefix().join("share/jiffy/templates")
    }

    /// Returns the file with the checksums of the template files of this version.
    pub fn template_checksums(&self) -> PathBuf {
        self.library().join("templates.sha256")
    }

    /// Returns the package that the installation belongs to.
    pub fn package(&self) -> Package {
        let mut name = String::new();
        let file = File::open(self.library().join("package"));
        // A missing or unreadable file means that no package manager installed the program.
        let result = file.and_then(|file| file.take(MAX_PACKAGE_BYTES).read_to_string(&mut name));
        match (result, name.trim()) {
            (Ok(_), "deb") => Package::Deb,
            (Ok(_), "wheel") => Package::Wheel,
            (Ok(_), "tarball") => Package::Tarball,
            (Ok(_), "npm") => Package::Npm,
            (Ok(_), "oci") => Package::Oci,
            _ => Package::Source,
        }
    }

    fn library(&self) -> PathBuf {
        self.prefix().join("lib/jiffy")
    }

    fn prefix(&self) -> &Path {
        self.programs.parent().unwrap_or(&self.programs)
    }
}

impl Package {
    /// Returns the package of the running program.
    pub fn current() -> Self {
        Installation::current().map_or(Self::Source, |installation| installation.package())
    }

    /// Returns the command that installs a missing or damaged component.
    pub fn remedy(self, component: Component) -> &'static str {
        match (self, component) {
            // If there is no package, all components are built together.
            (Self::Source, _) => "run `make build`",
            (Self::Deb, Component::Host) => "run `apt-get install --reinstall jiffy`",
            (Self::Deb, Component::Gvisor) => "run `apt-get install jiffy-gvisor`",
            (Self::Wheel, Component::Host) => {
                "run `pip install --force-reinstall jiffy-sandbox-host`"
            }
            (Self::Wheel, Component::Gvisor) => "run `pip install jiffy-sandbox-gvisor`",
            (Self::Tarball, _) => "run the `install.sh` of this version again",
            (Self::Npm, _) => "run `npm install @jiffy/host-linux-x64`",
            (Self::Oci, _) => "pull the container image again",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn an_installation_finds_its_programs_and_its_package() {
        let prefix = tempfile::tempdir().unwrap();
        let (bin, lib) = (prefix.path().join("bin"), prefix.path().join("lib/jiffy"));
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(lib.join("jiffy-gvisor")).unwrap();
        fs::write(lib.join("jiffy-vmm"), "").unwrap();
        let installation = Installation::at(&bin);
        let vmm = installation.file("jiffy-vmm").unwrap();
        assert_eq!(vmm.canonicalize().unwrap(), lib.join("jiffy-vmm"));
        assert_eq!(installation.file("jiffy-gvisor"), None, "a directory");
        assert_eq!(installation.package(), Package::Source);
        for (text, package) in [
            ("deb\n", Package::Deb),
            ("wheel", Package::Wheel),
            ("rpm\n", Package::Source),
            ("\u{0}\n", Package::Source),
        ] {
            fs::write(lib.join("package"), text).unwrap();
            assert_eq!(installation.package(), package, "{text:?}");
        }
    }

    #[test]
    fn the_remedy_is_the_command_of_the_package_manager() {
        let packages = [
            (Package::Deb, "apt-get"),
            (Package::Wheel, "pip"),
            (Package::Tarball, "install.sh"),
            (Package::Npm, "npm"),
            (Package::Oci, "image"),
        ];
        for (package, tool) in packages {
            for component in [Component::Host, Component::Gvisor] {
                let remedy = package.remedy(component);
                assert!(
                    remedy.contains(tool) && !remedy.contains("make"),
                    "{remedy}"
                );
            }
        }
        assert!(
            Package::Deb
                .remedy(Component::Gvisor)
                .contains("jiffy-gvisor")
        );
        assert!(
            Package::Wheel
                .remedy(Component::Gvisor)
                .contains("jiffy-sandbox-gvisor")
        );
    }
}
