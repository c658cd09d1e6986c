//! Detection of damage.

use super::*;

#[test]
fn damaged_small_files_and_missing_layers_are_found_without_reading_layers() {
    let (_dir, store) = store();
    put(&store, "a", None).unwrap();
    let dir = store.root().join("a");
    let whole = |name: &str| fs::read(dir.join(name)).unwrap();
    let damage = || store.find_damage("a").map(|e| e.to_string());
    assert_eq!(damage(), None);
    store.get("a").unwrap().write_checksums().unwrap();
    assert_eq!(damage(), None);
    for name in ["state.bin", "memory.index", "manifest.json"] {
        let before = whole(name);
        let mut flipped = before.clone();
        flipped[2] ^= 1;
        fs::write(dir.join(name), flipped).unwrap();
        assert!(damage().unwrap().contains(name), "{name}");
        fs::write(dir.join(name), before).unwrap();
        assert_eq!(damage(), None);
    }
    for name in ["disk0.layer", "memory.layer", "state.bin", "manifest.json"] {
        let before = whole(name);
        fs::remove_file(dir.join(name)).unwrap();
        assert!(damage().unwrap().contains(name), "{name}");
        fs::write(dir.join(name), before).unwrap();
        assert_eq!(damage(), None);
    }
    fs::remove_dir_all(&dir).unwrap();
    assert!(damage().is_some());
}
