//! Random ids and secrets of new sandboxes, keys, snapshots and templates.

/// Characters of ids. They exclude `-`, which separates port and id in host names, and the
/// ambiguous characters `0`, `1`, `l` and `o`.
const ID_ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
/// Length of the id of a key, sandbox, snapshot or template.
const ID_LENGTH: usize = 20;

/// Error of creating an id or secret.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The random number generator of the host failed.
    #[error("cannot read random bytes from the host: {0}")]
    Entropy(#[from] getrandom::Error),
}

/// Returns random bytes from the host's generator.
pub fn random_bytes<const N: usize>() -> Result<[u8; N], IdentityError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// Returns a new id: 20 letters and digits with 100 random bits.
pub fn new_id() -> Result<String, IdentityError> {
    let bytes: [u8; ID_LENGTH] = random_bytes()?;
    // 256 is a multiple of 32, so all characters are equally likely.
    Ok(bytes
        .iter()
        .map(|b| char::from(ID_ALPHABET[usize::from(b % 32)]))
        .collect())
}

/// Returns a new secret: 40 hexadecimal digits with 160 random bits.
pub fn new_token() -> Result<String, IdentityError> {
    let bytes: [u8; 20] = random_bytes()?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Returns whether `word` has the form of an id.
pub fn is_id(word: &str) -> bool {
    word.len() == ID_LENGTH && word.bytes().all(|b| ID_ALPHABET.contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_fresh_and_fit_a_host_name() {
        let ids: Vec<String> = (0..100).map(|_| new_id().unwrap()).collect();
        for (i, id) in ids.iter().enumerate() {
            assert!(is_id(id), "{id}");
            assert!(!ids[..i].contains(id));
        }
    }
}
