//! Wasmtime engines: one that compiles, and one that runs what was compiled.

use crate::artifact::Digest;
#[cfg(feature = "fast-reset")]
use crate::fast_reset;
use jiffy_proto::function::{MAX_FUNCTION_MEMORY_MIB, MEMORIES_PER_SLOT, SlotReset, TenantLimits};
use std::hash::{Hash, Hasher};
use wasmtime::{Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

/// Stack of a guest in bytes. Deeper recursion traps.
const GUEST_STACK_BYTES: usize = 512 << 10;
/// Stack of a fiber in bytes: the guest's, and the host's calls on top.
const FIBER_STACK_BYTES: usize = 2 << 20;
/// Bytes of a memory, and of a table, that are set to zero at the end of a request; the rest is
/// given back to the kernel. bench/functions measures it.
const MEMSET_BYTES: usize = 64 << 10;
/// Largest table in elements.
pub(crate) const MAX_TABLE_ELEMENTS: usize = 20_000;
/// Core instances, memories and tables that the parts of one component may have.
pub(crate) const MAX_CORE_INSTANCES: u32 = 32;
pub(crate) const MAX_MEMORIES: u32 = 4;
pub(crate) const MAX_TABLES: u32 = 16;
/// Memories and tables that one core module may define.
pub(crate) const MAX_MODULE_MEMORIES: u32 = 1;
pub(crate) const MAX_MODULE_TABLES: u32 = 4;
/// Largest record of a core instance in bytes, beside its memory and tables.
pub(crate) const MAX_INSTANCE_BYTES: usize = 1 << 20;

/// Number that changes with what this package does to modules before and after their compilation,
/// so that functions are compiled anew.
const CODE_REVISION: u8 = 2;

/// Settings that decide about machine code; equal in both engines.
fn common() -> Config {
    let mut config = Config::new();
    config
        .epoch_interruption(true)
        .max_wasm_stack(GUEST_STACK_BYTES)
        .async_stack_size(FIBER_STACK_BYTES)
        .memory_init_cow(true)
        // Tables that only debuggers and offsets in backtraces need: each function has a copy.
        .native_unwind_info(false)
        .generate_address_map(false)
        // Features beyond WebAssembly 2.0 that widen the compiler's and the runtime's surface.
        .shared_memory(false)
        .wasm_memory64(false);
    config
}

/// Engine that compiles.
pub fn compiling() -> wasmtime::Result<Engine> {
    Engine::new(&common())
}

/// Resets that this build supports.
pub const RESETS: &[SlotReset] = match cfg!(feature = "fast-reset") {
    true => &[SlotReset::Strict, SlotReset::Fast],
    false => &[SlotReset::Strict],
};

/// Creates the engine that runs requests in a pool of slots. The engine maps the pool, and must be
/// created before the process is confined.
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

fn pool(limits: &TenantLimits) -> PoolingAllocationConfig {
    let slots = limits.slots.max(1);
    let mut pool = PoolingAllocationConfig::new();
    pool.total_core_instances(slots.saturating_mul(8))
        .total_component_instances(slots)
        .total_memories(slots.saturating_mul(MEMORIES_PER_SLOT))
        .total_tables(slots.saturating_mul(4))
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
        .enable_compiler(false)
        .allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    Engine::new(&config)
}

/// Hasher that keeps all of its input.
#[derive(Default)]
struct DigestHasher(blake3::Hasher);

impl Hasher for DigestHasher {
    fn finish(&self) -> u64 {
        0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
}

/// Fingerprint of everything that machine code depends on: version, processor, settings. The engine
/// must be of [`compiling`]; that of [`running`] has no compiler, whose settings count.
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
    fn the_running_engine_loads_what_the_other_compiled() {
        let limits = TenantLimits {
            slots: 1,
            ..TenantLimits::default()
        };
        let running = running(&limits).unwrap();
        let compiling = compiling().unwrap();
        let code = wasmtime::Module::new(&compiling, b"\0asm\x01\0\0\0")
            .unwrap()
            .serialize();
        // SAFETY: it was compiled on the line above.
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
