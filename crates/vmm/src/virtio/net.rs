//! (docs follow)
