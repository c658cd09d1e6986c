//! Compiled modules on disk: a header, checked before anything behind it is used, then machine code
//! as Wasmtime serializes it.
//!
//! Wasmtime trusts what it deserializes: a forged file runs as code of the process. The header
//! names the engine, the owner and the code's digest. The loader also demands the digest of the
//! file as a whole, which the daemon noted when it was compiled.

use jiffy_proto::function::World;

/// First bytes of the file; the digit is the version of the format.
const MAGIC: &[u8; 8] = b"JIFFYFN1";
/// Bytes of a digest.
pub const DIGEST_BYTES: usize = 32;
/// Bytes of the header: magic, world, reserved, engine, owner, module, code's digest and length.
pub const HEADER_BYTES: usize = 8 + 1 + 7 + 4 * DIGEST_BYTES + 8;

/// Digest (BLAKE3).
pub type Digest = [u8; DIGEST_BYTES];

/// Header of a compiled module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArtifactHeader {
    /// World of the module.
    pub world: World,
    /// Fingerprint of the engine that compiled it.
    pub engine: Digest,
    /// Digest of its owner's name.
    pub owner: Digest,
    /// Digest of the module before compilation.
    pub module: Digest,
}

/// File that is not loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArtifactError {
    /// Cut off, or of another format.
    #[error("the compiled module is cut off or of another format: compile it again")]
    Format,
    /// Other bytes than those that were compiled.
    #[error("the compiled module is not the file that was compiled: its digest differs")]
    Digest,
    /// Another version of Jiffy, or another processor.
    #[error(
        "the compiled module was made by another version or for another processor: compile it again"
    )]
    Engine,
    /// Compiled for another owner.
    #[error("the compiled module belongs to another owner")]
    Owner,
}

/// Digest of an owner's name.
#[must_use]
pub fn owner_digest(owner: &str) -> Digest {
    blake3::derive_key(
        "jiffy functions 2026 owner of a compiled module",
        owner.as_bytes(),
    )
}

/// Puts the header before machine code.
#[must_use]
pub fn seal(header: &ArtifactHeader, code: &[u8]) -> Vec<u8> {
    let mut file = Vec::with_capacity(HEADER_BYTES + code.len());
    file.extend_from_slice(MAGIC);
    file.push(match header.world {
        World::Core => 1,
        World::Http => 2,
    });
    file.extend_from_slice(&[0; 7]);
    for digest in [&header.engine, &header.owner, &header.module] {
        file.extend_from_slice(digest);
    }
    file.extend_from_slice(blake3::hash(code).as_bytes());
    let length = u64::try_from(code.len()).unwrap_or(u64::MAX);
    file.extend_from_slice(&length.to_le_bytes());
    file.extend_from_slice(code);
    file
}

/// Splits a file into header and code, both checked for integrity.
pub fn parse(file: &[u8]) -> Result<(ArtifactHeader, &[u8]), ArtifactError> {
    let (header, code) = file
        .split_at_checked(HEADER_BYTES)
        .ok_or(ArtifactError::Format)?;
    let rest = header.strip_prefix(MAGIC).ok_or(ArtifactError::Format)?;
    let (kind, rest) = rest.split_at_checked(8).ok_or(ArtifactError::Format)?;
    let world = match kind {
        [1, 0, 0, 0, 0, 0, 0, 0] => World::Core,
        [2, 0, 0, 0, 0, 0, 0, 0] => World::Http,
        _ => return Err(ArtifactError::Format),
    };
    let mut digests = [[0; DIGEST_BYTES]; 4];
    let mut rest = rest;
    for digest in &mut digests {
        let (head, tail) = rest
            .split_at_checked(DIGEST_BYTES)
            .ok_or(ArtifactError::Format)?;
        digest.copy_from_slice(head);
        rest = tail;
    }
    let length = rest
        .try_into()
        .map(u64::from_le_bytes)
        .map_err(|_| ArtifactError::Format)?;
    if u64::try_from(code.len()) != Ok(length) {
        return Err(ArtifactError::Format);
    }
    let [engine, owner, module, digest] = digests;
    // A comparison of `Hash` takes constant time.
    if blake3::hash(code) != digest {
        return Err(ArtifactError::Digest);
    }
    let header = ArtifactHeader {
        world,
        engine,
        owner,
        module,
    };
    Ok((header, code))
}

/// Checks a file against what a process may load, and returns its world and machine code.
pub fn check<'a>(
    file: &'a [u8],
    digest: &Digest,
    engine: &Digest,
    owner: &Digest,
) -> Result<(ArtifactHeader, &'a [u8]), ArtifactError> {
    if blake3::hash(file) != *digest {
        return Err(ArtifactError::Digest);
    }
    let (header, code) = parse(file)?;
    if header.engine != *engine {
        return Err(ArtifactError::Engine);
    }
    if header.owner != *owner {
        return Err(ArtifactError::Owner);
    }
    Ok((header, code))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: ArtifactHeader = ArtifactHeader {
        world: World::Http,
        engine: [1; 32],
        owner: [2; 32],
        module: [3; 32],
    };

    fn digest(file: &[u8]) -> Digest {
        *blake3::hash(file).as_bytes()
    }

    #[test]
    fn a_sealed_file_is_what_was_sealed() {
        let file = seal(&HEADER, b"code");
        assert_eq!(parse(&file).unwrap(), (HEADER, &b"code"[..]));
        assert!(check(&file, &digest(&file), &[1; 32], &[2; 32]).is_ok());
    }

    #[test]
    fn a_file_with_any_bit_flipped_or_byte_cut_is_refused() {
        let file = seal(&HEADER, b"code");
        let known = digest(&file);
        for at in 0..file.len() {
            let mut forged = file.clone();
            forged[at] ^= 0x10;
            let refused = check(&forged, &known, &[1; 32], &[2; 32]).unwrap_err();
            assert_eq!(refused, ArtifactError::Digest);
            assert!(parse(&file[..at]).is_err());
        }
    }

    #[test]
    fn a_file_of_another_engine_or_owner_is_refused() {
        let file = seal(&HEADER, b"code");
        let known = digest(&file);
        let refused = |engine, owner| check(&file, &known, &engine, &owner).unwrap_err();
        assert_eq!(refused([9; 32], [2; 32]), ArtifactError::Engine);
        assert_eq!(refused([1; 32], [9; 32]), ArtifactError::Owner);
    }
}
