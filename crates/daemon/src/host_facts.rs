//! Properties of this host, such as versions of programs. A member of a fleet compares them when a
//! host joins, because snapshots must work on all hosts.

use jiffy_engines::Programs;
use jiffy_fleet::HostFacts;
use jiffy_image::{Home, Kernel};
use std::fs::File;

/// Characters of a digest in messages.
const DIGEST_CHARACTERS: usize = 12;

/// Returns the properties of this host and the installed programs.
pub fn host_facts(home: &Home) -> HostFacts {
    let kernel = Kernel::choose().and_then(|kernel| kernel.open(home));
    HostFacts {
        kernel: kernel.ok().map(|file| short(&file.sha256)),
        gvisor: Programs::find()
            .ok()
            .and_then(|programs| programs.gvisor.ok())
            .and_then(|path| File::open(path).ok())
            .and_then(|file| {
                let mut hasher = blake3::Hasher::new();
                hasher.update_reader(file).ok()?;
                Some(short(&hasher.finalize().to_hex()))
            }),
        ..HostFacts::new(env!("CARGO_PKG_VERSION"))
    }
}

fn short(digest: &str) -> String {
    digest.chars().take(DIGEST_CHARACTERS).collect()
}
