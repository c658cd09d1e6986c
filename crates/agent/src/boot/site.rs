//! Certificate authorities and proxy of the network that the sandbox is in.
//!
//! They are installed in the sandbox with its identity, and are removed again when an identity has
//! others, and before the sandbox's changes become a template. Nothing is done without them, nor
//! for the same ones again, as after a restore.

mod guest_path;
mod java_keystore;
mod trust_store;
mod variables;

use super::generation::HOME;
use jiffy_proto::agent::SiteSettings;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
pub use variables::add_missing;

/// Directory of the files to which programs' settings refer.
const DIRECTORY: &str = "site";
const AUTHORITIES: &str = "authorities.pem";
const JAVA_STORE: &str = "cacerts.jks";
/// Directory from which apt reads its settings; the last of equal ones wins.
const APT: &str = "etc/apt/apt.conf.d";
const APT_FILE: &str = "90jiffy-site";
/// Program that apt asks for the proxy.
const APT_PROGRAM: &str = "etc/apt/jiffy-site-proxy";

/// The settings in force.
#[derive(Debug, Default)]
pub struct InstalledSite {
    settings: SiteSettings,
    store: trust_store::StoreChanges,
    variables: BTreeMap<String, String>,
    /// The settings file of apt was written.
    apt_configured: bool,
}

impl InstalledSite {
    /// Variables for processes that have none of their own by these names.
    pub fn variables(&self) -> &BTreeMap<String, String> {
        &self.variables
    }

    /// Installs `wanted` instead of the settings in force, in the file system on `root`. `env` is
    /// the sandbox's own environment, which takes precedence.
    pub fn replace(
        &mut self,
        root: &Path,
        wanted: SiteSettings,
        env: &BTreeMap<String, String>,
    ) -> io::Result<()> {
        if wanted == self.settings {
            return self.configure_apt(root, env);
        }
        self.withdraw(root);
        if wanted.is_empty() {
            return Ok(());
        }
        // From here on there may be changes to remove.
        self.settings = wanted;
        let directory = home(root).join(DIRECTORY);
        fs::create_dir_all(&directory)?;
        let mut bundle = None;
        let mut java = None;
        if !self.settings.authorities.is_empty() {
            let pem: String = self.settings.authorities.iter().map(|a| &*a.pem).collect();
            fs::write(directory.join(AUTHORITIES), &pem)?;
            bundle = Some(trust_store::add(
                root,
                &self.settings.authorities,
                &mut self.store,
            )?);
            if java_keystore::is_there(root, env)
                && let Some(bundle) = &bundle
            {
                let store = java_keystore::Keystore::from_pem(&fs::read(guest_path::beneath(
                    root, bundle,
                ))?);
                fs::write(directory.join(JAVA_STORE), store.encode())?;
                java = Some(PathBuf::from(HOME).join(DIRECTORY).join(JAVA_STORE));
            }
        }
        self.configure_apt(root, env)?;
        self.variables = variables::of(&variables::VariableSources {
            bundle: bundle.as_deref(),
            authorities: &Path::new(HOME).join(DIRECTORY).join(AUTHORITIES),
            java_store: java.as_deref(),
            has_java: java_keystore::is_there(root, env),
            proxy: self.settings.proxy.as_ref(),
        });
        Ok(())
    }

    /// Tells apt of the proxy: programs started by `sudo` or `cron` lack the sandbox's environment,
    /// and apt is mostly one. Where the environment names a proxy of its own, that one counts; so
    /// does that of a single command, since apt is told of a program that looks for it.
    fn configure_apt(&mut self, root: &Path, env: &BTreeMap<String, String>) -> io::Result<()> {
        let path = root.join(APT).join(APT_FILE);
        let proxy = self.settings.proxy.as_ref();
        let proxy = proxy.filter(|_| !variables::names_proxy(env));
        match (proxy, self.apt_configured) {
            (Some(proxy), false) if root.join(APT).is_dir() => {
                // From here on there may be something to take out again.
                self.apt_configured = true;
                let program = root.join(APT_PROGRAM);
                fs::write(&program, variables::apt_program(proxy))?;
                fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
                let program = Path::new("/").join(APT_PROGRAM);
                fs::write(path, variables::apt(proxy, &program))?;
            }
            (None, true) => {
                fs::remove_file(path)?;
                fs::remove_file(root.join(APT_PROGRAM))?;
                self.apt_configured = false;
            }
            _ => {}
        }
        Ok(())
    }

    /// Removes what was installed. Files that cannot be removed stay.
    pub fn withdraw(&mut self, root: &Path) {
        let settings = std::mem::take(&mut self.settings);
        if settings.is_empty() {
            return;
        }
        self.variables.clear();
        trust_store::remove(root, &settings.authorities, std::mem::take(&mut self.store));
        if std::mem::take(&mut self.apt_configured) {
            let _ = fs::remove_file(root.join(APT).join(APT_FILE));
            let _ = fs::remove_file(root.join(APT_PROGRAM));
        }
        let _ = fs::remove_dir_all(home(root).join(DIRECTORY));
    }
}

fn home(root: &Path) -> PathBuf {
    guest_path::beneath(root, Path::new(HOME))
}

#[cfg(test)]
mod tests;
