//! Worlds: the interfaces between a module and its host. The world of a module is detected from its
//! file.

use jiffy_proto::function::World;
use wasmtime::component::Component;
use wasmtime::{ExternType, Module, ValType};

/// Maximum number of characters of an import in an error.
const MAX_IMPORT_CHARS: usize = 200;

/// Error: the file has no known world.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// The file is not binary WebAssembly.
    #[error("the file is not a WebAssembly module or component in binary form")]
    NotWasm,
    /// A core module lacks an export.
    #[error("a module of jiffy-core/1 must export {0}; see docs/functions.md")]
    MissingExport(&'static str),
    /// A core module has an import of an unknown module.
    #[error("a module of jiffy-core/1 may import only from wasi_snapshot_preview1, not {0}")]
    Import(String),
    /// A component does not export the handler.
    #[error("a component must export wasi:http/incoming-handler@0.2 (world wasi:http/proxy)")]
    NoHandler,
}

/// Functions of jiffy-core/1 and their numbers of parameters. All parameters have the type `i32`,
/// and each function returns one `i32`.
pub(crate) const CORE_FUNCTIONS: [(&str, usize); 3] =
    [("jiffy_buf", 1), ("jiffy_handle", 2), ("jiffy_out", 0)];
/// Module name of the imports of jiffy-core/1.
pub(crate) const WASI_MODULE: &str = "wasi_snapshot_preview1";
/// Name of the exported memory.
pub(crate) const CORE_MEMORY: &str = "memory";

/// Detects the world from the first bytes of a file.
pub(crate) fn detect(module: &[u8]) -> Result<World, WorldError> {
    World::detect(module).ok_or(WorldError::NotWasm)
}

/// Checks the imports and exports of a core module.
pub(crate) fn check_core(module: &Module) -> Result<(), WorldError> {
    let mut imports = module.imports();
    if let Some(import) = imports.find(|import| import.module() != WASI_MODULE) {
        let name = format!("{}.{}", import.module(), import.name());
        return Err(WorldError::Import(
            name.chars().take(MAX_IMPORT_CHARS).collect(),
        ));
    }
    match module.get_export(CORE_MEMORY) {
        Some(ExternType::Memory(memory)) if !memory.is_64() && !memory.is_shared() => {}
        _ => {
            return Err(WorldError::MissingExport(
                "a 32-bit memory named \"memory\"",
            ));
        }
    }
    for (name, parameters) in CORE_FUNCTIONS {
        let is_i32 = |t: ValType| matches!(t, ValType::I32);
        let fits = match module.get_export(name) {
            Some(ExternType::Func(f)) => {
                f.params().len() == parameters
                    && f.params().all(is_i32)
                    && f.results().len() == 1
                    && f.results().all(is_i32)
            }
            _ => false,
        };
        if !fits {
            return Err(WorldError::MissingExport(match name {
                "jiffy_buf" => "jiffy_buf(i32) -> i32",
                "jiffy_handle" => "jiffy_handle(i32, i32) -> i32",
                _ => "jiffy_out() -> i32",
            }));
        }
    }
    Ok(())
}

/// Checks that a component exports the handler. Linking checks its imports.
pub(crate) fn check_http(component: &Component) -> Result<(), WorldError> {
    let engine = component.engine();
    let component_type = component.component_type();
    let mut names = component_type.exports(engine).map(|(name, _)| name);
    if names.any(|name| name.starts_with("wasi:http/incoming-handler@0.2.")) {
        Ok(())
    } else {
        Err(WorldError::NoHandler)
    }
}
