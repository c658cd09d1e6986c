//! Files of compiled modules: a header, followed by machine code as serialized by Wasmtime. The
//! header is checked before any other part of the file is used.
//!
//! The *world* of a module is the interface between the module and its host. The *engine* is
//! Wasmtime with its settings. Its *fingerprint* is a digest of everything that determines the
//! machine code.
//!
//! Wasmtime trusts the data that it deserializes: a forged file would run as code of the process.
//! The header contains the engine's fingerprint, the owner and the code's digest. The loader also
//! requires the digest of the whole file, which the daemon recorded after the compilation.

use jiffy_proto::function::World;

/// Magic number of the file. The digit is the version of the format.
const MAGIC: &[u8; 8] = b"JIFFYFN1";
/// Length of a digest in bytes.
pub const DIGEST_BYTES: usize = 32;
/// Length of the header in bytes: magic, world, reserved, engine, owner, module, digest and length
/// of the code.
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
    /// Digest of the owner's name.
    pub owner: Digest,
    /// Digest of the module before compilation.
    pub module: Digest,
}

/// Error: the file cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArtifactError {
    /// The file is truncated or has another format.
    #[error("the compiled module is truncated or has another format: compile it again")]
    Format,
    /// The bytes differ from the output of the compiler.
    #[error("the digest of the compiled module does not match: compile it again")]
    Digest,
    /// Compiled by another version of Jiffy or for another processor.
    #[error(
        "the compiled module was compiled by another version or for another processor: compile it again"
    )]
    Engine,
    /// Compiled for another owner.
    #[error("the compiled module belongs to another owner")]
    Owner,
}

/// Returns the digest of an owner's name.
#[must_use]
pub fn owner_digest(owner: &str) -> Digest {
    blake3::derive_key(
        "jiffy functions 2026 owner of a compiled module",
        owner.as_bytes(),
    )
}

/// Prepends the header to machine code.
#[must_use]
pub fn encode(header: &ArtifactHeader, code: &[u8]) -> Vec<u8> {
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

/// Splits a file into header and code. Checks the format of the header, and length and digest of
/// the code.
pub fn parse(file: &[u8]) -> Result<(ArtifactHeader, &[u8]), ArtifactError> {
    let (header, code) = file
        .split_at_checked(HEADER_BYTES)
        .ok_or(ArtifactError::Format)?;
    let rest = header.strip_prefix(MAGIC).ok_or(ArtifactError::Format)?;
    let (kind, rest) = rest.split_at_checked(8).ok_or(ArtifactError::Format)?;
    // Reserved bytes must be zero, so that a later version can give them a meaning.
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

/// Checks that this process may load the file, and returns its header and machine code.
pub fn check<'a>(
    file: &'a [u8],
    digest: &Digest,
    engine: &Digest,
    owner: &Digest,
) -> Result<(ArtifactHeader, &'a [u8]), ArtifactError> {
    // Check the digest first, so that the parser never reads bytes that the daemon did not record.
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
    fn parse_returns_the_encoded_header_and_code() {
        let file = encode(&HEADER, b"code");
        assert_eq!(parse(&file).unwrap(), (HEADER, &b"code"[..]));
        assert!(check(&file, &digest(&file), &[1; 32], &[2; 32]).is_ok());
    }

    #[test]
    fn changed_and_truncated_files_are_rejected() {
        let file = encode(&HEADER, b"code");
        let recorded = digest(&file);
        for at in 0..file.len() {
            let mut forged = file.clone();
            forged[at] ^= 0x10;
            let error = check(&forged, &recorded, &[1; 32], &[2; 32]).unwrap_err();
            assert_eq!(error, ArtifactError::Digest);
            assert!(parse(&file[..at]).is_err());
        }
    }

    #[test]
    fn files_of_another_engine_or_owner_are_rejected() {
        let file = encode(&HEADER, b"code");
        let recorded = digest(&file);
        let error = |engine, owner| check(&file, &recorded, &engine, &owner).unwrap_err();
        assert_eq!(error([9; 32], [2; 32]), ArtifactError::Engine);
        assert_eq!(error([1; 32], [9; 32]), ArtifactError::Owner);
    }
}
