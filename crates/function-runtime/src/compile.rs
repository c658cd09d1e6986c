//! `jiffy-functions compile`: compiles one module in a confined process, since modules are
//! untrusted. The *world* of a module is the interface between the module and its host.

use crate::artifact::{self, ArtifactHeader};
use crate::jail::{self, ProcessLimits};
use crate::seccomp;
use crate::world::{self, WorldError};
use crate::{core_world, engine, http_world, symbol_table};
use jiffy_component_merge::{Limits, merge_core_modules, merge_data_segments};
use jiffy_proto::function::{CompileLimits, MAX_MODULE_BYTES, World};
use std::io::Read;
use wasmtime::component::Component;
use wasmtime::{Engine, Module};

/// Error: the module was not compiled. The module's author receives the message.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The module exceeds the size limit.
    #[error("the module is larger than {} MiB", MAX_MODULE_BYTES >> 20)]
    TooLarge,
    /// The file has no known world.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The module is not valid, or it imports unknown functions.
    #[error("the module is not valid: {0}")]
    Invalid(String),
    /// The input cannot be read.
    #[error("cannot read the module: {0}")]
    Read(#[from] std::io::Error),
}

/// Converts an error of Wasmtime, truncated to 2,000 characters.
fn invalid(error: wasmtime::Error) -> CompileError {
    CompileError::Invalid(format!("{error:#}").chars().take(2000).collect())
}

/// Maximum number of open descriptors of a compiler.
const MAX_DESCRIPTORS: u64 = 16;
/// Maximum length in bytes of the temporary file to which the daemon redirects the compiler's error
/// messages.
const MAX_MESSAGE_BYTES: u64 = 1 << 20;

/// Closes all descriptors above standard error, creates the engine of a compiler, and confines the
/// process if `jailed`. The daemon enforces the limit of elapsed time. Must be called before the
/// process creates another thread.
pub fn prepare(jailed: bool, limits: &CompileLimits) -> std::io::Result<Engine> {
    // SAFETY: nothing in this process owns a descriptor above standard error yet.
    unsafe { jiffy_confinement::close_descriptors(3) }?;
    let engine = engine::compiling().map_err(std::io::Error::other)?;
    if jailed {
        jail::confine(&ProcessLimits {
            descriptors: MAX_DESCRIPTORS,
            cpu_s: Some(limits.cpu_s),
            ends_with_starter: true,
            address_space: Some(limits.memory_bytes),
            file_bytes: MAX_MESSAGE_BYTES,
        })?;
        seccomp::confine_compiler()?;
    }
    Ok(engine)
}

/// Reads a module and enforces the size limit.
pub fn read(source: impl Read) -> Result<Vec<u8>, CompileError> {
    let mut module = Vec::new();
    // One byte more than the maximum, so that a larger module is noticed.
    source.take(MAX_MODULE_BYTES + 1).read_to_end(&mut module)?;
    match u64::try_from(module.len()) {
        Ok(length) if length <= MAX_MODULE_BYTES => Ok(module),
        _ => Err(CompileError::TooLarge),
    }
}

/// Compiles a component. Its core modules are merged first if possible, which makes instances
/// cheaper.
fn compile_component(compiler: &Engine, component: &[u8]) -> wasmtime::Result<Component> {
    let limits = Limits {
        memories: engine::MAX_MODULE_MEMORIES,
        tables: engine::MAX_MODULE_TABLES,
        instance_bytes: engine::MAX_INSTANCE_BYTES,
    };
    if let Some(merged) = merge_core_modules(component, &limits)
        // The merge is an optimisation. A component that cannot be merged is compiled as it is.
        && let Ok(component) = Component::from_binary(compiler, &merge_data_segments(&merged))
    {
        return Ok(component);
    }
    // Compile the original component, so that errors use its names.
    Component::from_binary(compiler, &merge_data_segments(component))
}

/// Compiles a module of `owner` to the file format that [`artifact::check`] reads.
pub fn compile(engine: &Engine, module: &[u8], owner: &str) -> Result<Vec<u8>, CompileError> {
    let world = world::detect(module)?;
    let code = match world {
        World::Core => {
            let merged = merge_data_segments(module);
            let module = Module::from_binary(engine, &merged).map_err(invalid)?;
            world::check_core(&module)?;
            // Linking detects unknown imports. The result is not used.
            core_world::prepare(&module).map_err(invalid)?;
            module.serialize().map_err(invalid)?
        }
        World::Http => {
            let component = compile_component(engine, module).map_err(invalid)?;
            world::check_http(&component)?;
            let linker = http_world::linker(engine).map_err(invalid)?;
            http_world::prepare(&linker, &component).map_err(invalid)?;
            component.serialize().map_err(invalid)?
        }
    };
    let header = ArtifactHeader {
        world,
        engine: engine::fingerprint(engine),
        owner: artifact::owner_digest(owner),
        module: *blake3::hash(module).as_bytes(),
    };
    Ok(artifact::encode(&header, &symbol_table::strip(code)))
}
