//! Certificate authorities and proxy of the site, that is, of the network in which the sandbox
//! runs.
//!
//! The *identity* of a sandbox consists of id, host name, entropy, clock and the settings of the
//! site. A guest receives it before its sandbox can be used.
//!
//! An identity replaces the installed settings by its own. An identity without settings only
//! removes the installed ones. An identity with the same settings only configures apt's proxy
//! again, which also depends on the environment of the sandbox. The settings are also removed
//! before the changes of the sandbox become a template.

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

/// Directory with the certificates and the keystore, in the agent's directory ([`HOME`]). The
/// environment variables of [`InstalledSite::variables`] contain the paths of these files.
const DIRECTORY: &str = "site";
/// Certificates of the site's authorities only, in the PEM format.
const AUTHORITIES: &str = "authorities.pem";
/// Keystore for Java with all authorities.
const JAVA_STORE: &str = "cacerts.jks";
/// Directory from which apt reads its settings. If a setting occurs in several files, the last file
/// applies. The path is relative to the root of the sandbox.
const APT: &str = "etc/apt/apt.conf.d";
/// File with the settings of the site in [`APT`].
const APT_FILE: &str = "90jiffy-site";
/// Program that apt runs to determine the proxy.
const APT_PROGRAM: &str = "etc/apt/jiffy-site-proxy";

/// Installed settings.
#[derive(Debug, Default)]
pub struct InstalledSite {
    /// Installed settings. Empty if none are installed.
    settings: SiteSettings,
    store: trust_store::StoreChanges,
    variables: BTreeMap<String, String>,
    /// Set if the settings file of apt was written.
    apt_configured: bool,
}

impl InstalledSite {
    /// Returns variables for processes. A variable that a process already has takes precedence.
    pub fn variables(&self) -> &BTreeMap<String, String> {
        &self.variables
    }

    /// Installs `settings` in place of the current settings, in the file system on `root`. `env` is
    /// the environment of the sandbox, which takes precedence.
    pub fn replace(
        &mut self,
        root: &Path,
        settings: SiteSettings,
        env: &BTreeMap<String, String>,
    ) -> io::Result<()> {
        if settings == self.settings {
            return self.configure_apt(root, env);
        }
        // This call also removes files of an earlier attempt that failed.
        self.withdraw(root);
        if settings.is_empty() {
            return Ok(());
        }
        // From here on, files may have to be removed.
        self.settings = settings;
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
            if java_keystore::is_java_installed(root, env)
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
            has_java: java_keystore::is_java_installed(root, env),
            proxy: self.settings.proxy.as_ref(),
        });
        Ok(())
    }

    /// Configures the proxy of apt. Programs started by `sudo` or `cron` do not have the sandbox's
    /// environment, and most of these programs are apt. A proxy in the environment of the sandbox
    /// takes precedence. A proxy in the environment of a single command also takes precedence: apt
    /// runs a program that checks for it.
    fn configure_apt(&mut self, root: &Path, env: &BTreeMap<String, String>) -> io::Result<()> {
        let path = root.join(APT).join(APT_FILE);
        let proxy = self.settings.proxy.as_ref();
        let proxy = proxy.filter(|_| !variables::names_proxy(env));
        match (proxy, self.apt_configured) {
            (Some(proxy), false) if root.join(APT).is_dir() => {
                // From here on, the file may have to be removed.
                self.apt_configured = true;
                let program = root.join(APT_PROGRAM);
                fs::write(&program, variables::apt_program(proxy))?;
                fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
                let program = Path::new("/").join(APT_PROGRAM);
                fs::write(path, variables::apt(proxy, &program))?;
            }
            (None, true) => {
                for path in [path, root.join(APT_PROGRAM)] {
                    match fs::remove_file(path) {
                        // The user has removed the file already.
                        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                        removed => removed?,
                    }
                }
                self.apt_configured = false;
            }
            _ => {}
        }
        Ok(())
    }

    /// Removes the installed settings. Files that cannot be removed are left.
    pub fn withdraw(&mut self, root: &Path) {
        // The settings are empty afterwards, so that a second call has no effect.
        let settings = std::mem::take(&mut self.settings);
        if settings.is_empty() {
            return;
        }
        self.variables.clear();
        trust_store::remove(root, &settings.authorities, std::mem::take(&mut self.store));
        if std::mem::take(&mut self.apt_configured) {
            // Ignore errors: programs of the sandbox may have removed the files.
            let _ = fs::remove_file(root.join(APT).join(APT_FILE));
            let _ = fs::remove_file(root.join(APT_PROGRAM));
        }
        let _ = fs::remove_dir_all(home(root).join(DIRECTORY));
    }
}

/// Returns the location of the agent's directory in the file system on `root`.
fn home(root: &Path) -> PathBuf {
    guest_path::beneath(root, Path::new(HOME))
}

#[cfg(test)]
mod tests;
