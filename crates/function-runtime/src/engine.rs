//! The two Wasmtime engines: one compiles modules, in the compiler's process; the other runs
//! compiled modules, in a tenant's process.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other. The *reset* cleans a slot after a request. An *epoch* is a short interval, counted by the
//! thread in `epoch_ticker`. A *fiber* is a stack of its own on which a guest can yield to other
//! requests. A guest on a fiber yields when an epoch ends.

use crate::artifact::Digest;
#[cfg(feature = "fast-reset")]
use crate::fast_reset;
use jiffy_proto::function::{MAX_FUNCTION_MEMORY_MIB, MEMORIES_PER_SLOT, SlotReset, TenantLimits};
use std::hash::{Hash, Hasher};
use wasmtime::{Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

/// Stack size of a guest in bytes. Deeper recursion traps.
const GUEST_STACK_BYTES: usize = 512 << 10;
/// Stack size of a fiber in bytes: the guest's stack plus the host calls on top of it.
const FIBER_STACK_BYTES: usize = 2 << 20;
/// Number of bytes of a memory, and of a table, that are cleared with `memset` at the end of a
/// request. The rest is released to the kernel. `bench/functions` measures requests by the number
/// of pages that they write.
const MEMSET_BYTES: usize = 64 << 10;
/// Maximum number of elements of a table.
pub(crate) const MAX_TABLE_ELEMENTS: usize = 20_000;
/// Maximum number of core instances, memories and tables of a component.
pub(crate) const MAX_CORE_INSTANCES: u32 = 32;
pub(crate) const MAX_MEMORIES: u32 = 4;
pub(crate) const MAX_TABLES: u32 = 16;
/// Maximum number of memories and tables of a core module.
pub(crate) const MAX_MODULE_MEMORIES: u32 = 1;
pub(crate) const MAX_MODULE_TABLES: u32 = 4;
/// Maximum size of a core instance's record in bytes, without its memory and tables.
pub(crate) const MAX_INSTANCE_BYTES: usize = 1 << 20;

/// Revision of this package's changes to modules before and after their compilation. A new value
/// forces the recompilation of functions.
const CODE_REVISION: u8 = 2;

/// Settings that affect machine code. Both engines must use the same values.
fn common() -> Config {
    let mut config = Config::new();
    config
        // Inserts checks of the epoch into machine code. A guest yields at these checks.
        .epoch_interruption(true)
        .max_wasm_stack(GUEST_STACK_BYTES)
        .async_stack_size(FIBER_STACK_BYTES)
        // The first write to a page copies it from the module's image. Other pages stay shared.
        .memory_init_cow(true)
        // Only debuggers and offsets in backtraces use these tables. Each function would have a
        // copy.
        .native_unwind_info(false)
        .generate_address_map(false)
        // These features go beyond WebAssembly 2.0 and enlarge the attack surface.
        .shared_memory(false)
        .wasm_memory64(false);
    config
}

/// Creates the engine that compiles.
pub fn compiling() -> wasmtime::Result<Engine> {
    Engine::new(&common())
}

/// Methods of resetting a slot that this build supports.
pub const RESETS: &[SlotReset] = if cfg!(feature = "fast-reset") {
    &[SlotReset::Strict, SlotReset::Fast]
} else {
    &[SlotReset::Strict]
};

/// Creates the engine that runs requests. The engine maps the pool of slots (address space that
/// requests use one after the other), and must be created before the process is confined.
///
/// # Errors
///
/// Fails if the reset is not one of [`RESETS`], or if the kernel does not support it.
pub fn running(limits: &TenantLimits) -> wasmtime::Result<Engine> {
    match limits.reset {
        SlotReset::Strict => running_with(limits, MEMSET_BYTES),
        #[cfg(feature = "fast-reset")]
        SlotReset::Fast => fast_reset::engine(pool(limits), pooled),
        #[cfg(not(feature = "fast-reset"))]
        SlotReset::Fast => Err(wasmtime::Error::msg(
            "the reset `fast` is not available: this program was built without the feature \
             `fast-reset`; use the reset `strict`",
        )),
    }
}

/// Creates an engine with the reset `strict` that clears the first `memset_bytes` of a memory
/// instead of releasing them.
pub fn running_with(limits: &TenantLimits, memset_bytes: usize) -> wasmtime::Result<Engine> {
    let mut pool = pool(limits);
    pool.linear_memory_keep_resident(memset_bytes)
        .table_keep_resident(memset_bytes)
        // Wasmtime's own page scan misses pages that the kernel migrates or swaps out.
        .pagemap_scan(Enabled::No);
    pooled(pool)
}

/// Returns the settings of the pool of slots.
fn pool(limits: &TenantLimits) -> PoolingAllocationConfig {
    let slots = limits.slots.max(1);
    let mut pool = PoolingAllocationConfig::new();
    // A component may have several core instances, memories and tables per request. The totals are
    // averages per slot: one component may use more, up to its own maximum below.
    pool.total_core_instances(slots.saturating_mul(8))
        .total_component_instances(slots)
        .total_memories(slots.saturating_mul(MEMORIES_PER_SLOT))
        .total_tables(slots.saturating_mul(4))
        // The validation of a new version runs on a stack without holding a slot.
        .total_stacks(slots.saturating_add(8))
        .max_core_instances_per_component(MAX_CORE_INSTANCES)
        .max_memories_per_component(MAX_MEMORIES)
        .max_tables_per_component(MAX_TABLES)
        .max_memories_per_module(MAX_MODULE_MEMORIES)
        .max_tables_per_module(MAX_MODULE_TABLES)
        .max_core_instance_size(MAX_INSTANCE_BYTES)
        .table_elements(MAX_TABLE_ELEMENTS)
        .max_memory_size(usize::try_from(MAX_FUNCTION_MEMORY_MIB).unwrap_or(512) << 20);
    pool
}

fn pooled(pool: PoolingAllocationConfig) -> wasmtime::Result<Engine> {
    let mut config = common();
    config
        // All code was compiled by another process and checked before it was loaded.
        .enable_compiler(false)
        .allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    Engine::new(&config)
}

/// Passes the input of a `Hash` implementation to BLAKE3, because a hash of 64 bits is too short
/// for a fingerprint.
#[derive(Default)]
struct DigestHasher(blake3::Hasher);

impl Hasher for DigestHasher {
    fn finish(&self) -> u64 {
        // Not used: the digest is read from the inner hasher.
        0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
}

/// Returns the fingerprint of everything that determines the machine code of a module: version of
/// Wasmtime, processor and settings. `compiling` must come from [`compiling`], because the settings
/// of the compiler are included; the engine of [`running`] has no compiler.
#[must_use]
pub fn fingerprint(compiling: &Engine) -> Digest {
    let mut hasher = DigestHasher::default();
    compiling.precompile_compatibility_hash().hash(&mut hasher);
    hasher.write_u8(CODE_REVISION);
    *hasher.0.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_running_engine_loads_code_of_the_compiling_engine() {
        let limits = TenantLimits {
            slots: 1,
            ..TenantLimits::default()
        };
        let running = running(&limits).unwrap();
        let compiling = compiling().unwrap();
        let code = wasmtime::Module::new(&compiling, b"\0asm\x01\0\0\0")
            .unwrap()
            .serialize();
        // SAFETY: the line above compiled the code.
        unsafe { wasmtime::Module::deserialize(&running, code.unwrap()) }.unwrap();
    }

    #[cfg(not(feature = "fast-reset"))]
    #[test]
    fn the_reset_fast_is_rejected_without_its_feature() {
        let limits = TenantLimits {
            reset: SlotReset::Fast,
            ..TenantLimits::default()
        };
        let error = running(&limits).err().unwrap().to_string();
        assert!(error.contains("`fast-reset`"), "{error}");
    }
}
