//! The `jiffy-vmm` process.

fn main() {}
