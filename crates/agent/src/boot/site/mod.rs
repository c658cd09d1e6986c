//! Certificate authorities and proxy of the network that the sandbox is in.
//!
//! They are put into the sandbox when it is told who it is, and can be taken out again: when it is
//! told others, and before what it changed becomes a template. Nothing is done where nothing is told,
//! nor where the same is told again, as after a restore.

mod java;
mod store;
mod variables;

use super::generation::HOME;
use jiffy_proto::agent::SiteSettings;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
pub use variables::add_missing;

/// Directory for what programs of the sandbox are pointed at.
const DIRECTORY: &str = "site";
const AUTHORITIES: &str = "authorities.pem";
const JAVA_STORE: &str = "cacerts.jks";
/// Of this apt reads its settings, the last of equal ones counts.
const APT: &str = "etc/apt/apt.conf.d";
const APT_FILE: &str = "90jiffy-site";
/// Program that apt asks for the proxy.
const APT_PROGRAM: &str = "etc/apt/jiffy-site-proxy";

/// The settings in force.
#[derive(Debug, Default)]
pub struct Site {
    settings: SiteSettings,
    store: store::Trace,
    variables: BTreeMap<String, String>,
    /// Whether the file that apt reads is there.
    apt_knows: bool,
}

impl Site {
    /// Variables for processes that have none of their own by these names.
    pub fn variables(&self) -> &BTreeMap<String, String> {
        &self.variables
    }

    /// Puts `wanted` in the place of what was there, in the file system on `root`. `env` is the
    /// sandbox's own environment, which is not overruled.
    pub fn replace(
        &mut self,
        root: &Path,
        wanted: SiteSettings,
        env: &BTreeMap<String, String>,
    ) -> io::Result<()> {
        if wanted == self.settings {
            return self.tell_apt(root, env);
        }
        self.withdraw(root);
        if wanted.is_empty() {
            return Ok(());
        }
        // From here on there may be something to take out again.
        self.settings = wanted;
        let directory = home(root).join(DIRECTORY);
        fs::create_dir_all(&directory)?;
        let mut bundle = None;
        let mut java = None;
        if !self.settings.authorities.is_empty() {
            let pem: String = self.settings.authorities.iter().map(|a| &*a.pem).collect();
            fs::write(directory.join(AUTHORITIES), &pem)?;
            bundle = Some(store::add(
                root,
                &self.settings.authorities,
                &mut self.store,
            )?);
            if java::is_there(root, env)
                && let Some(bundle) = &bundle
            {
                let store = java::Keystore::of_pem(&fs::read(store::beneath(root, bundle))?);
                fs::write(directory.join(JAVA_STORE), store.encode())?;
                java = Some(PathBuf::from(HOME).join(DIRECTORY).join(JAVA_STORE));
            }
        }
        self.tell_apt(root, env)?;
        self.variables = variables::of(&variables::Facts {
            bundle: bundle.as_deref(),
            authorities: &Path::new(HOME).join(DIRECTORY).join(AUTHORITIES),
            java_store: java.as_deref(),
            has_java: java::is_there(root, env),
            proxy: self.settings.proxy.as_ref(),
        });
        Ok(())
    }

    /// Tells apt of the proxy: programs started by `sudo` or `cron` lack the sandbox's environment,
    /// and apt is mostly one. Where the environment names a proxy of its own, that one counts; so does
    /// that of a single command, since apt is told of a program that looks for it.
    fn tell_apt(&mut self, root: &Path, env: &BTreeMap<String, String>) -> io::Result<()> {
        let path = root.join(APT).join(APT_FILE);
        let proxy = self.settings.proxy.as_ref();
        let proxy = proxy.filter(|_| !variables::names_proxy(env));
        match (proxy, self.apt_knows) {
            (Some(proxy), false) if root.join(APT).is_dir() => {
                // From here on there may be something to take out again.
                self.apt_knows = true;
                let program = root.join(APT_PROGRAM);
                fs::write(&program, variables::apt_program(proxy))?;
                fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
                let program = Path::new("/").join(APT_PROGRAM);
                fs::write(path, variables::apt(proxy, &program))?;
            }
            (None, true) => {
                fs::remove_file(path)?;
                fs::remove_file(root.join(APT_PROGRAM))?;
                self.apt_knows = false;
            }
            _ => {}
        }
        Ok(())
    }

    /// Takes out what was put in. What cannot be removed stays.
    pub fn withdraw(&mut self, root: &Path) {
        let settings = std::mem::take(&mut self.settings);
        if settings.is_empty() {
            return;
        }
        self.variables.clear();
        store::remove(root, &settings.authorities, std::mem::take(&mut self.store));
        if std::mem::take(&mut self.apt_knows) {
            let _ = fs::remove_file(root.join(APT).join(APT_FILE));
            let _ = fs::remove_file(root.join(APT_PROGRAM));
        }
        let _ = fs::remove_dir_all(home(root).join(DIRECTORY));
    }
}

fn home(root: &Path) -> PathBuf {
    store::beneath(root, Path::new(HOME))
}

#[cfg(test)]
mod tests;
